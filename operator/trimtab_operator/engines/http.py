"""One HTTP request to a pod, with a deadline for all of it and a limit on what is read. Nothing that may have been done
is sent again; no redirects.

What a pod answers is a stranger's word: it may be slow, endless or nonsense, and must never hold up the others. Pods
are asked by the thousand: with aiohttp a request costs a seventh of the processor time that it costs with httpx.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp

MAX_BODY_BYTES = 1 << 20  # a full /metrics page of an engine is about 100 KB
DEADLINE_SECONDS = 5.0  # for a whole request, unless the caller says otherwise
CONNECT_SECONDS = 2.0  # a pod that is gone does not answer at all
AS_IT_IS = {"Accept-Encoding": "identity"}  # a few bytes can be packed that fill all memory when they are unpacked
MAX_CONNECTIONS = 2000  # in use at once, over all resources: each of them takes its share alone (engines/poller.py)
KEEP_ALIVE_SECONDS = 15.0  # an idle connection, to the next look and a little longer


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer, whatever its status."""

    status: int
    body: bytes


@dataclass(frozen=True, slots=True)
class Unreachable:
    """No usable answer: refused, timed out, cut off, too large or not what was asked for. `message` says which."""

    message: str


@dataclass(frozen=True, slots=True)
class TooSlow(Unreachable):
    """Nothing came, or not all of it, before the deadline."""


@dataclass(frozen=True, slots=True)
class TooLarge(Unreachable):
    """More came than is read."""


def new_client() -> aiohttp.ClientSession:
    """The client for pods: straight to their addresses, without a proxy from the environment."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(
            limit=MAX_CONNECTIONS, keepalive_timeout=KEEP_ALIVE_SECONDS, enable_cleanup_closed=False
        ),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),  # `fetch` sets that of the whole
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        trust_env=False,
    )


def pod_url(address: str, port: int) -> str:
    """`http://ADDRESS:PORT`, with brackets around an IPv6 address."""
    host = f"[{address}]" if ":" in address else address
    return f"http://{host}:{port}"


async def fetch(
    http: aiohttp.ClientSession,
    method: str,
    url: str,
    *,
    headers: Mapping[str, str] | None = None,
    json: object = None,
    deadline_seconds: float = DEADLINE_SECONDS,
    max_bytes: int = MAX_BODY_BYTES,
) -> Reply | Unreachable:
    """Make one request. Never raises for what the other side does."""
    asked = {**(headers or {}), **AS_IT_IS}
    try:
        async with (
            asyncio.timeout(deadline_seconds),
            http.request(method, url, headers=asked, json=json, allow_redirects=False) as response,
        ):
            encoding = response.headers.get("Content-Encoding", "identity")
            if encoding != "identity":
                return Unreachable(f"{url}: the answer is encoded as {encoding[:40]}, which was not asked for")
            body = bytearray()
            async for chunk in response.content.iter_any():
                body += chunk
                if len(body) > max_bytes:
                    return TooLarge(f"{url}: the answer is larger than {max_bytes:,} bytes")
            return Reply(response.status, bytes(body))
    except TimeoutError:
        return TooSlow(f"{url}: no answer within {deadline_seconds:g} s")
    except aiohttp.ClientConnectorError as error:
        return Unreachable(f"{url}: no connection: {error.os_error.strerror or error.os_error}")
    except (aiohttp.ClientError, OSError) as error:
        return Unreachable(
            f"{url}: {type(error).__name__}: {error}" if str(error) else f"{url}: {type(error).__name__}"
        )

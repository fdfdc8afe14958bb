"""HTTP requests to pods, with a total deadline and a size limit. No retries, because a request may have taken effect;
no redirects.

Pod responses are untrusted: they may be slow, endless or malformed, and must not delay other requests. Thousands of
pods are polled: a request with aiohttp takes a seventh of the CPU time of one with httpx.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp

MAX_BODY_BYTES = 1 << 20  # a full /metrics page of an engine is about 100 KB
DEADLINE_SECONDS = 5.0  # default for a whole request
CONNECT_SECONDS = 2.0  # a deleted pod does not respond at all
IDENTITY_ENCODING = {"Accept-Encoding": "identity"}  # a compressed bomb could fill the memory
MAX_CONNECTIONS = 2000  # of all resources; each is limited further (engines/poller.py)
KEEP_ALIVE_SECONDS = 15.0  # longer than the interval between two polls


@dataclass(frozen=True, slots=True)
class Reply:
    """Response with any status."""

    status: int
    body: bytes


@dataclass(frozen=True, slots=True)
class Unreachable:
    """No usable response: refused, timed out, truncated, too large or malformed. `message` gives the reason."""

    message: str


@dataclass(frozen=True, slots=True)
class RequestTimeout(Unreachable):
    """The response did not complete before the deadline."""


@dataclass(frozen=True, slots=True)
class TooLarge(Unreachable):
    """The response exceeded the size limit."""


def new_client() -> aiohttp.ClientSession:
    """Return a client for pods. It connects directly and ignores proxies of the environment."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(
            limit=MAX_CONNECTIONS, keepalive_timeout=KEEP_ALIVE_SECONDS, enable_cleanup_closed=False
        ),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),  # `fetch` sets the total
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        trust_env=False,
    )


def pod_url(address: str, port: int) -> str:
    """Return `http://ADDRESS:PORT`, with brackets around an IPv6 address."""
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
    """Send one request. Never raises for errors of the other side."""
    asked = {**(headers or {}), **IDENTITY_ENCODING}
    try:
        async with (
            asyncio.timeout(deadline_seconds),
            http.request(method, url, headers=asked, json=json, allow_redirects=False) as response,
        ):
            encoding = response.headers.get("Content-Encoding", "identity")
            if encoding != "identity":
                return Unreachable(f"{url}: the response has the unrequested encoding {encoding[:40]}")
            body = bytearray()
            async for chunk in response.content.iter_any():
                body += chunk
                if len(body) > max_bytes:
                    return TooLarge(f"{url}: the response is larger than {max_bytes:,} bytes")
            return Reply(response.status, bytes(body))
    except TimeoutError:
        return RequestTimeout(f"{url}: no response within {deadline_seconds:g} s")
    except aiohttp.ClientConnectorError as error:
        return Unreachable(f"{url}: no connection: {error.os_error.strerror or error.os_error}")
    except (aiohttp.ClientError, OSError) as error:
        return Unreachable(
            f"{url}: {type(error).__name__}: {error}" if str(error) else f"{url}: {type(error).__name__}"
        )

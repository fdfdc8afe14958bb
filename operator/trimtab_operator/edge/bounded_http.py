"""One HTTP request to a pod or to Prometheus, with a deadline for all of it and a limit on what is read. No
retries, no redirects.

What a pod answers is a stranger's word: it may be slow, endless or nonsense, and must never hold up the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

import httpx

MAX_BODY_BYTES = 1 << 20  # a full /metrics page of an engine is about 100 KB
DEADLINE_SECONDS = 5.0  # for a whole request, unless the caller says otherwise
CONNECT_SECONDS = 2.0  # a pod that is gone does not answer at all
CHUNK_BYTES = 1 << 16
AS_IT_IS = {"Accept-Encoding": "identity"}  # a few bytes can be packed that fill all memory when they are unpacked
MAX_CONNECTIONS = 2000  # open at once, over all resources: each of them takes its share alone (edge/engines.py)
MAX_IDLE_CONNECTIONS = 200


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


def new_client() -> httpx.AsyncClient:
    """The client for pods: straight to their addresses, without a proxy from the environment."""
    return httpx.AsyncClient(
        timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),  # `fetch` sets the deadline of the whole
        limits=httpx.Limits(max_connections=MAX_CONNECTIONS, max_keepalive_connections=MAX_IDLE_CONNECTIONS),
        follow_redirects=False,
        trust_env=False,
    )


def pod_url(address: str, port: int) -> str:
    """`http://ADDRESS:PORT`, with brackets around an IPv6 address."""
    host = f"[{address}]" if ":" in address else address
    return f"http://{host}:{port}"


async def fetch(
    http: httpx.AsyncClient,
    method: str,
    url: str,
    *,
    headers: Mapping[str, str] | None = None,
    json: object = None,
    form: Mapping[str, str] | None = None,
    deadline_seconds: float = DEADLINE_SECONDS,
    max_bytes: int = MAX_BODY_BYTES,
) -> Reply | Unreachable:
    """Make one request. Never raises for what the other side does."""
    try:
        asked = {**(headers or {}), **AS_IT_IS}
        async with (
            asyncio.timeout(deadline_seconds),
            http.stream(method, url, headers=asked, json=json, data=form) as response,
        ):
            encoding = response.headers.get("Content-Encoding", "identity")
            if encoding != "identity":
                return Unreachable(f"{url}: the answer is encoded as {encoding[:40]}, which was not asked for")
            body = bytearray()
            async for chunk in response.aiter_raw(CHUNK_BYTES):
                body += chunk
                if len(body) > max_bytes:
                    return TooLarge(f"{url}: the answer is larger than {max_bytes:,} bytes")
            return Reply(response.status_code, bytes(body))
    except (TimeoutError, httpx.TimeoutException):
        return TooSlow(f"{url}: no answer within {deadline_seconds:g} s")
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        return Unreachable(
            f"{url}: {type(error).__name__}: {error}" if str(error) else f"{url}: {type(error).__name__}"
        )

"""One POST to the administrator's Prometheus, with a deadline for all of it and a limit on what is read. No retries, no
redirects.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import httpx

from trimtab_operator.engines.http import AS_IT_IS, Reply, TooLarge, TooSlow, Unreachable

CHUNK_BYTES = 1 << 16


async def posted(
    http: httpx.AsyncClient,
    url: str,
    *,
    headers: Mapping[str, str],
    form: Mapping[str, str],
    deadline_seconds: float,
    max_bytes: int,
) -> Reply | Unreachable:
    """Send a form. Never raises for what the other side does."""
    try:
        async with (
            asyncio.timeout(deadline_seconds),
            http.stream("POST", url, headers={**headers, **AS_IT_IS}, data=form) as response,
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

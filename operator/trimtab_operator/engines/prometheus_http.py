"""HTTP POST requests to the administrator's Prometheus, with a total deadline and a size limit. No retries, no
redirects.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import httpx

from trimtab_operator.engines.http import IDENTITY_ENCODING, Reply, RequestTimeout, TooLarge, Unreachable

CHUNK_BYTES = 1 << 16


async def post_form(
    http: httpx.AsyncClient,
    url: str,
    *,
    headers: Mapping[str, str],
    form: Mapping[str, str],
    deadline_seconds: float,
    max_bytes: int,
) -> Reply | Unreachable:
    """Send a form. Never raises for errors of the other side."""
    try:
        async with (
            asyncio.timeout(deadline_seconds),
            http.stream("POST", url, headers={**headers, **IDENTITY_ENCODING}, data=form) as response,
        ):
            encoding = response.headers.get("Content-Encoding", "identity")
            if encoding != "identity":
                return Unreachable(f"{url}: the response has the unrequested encoding {encoding[:40]}")
            body = bytearray()
            async for chunk in response.aiter_raw(CHUNK_BYTES):
                body += chunk
                if len(body) > max_bytes:
                    return TooLarge(f"{url}: the response is larger than {max_bytes:,} bytes")
            return Reply(response.status_code, bytes(body))
    except (TimeoutError, httpx.TimeoutException):
        return RequestTimeout(f"{url}: no response within {deadline_seconds:g} s")
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        return Unreachable(
            f"{url}: {type(error).__name__}: {error}" if str(error) else f"{url}: {type(error).__name__}"
        )

"""Fetches media by URL: files below the allowed folder, and responses of allowed hosts.

```
URL ── sources.py: allowed, canonical ──> name ── resolved once, here ──> addresses, all public?
                                                                                   │ connect to exactly these
       <── checked again from the start ── redirect ── answer: status, type, size, in time ── content
```
A name is resolved once, which defeats DNS rebinding.
"""

import asyncio
import os
import socket
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from trimtab_engine.errors import InvalidRequest
from trimtab_engine.multimodal.addresses import is_public
from trimtab_engine.multimodal.sources import AllowedSources, LocalFile, RemoteFile

MAX_REDIRECTS = 3
REDIRECTS = frozenset({301, 302, 303, 307, 308})
CHUNK_BYTES = 1 << 16
MEDIA = ("image/", "video/")
UNSAID = frozenset({"", "application/octet-stream", "binary/octet-stream"})
"""Generic content types of servers that do not know a file's type."""
HEADERS = {"User-Agent": "trimtab-engine", "Accept": "image/*, video/*", "Accept-Encoding": "identity"}


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """Limits: bytes of one file, time including all redirects, and concurrent fetches."""

    max_bytes: int = 32 << 20
    seconds: float = 10.0
    max_fetches: int = 16


@dataclass(frozen=True, slots=True)
class Content:
    """A fetched file. `mime`: the declared type in lower case; None if there is none."""

    data: bytes
    mime: str | None = None


class MediaFetcher:
    """Fetches URLs that `allowed` permits. `resolver` replaces the system's resolver in tests."""

    def __init__(
        self,
        allowed: AllowedSources,
        limits: FetchLimits = FetchLimits(),
        resolver: AbstractResolver | None = None,
    ) -> None:
        self._allowed, self._limits, self._resolver = allowed, limits, resolver
        self._free = asyncio.Semaphore(limits.max_fetches)
        self._session: aiohttp.ClientSession | None = None

    async def fetch(self, source: LocalFile | RemoteFile) -> Content:
        """Return the content of one file.

        Raises:
            InvalidRequest: the file cannot be fetched, with the reason.
        """
        async with self._free:
            try:
                async with asyncio.timeout(self._limits.seconds):
                    if isinstance(source, LocalFile):
                        return Content(await asyncio.to_thread(self._read, source.path))
                    return await self._remote(source)
            except TimeoutError:
                where = source.host if isinstance(source, RemoteFile) else "the server's disk"
                raise InvalidRequest(f"{where} took more than {self._limits.seconds:g} s for the file") from None

    async def _remote(self, source: RemoteFile) -> Content:
        for _ in range(MAX_REDIRECTS + 1):
            async with self._answer(source) as answer:
                if answer.status in REDIRECTS:
                    source = self._allowed.redirected(source, answer.headers.get("Location", ""))
                    continue
                if answer.status != 200:
                    raise InvalidRequest(f"{source.host} answers {answer.status} where the file should be")
                return await self._content(source, answer)
        raise InvalidRequest(f"{source.host} redirects more than {MAX_REDIRECTS} times")

    @asynccontextmanager
    async def _answer(self, source: RemoteFile) -> AsyncIterator[aiohttp.ClientResponse]:
        host = source.host
        path, _, query = source.target.partition("?")
        url = URL.build(scheme=source.scheme, host=host, port=source.port, path=path, query_string=query, encoded=True)
        try:
            async with self._opened().get(url, allow_redirects=False) as answer:
                yield answer
        except _NotPublic as error:
            raise InvalidRequest(str(error)) from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            cause = error.__cause__ if isinstance(error.__cause__, _NotPublic) else None
            raise InvalidRequest(str(cause) if cause else f"{host} cannot be read: {type(error).__name__}") from None

    async def _content(self, source: RemoteFile, answer: aiohttp.ClientResponse) -> Content:
        mime = answer.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        if mime not in UNSAID and not mime.startswith(MEDIA):
            raise InvalidRequest(f"{source.host} sends {mime[:80]!r}, which is no image or video")
        if answer.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise InvalidRequest(f"{source.host} sends the file compressed, which was not requested")
        data = bytearray()
        limit = self._limits.max_bytes
        if answer.content_length is None or answer.content_length <= limit:
            async for chunk in answer.content.iter_chunked(CHUNK_BYTES):
                data += chunk
                if len(data) > limit:
                    break
            else:
                return Content(bytes(data), None if mime in UNSAID else mime)
        raise InvalidRequest(f"{source.host} sends more than {limit} bytes; that is the most of one file")

    def _opened(self) -> aiohttp.ClientSession:
        """Create the session; files share no connections, cookies or credentials."""
        if self._session is None:
            resolver = _PublicResolver(self._resolver or aiohttp.ThreadedResolver())
            connector = aiohttp.TCPConnector(resolver=resolver, use_dns_cache=False, force_close=True, limit=0)
            self._session = aiohttp.ClientSession(
                connector=connector,
                headers=HEADERS,
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                trust_env=False,
                timeout=aiohttp.ClientTimeout(total=None),
            )
        return self._session

    def _read(self, path: str) -> bytes:
        """Open a regular file below the allowed folder, after resolving links. Files elsewhere give the same error as
        missing ones.
        """
        assert self._allowed.local_path is not None  # a LocalFile is made where there is one
        root = Path(os.path.realpath(self._allowed.local_path))
        missing = InvalidRequest(f"there is no file {path[:200]!r} below the folder that is read here")
        real = Path(os.path.realpath(path))
        if not real.is_relative_to(root):
            raise missing
        try:
            descriptor = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            raise missing from None
        try:
            opened = Path(os.readlink(f"/proc/self/fd/{descriptor}"))  # resolved when it was opened
            if not opened.is_relative_to(root) or not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise missing
            with open(descriptor, "rb", closefd=False) as file:
                data = file.read(self._limits.max_bytes + 1)
        finally:
            os.close(descriptor)
        if len(data) > self._limits.max_bytes:
            raise InvalidRequest(f"the file has more than {self._limits.max_bytes} bytes; that is the most of one file")
        return data

    async def close(self) -> None:
        """End its connections."""
        if self._session is not None:
            await self._session.close()


class _NotPublic(OSError):
    """A name resolves to an address that is not connected to."""


class _PublicResolver(AbstractResolver):
    """Another resolver's answers, when all of them are public."""

    def __init__(self, inner: AbstractResolver) -> None:
        self._inner = inner

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await self._inner.resolve(host, port, family)
        if not all(is_public(result["host"]) for result in found):
            raise _NotPublic(f"{host} resolves to a private address, which is not allowed")
        return found

    async def close(self) -> None:
        await self._inner.close()

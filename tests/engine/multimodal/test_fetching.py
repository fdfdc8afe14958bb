"""Files and answers are read within their limits, and nothing is connected to that is not public or named itself."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.abc import AbstractResolver, ResolveResult
from trimtab_engine.errors import InvalidRequest
from trimtab_engine.multimodal import fetching
from trimtab_engine.multimodal.fetching import Content, FetchLimits, MediaFetcher
from trimtab_engine.multimodal.sources import AllowedHost, AllowedSources, LocalFile, RemoteFile

NAME = "images.example.com"
LIMITS = FetchLimits(max_bytes=1000, seconds=20.0)


class Names(AbstractResolver):
    """Answers every name with the next of these addresses."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = list(addresses)

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        address = self.addresses.pop(0)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return [ResolveResult(hostname=host, host=address, port=port, family=family, proto=0, flags=0)]

    async def close(self) -> None:
        pass


Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@pytest.fixture
async def host() -> AsyncIterator[Callable[[Answer], Awaitable[int]]]:
    """Starts a server on loopback; its port."""
    runners: list[web.AppRunner] = []

    async def start(answer: Answer) -> int:
        app = web.Application()
        app.router.add_get("/{path:.*}", answer)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.0)
        await runner.setup()
        runners.append(runner)
        site = web.TCPSite(runner, "127.0.0.1", 0, reuse_address=True)
        await site.start()
        return int(runner.addresses[0][1])

    yield start
    for runner in runners:
        await runner.cleanup()


async def fetch(port: int, *, limits: FetchLimits = LIMITS, path: str = "/x", name: str = "127.0.0.1") -> Content:
    allowed = AllowedSources(hosts=(AllowedHost(name, port),))
    fetcher = MediaFetcher(allowed, limits)
    try:
        return await fetcher.fetch(RemoteFile("http", name, port, path))
    finally:
        await fetcher.close()


def says(body: bytes = b"pixels", **options: object) -> Answer:
    async def answer(request: web.Request) -> web.Response:
        headers = {"Content-Type": "image/png"} | dict(options.get("headers", {}))  # type: ignore[call-overload]  # a mapping
        return web.Response(body=body, headers=headers, status=int(str(options.get("status", 200))))

    return answer


async def test_an_address_that_is_named_itself_is_asked_and_told_nothing_of_us(
    host: Callable[[Answer], Awaitable[int]],
) -> None:
    seen: list[web.Request] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(request)
        return web.Response(body=b"pixels", content_type="image/png", headers={"Set-Cookie": "a=b"})

    port = await host(answer)
    assert await fetch(port, path="/a%20b?c=%2F") == Content(b"pixels", "image/png")
    (request,) = seen
    assert request.raw_path == "/a%20b?c=%2F"
    assert not {"Cookie", "Authorization", "Referer"} & set(request.headers)


@pytest.mark.parametrize("kind", ["application/octet-stream", "binary/octet-stream", "IMAGE/PNG; charset=x"])
async def test_a_server_may_leave_the_kind_unsaid(host: Callable[[Answer], Awaitable[int]], kind: str) -> None:
    content = await fetch(await host(says(headers={"Content-Type": kind})))
    assert content.mime == ("image/png" if "PNG" in kind else None)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (says(status=404), "127.0.0.1 answers 404"),
        (says(status=500), "answers 500"),
        (says(headers={"Content-Type": "text/html"}), "sends 'text/html', which is no image or video"),
        (says(headers={"Content-Encoding": "gzip"}), "sends the file compressed"),
        (says(bytes(1001)), "more than 1000 bytes"),
        (says(status=302, headers={"Location": "/x"}), "redirects more than 3 times"),
        (says(status=302, headers={"Location": "http://127.0.0.1:1/x"}), "not an allowed host"),
        (says(status=302, headers={"Location": "http://169.254.169.254/"}), "not an allowed host"),
        (says(status=301, headers={"Location": "file:///etc/passwd"}), "not followed"),
        (says(status=302), "not followed"),
    ],
)
async def test_an_answer_that_is_no_picture_or_leads_elsewhere_is_refused(
    host: Callable[[Answer], Awaitable[int]], answer: Answer, words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words):
        await fetch(await host(answer))


async def test_an_endless_answer_ends_at_the_limit(host: Callable[[Answer], Awaitable[int]]) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "image/png"})
        await response.prepare(request)
        while True:
            await response.write(bytes(100))

    with pytest.raises(InvalidRequest, match="more than 1000 bytes"):
        await fetch(await host(answer))


async def test_a_slow_answer_ends_in_time(host: Callable[[Answer], Awaitable[int]]) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(60)
        return web.Response()

    with pytest.raises(InvalidRequest, match=r"127.0.0.1 took more than 0\.2 s"):
        await fetch(await host(answer), limits=FetchLimits(1000, 0.2))


async def test_unreachable_host_error_is_short() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        with pytest.raises(InvalidRequest, match=r"127\.0\.0\.1 cannot be read: ClientConnectorError"):
            await fetch(held.getsockname()[1])


def by_name(names: Names, port: int) -> MediaFetcher:
    return MediaFetcher(AllowedSources(hosts=(AllowedHost(NAME, port),)), LIMITS, names)


@pytest.mark.parametrize("address", ["127.0.0.1", "10.0.0.1", "169.254.169.254", "::1", "::ffff:127.0.0.1", "fd00::1"])
async def test_a_name_of_an_address_within_a_network_is_not_asked(
    host: Callable[[Answer], Awaitable[int]], address: str
) -> None:
    port = await host(says())
    fetcher = by_name(Names(address), port)
    with pytest.raises(InvalidRequest, match=r"images\.example\.com resolves to a private address"):
        await fetcher.fetch(RemoteFile("http", NAME, port, "/x"))
    await fetcher.close()


async def test_connection_uses_the_checked_addresses(
    host: Callable[[Answer], Awaitable[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        fetching, "is_public", lambda address: address == "127.0.0.1"
    )  # in place of one on the internet
    port, names = await host(says()), Names("127.0.0.1", "10.0.0.1")
    fetcher = by_name(names, port)
    assert (await fetcher.fetch(RemoteFile("http", NAME, port, "/x"))).data == b"pixels"
    assert names.addresses == ["10.0.0.1"]  # resolved once
    with pytest.raises(InvalidRequest, match="a private address"):  # and again for each file
        await fetcher.fetch(RemoteFile("http", NAME, port, "/x"))
    await fetcher.close()


# --- files ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with an image, next to a secret."""
    (tmp_path / "secret").write_bytes(b"secret")
    media = tmp_path / "media"
    (media / "deep").mkdir(parents=True)
    (media / "deep" / "a cat.png").write_bytes(b"pixels")
    return media


async def read(folder: Path, path: str | Path) -> bytes:
    fetcher = MediaFetcher(AllowedSources(str(folder)), LIMITS)
    return (await fetcher.fetch(LocalFile(str(path)))).data


async def test_a_file_below_the_folder_is_read_also_by_a_link_within(folder: Path) -> None:
    (folder / "link").symlink_to(folder / "deep")
    assert await read(folder, folder / "deep" / "a cat.png") == b"pixels"
    assert await read(folder, folder / "link" / "a cat.png") == b"pixels"


async def test_the_folder_itself_may_be_a_link(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "allowed").symlink_to(folder)
    assert await read(tmp_path / "allowed", tmp_path / "allowed" / "deep" / "a cat.png") == b"pixels"


@pytest.mark.parametrize(
    "path", ["../secret", "deep/../../secret", "link", "through/secret", "missing", "deep", "/etc/passwd", "pipe", "."]
)
async def test_nothing_else_is_and_what_is_there_is_not_told(folder: Path, path: str) -> None:
    (folder / "link").symlink_to(folder.parent / "secret")
    (folder / "through").symlink_to(folder.parent)
    os.mkfifo(folder / "pipe")
    with pytest.raises(InvalidRequest, match=r"^there is no file .* below the folder that is read here$"):
        await read(folder, folder / path)


async def test_a_folder_whose_name_begins_alike_is_another(folder: Path) -> None:
    beside = folder.parent / "media-of-others"
    beside.mkdir()
    (beside / "x").write_bytes(b"secret")
    with pytest.raises(InvalidRequest, match="there is no file"):
        await read(folder, beside / "x")


async def test_a_large_file_is_refused_with_the_limit(folder: Path) -> None:
    (folder / "large").write_bytes(bytes(1001))
    with pytest.raises(InvalidRequest, match="more than 1000 bytes"):
        await read(folder, folder / "large")

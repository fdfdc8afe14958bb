"""One streamed request from the client's view, with response bytes split at any position."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from trimtab_engine.bench.serving.client import RequestResult, Target, send

Handler = Callable[[web.Request, web.StreamResponse], Awaitable[None]]
USAGE = {"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": 3}}


def event(body: Any) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def text(value: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": value, "finish_reason": finish}]}


def delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": None}]}


async def answer_of(pieces: list[bytes], *, status: int = 200) -> RequestResult:
    """Return the result of a request whose response is written in these pieces."""

    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=status)
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
            await asyncio.sleep(0)
        return response

    async for url, session in served(handle):
        result = RequestResult()
        await send(session, Target(url, {}), {"prompt": "x"}, result)
        return result
    raise AssertionError


async def served(handle: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[tuple[str, Any]]:
    app = web.Application()
    app.router.add_post("/v1/completions", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        async with aiohttp.ClientSession() as session:
            port = runner.addresses[0][1]
            yield f"http://127.0.0.1:{port}/v1/completions", session
    finally:
        await runner.cleanup()


async def test_output_chunks_are_counted_and_usage_gives_lengths() -> None:
    result = await answer_of(
        [event(text("a")), event(text("b")), event(text("", "length")), event(USAGE), b"data: [DONE]\n\n"]
    )
    assert result.success
    assert (result.prompt_len, result.output_len, result.text) == (11, 3, "ab")
    assert len(result.itl) == 2
    assert result.latency == pytest.approx(result.ttft + sum(result.itl))


async def test_events_may_be_split_or_merged() -> None:
    stream = event(text("grüße")) + event(text("b")) + b": a comment\n\n" + event(USAGE)
    for size in (1, 7, 10_000):
        result = await answer_of([stream[i : i + size] for i in range(0, len(stream), size)])
        assert (result.success, result.text, len(result.itl)) == (True, "grüßeb", 1)


async def test_opening_chunk_of_chat_is_not_first_token() -> None:
    result = await answer_of(
        [event(delta(role="assistant", content="")), event(delta(content="hi")), event(delta(reasoning_content="x"))]
    )
    assert (result.text, len(result.itl), result.output_len) == ("hix", 1, 2)


async def test_other_line_endings_are_supported() -> None:
    assert (await answer_of([event(text("a")).replace(b"\n", b"\r\n")])).text == "a"


async def test_error_status_fails_with_server_message() -> None:
    result = await answer_of([b'{"error": {"message": "too long"}}'], status=400)
    assert not result.success
    assert "HTTP 400" in result.error
    assert "too long" in result.error


async def test_error_in_stream_fails_the_request() -> None:
    result = await answer_of([event(text("a")), event({"error": {"message": "the engine has failed"}})])
    assert not result.success
    assert "the engine has failed" in result.error


@pytest.mark.parametrize(("pieces", "error"), [([], "without any output"), ([b"data: {oops\n\n"], "invalid chunk")])
async def test_empty_or_invalid_stream_fails(pieces: list[bytes], error: str) -> None:
    result = await answer_of(pieces)
    assert not result.success
    assert error in result.error


async def test_unreachable_server_fails_without_exception() -> None:
    result = RequestResult()
    async with aiohttp.ClientSession() as session:
        await send(session, Target("http://127.0.0.1:1/v1/completions", {}), {}, result)
    assert "Cannot connect" in result.error


async def test_reasoning_of_either_name_is_output() -> None:
    for name in ("reasoning", "reasoning_content"):
        result = await answer_of([event(delta(**{name: "thinking"})), event(delta(content="done"))])
        assert (result.text, len(result.itl), result.output_len) == ("thinkingdone", 1, 2)

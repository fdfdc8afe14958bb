"""Clients that read their stream slowly or never: buffered output, and the final result."""

import asyncio
import gc
import json
import socket
import time
import tracemalloc
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack, aclosing
from pathlib import Path
from typing import Any, cast

import pytest
from trimtab_engine.api.http.errors import ApiError
from trimtab_engine.api.http.protocol import FLOW
from trimtab_engine.api.http.streaming import EventStream
from trimtab_engine.api.metrics.observations import FinishedSequence
from trimtab_engine.api.openai.generation import GenerationPlan, Generator, Piece
from trimtab_engine.api.openai.protocol import CompletionRequest
from trimtab_engine.api.openai.read_ahead import MAX_UNREAD_BYTES, PART_BYTES, PieceBuffer, ReadAhead
from trimtab_engine.api.openai.respond import _stream
from trimtab_engine.api.openai.response_builders import CompletionResponseBuilder
from trimtab_engine.engine_client.client import CoreClient
from trimtab_engine.engine_client.output_queue import OutputQueue, PlainRun
from trimtab_engine.messages.requests import AddRequest, SequenceOutput
from trimtab_engine.scheduling.sampling import Sampling, TokenLogprobs
from trimtab_engine.text.tokenizer import Tokenizer

WIDTH = 20
TEXT = b"Many words are said, and few of them are read. "


class Core:
    """A core client whose steps are controlled by the test."""

    first_rank = 0

    def __init__(self) -> None:
        self.boxes: list[OutputQueue] = []
        self.num_aborted = 0
        self.time = 100.0

    async def generate(self, request: AddRequest) -> AsyncGenerator[SequenceOutput | PlainRun, None]:
        box = OutputQueue()
        self.boxes.append(box)
        finished = False
        try:
            while not finished:
                output = await box.get()
                assert output is not None
                yield output
                finished = isinstance(output, SequenceOutput) and output.finish_reason is not None
        finally:
            self.num_aborted += not finished

    async def steps(self, count: int, *, logprobs: int | None, ends: bool = False) -> None:
        """Emit `count` tokens of each choice; consumers may run after each."""
        for number in range(count):
            self.time += 0.25
            token = TEXT[number % len(TEXT)]
            for box in self.boxes:
                if number == 0 or logprobs is not None or (ends and number == count - 1):
                    ids = [token, *range(logprobs or 0)]
                    reported = [TokenLogprobs(ids, [-0.5 - i / 7 for i in ids], 1)]
                    output = SequenceOutput("r", [token], logprobs=None if logprobs is None else reported)
                    output.time = self.time
                    output.finish_reason = "length" if ends and number == count - 1 else None
                    box.put(output)
                else:
                    box.put_plain(token, self.time, 0)
            for _ in range(4):
                await asyncio.sleep(0)


class CountingObserver:
    """An Observer that counts."""

    def __init__(self) -> None:
        self.first_tokens: list[float] = []
        self.num_gaps = 0
        self.lives: list[FinishedSequence] = []

    def first_token(self, seconds: float, engine: int) -> None:
        self.first_tokens.append(seconds)

    def next_tokens(self, seconds: Sequence[float], engine: int) -> None:
        assert all(gap == 0.25 for gap in seconds)
        self.num_gaps += len(seconds)

    def finished(self, life: FinishedSequence) -> None:
        self.lives.append(life)

    def request_finished(self, n: int, max_num_generation_tokens: int, engine: int) -> None: ...

    def rejected(self, reason: str) -> None: ...

    def media_looked_up(self, queries: int, hits: int) -> None: ...


class Flow:
    """A connection that accepts nothing until resumed."""

    def __init__(self) -> None:
        self.write_paused = False
        self._may_write = asyncio.Event()
        self._may_write.set()

    def pause(self) -> None:
        self.write_paused = True
        self._may_write.clear()

    def resume(self) -> None:
        self.write_paused = False
        self._may_write.set()

    async def drain(self) -> None:
        await self._may_write.wait()


class Stream:
    """One streamed response, from a core to a connection."""

    def __init__(self, tokenizer: Tokenizer, *, n: int, logprobs: int | None, max_tokens: int = 1 << 20) -> None:
        self.core, self.seen, self.flow = Core(), CountingObserver(), Flow()
        self.sent: list[bytes] = []
        self.gone = asyncio.Event()
        sampling = [Sampling(max_tokens=max_tokens, logprobs=logprobs) for _ in range(n)]
        plan = GenerationPlan("r", [[1, 2]], sampling, [], False, True, arrival_time=100.0)
        generator = Generator(cast(CoreClient, self.core), tokenizer, self.seen)
        self.ahead = ReadAhead(generator.run(plan), "r", keeps_ids=False)
        body = CompletionRequest(model="m", prompt="ab", stream=True, n=n, logprobs=logprobs)
        events = _stream(self.ahead, body, CompletionResponseBuilder("m", tokenizer, "r"), plan, None)
        self._response = EventStream(events, ExitStack(), self.ahead.begin)

    async def run(self) -> None:
        await self._response({"type": "http", "extensions": {FLOW: {"control": self.flow}}}, self._receive, self._send)

    async def _receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if self.flow.write_paused:
            await self.flow.drain()
        self.sent.append(message.get("body", b""))

    @property
    def chunks(self) -> list[dict[str, Any]]:
        events = b"".join(self.sent).decode().split("\n\n")
        return [json.loads(e.removeprefix("data: ")) for e in events if e and e != "data: [DONE]"]

    def result(self, index: int) -> tuple[str, list[Any], Any]:
        """Return a choice's text, its log-probabilities and its finish reason."""
        choices = [c for chunk in self.chunks for c in chunk.get("choices", []) if c["index"] == index]
        top = [position for c in choices if c["logprobs"] for position in c["logprobs"]["top_logprobs"]]
        ends = [c["finish_reason"] for c in choices if c["finish_reason"]]
        return "".join(c["text"] for c in choices), top, *ends


@pytest.fixture
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return Tokenizer(str(tokenizer_folder))


async def until(condition: Any) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("the condition never became true")


async def answered(tokenizer: Tokenizer, *, n: int, logprobs: int | None, length: int, is_slow: bool) -> Stream:
    """Return a complete response for a client that pauses after its first token until the response is complete."""
    stream = Stream(tokenizer, n=n, logprobs=logprobs)
    running = asyncio.create_task(stream.run())
    await until(lambda: len(stream.core.boxes) == n)
    if is_slow:
        stream.flow.pause()
    await stream.core.steps(length, logprobs=logprobs, ends=True)
    if is_slow:
        await until(lambda: len(stream.seen.lives) == n)
        stream.flow.resume()
    await running
    return stream


@pytest.mark.parametrize("logprobs", [None, 2])
@pytest.mark.parametrize("n", [1, 3])
def test_slow_reader_gets_the_same_output(tokenizer: Tokenizer, n: int, logprobs: int | None) -> None:
    async def both() -> tuple[Stream, Stream]:
        options: Any = {"n": n, "logprobs": logprobs, "length": 700}
        return await answered(tokenizer, is_slow=False, **options), await answered(tokenizer, is_slow=True, **options)

    fast, slow = asyncio.run(both())
    for index in range(n):
        assert slow.result(index) == fast.result(index)
        assert slow.result(index)[::2] == ((TEXT * 15)[:700].decode(), "length")
    assert len(slow.chunks) < len(fast.chunks) / 5, "many deltas become few"


@pytest.mark.parametrize("n", [1, 3])
def test_pause_does_not_affect_latency_metrics(tokenizer: Tokenizer, n: int) -> None:
    slow = asyncio.run(answered(tokenizer, n=n, logprobs=None, length=50, is_slow=True))
    assert slow.seen.first_tokens == [0.25] * n
    assert slow.seen.num_gaps == 49 * n
    assert [(life.reason, life.end) for life in slow.seen.lives] == [("length", 112.5)] * n


@pytest.mark.parametrize(("n", "logprobs", "length"), [(1, None, 40_000), (2, WIDTH, 1_500)])
def test_buffered_output_takes_few_bytes(tokenizer: Tokenizer, n: int, logprobs: int | None, length: int) -> None:
    async def held() -> int:
        stream = Stream(tokenizer, n=n, logprobs=logprobs)
        running = asyncio.create_task(stream.run())
        await until(lambda: len(stream.core.boxes) == n)
        stream.flow.pause()
        await stream.core.steps(200, logprobs=logprobs)  # one-time allocations are not counted
        gc.collect()
        tracemalloc.start()
        await stream.core.steps(length, logprobs=logprobs)
        gc.collect()
        grown, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        stream.gone.set()
        await running
        assert grown <= stream.ahead.unread.num_bytes + 2 * n * PART_BYTES, "the size matches the content"
        return grown

    a_token = 1.5 if logprobs is None else 14 * (1 + WIDTH) + 20  # one byte of text is one token here
    assert asyncio.run(held()) <= n * (a_token * length + 2 * PART_BYTES)


def test_client_that_never_reads_is_aborted_at_the_limit(tokenizer: Tokenizer) -> None:
    async def never_read(num_steps: int) -> tuple[Stream, int]:
        stream = Stream(tokenizer, n=8, logprobs=WIDTH)
        running = asyncio.create_task(stream.run())
        await until(lambda: len(stream.core.boxes) == 8)
        stream.flow.pause()
        while stream.core.num_aborted == 0:
            await stream.core.steps(len(TEXT), logprobs=WIDTH)
        most = stream.ahead.unread.num_bytes
        await stream.core.steps(num_steps, logprobs=WIDTH)
        assert stream.ahead.unread.num_bytes == most
        stream.flow.resume()
        await running
        return stream, most

    stream, most = asyncio.run(never_read(100))
    assert MAX_UNREAD_BYTES < most <= MAX_UNREAD_BYTES + PART_BYTES
    assert (stream.core.num_aborted, [life.reason for life in stream.seen.lives]) == (8, ["abort"] * 8)
    *chunks, last = stream.chunks
    assert last["error"]["code"] == "slow_reader"
    assert str(MAX_UNREAD_BYTES) in last["error"]["message"]
    texts = ["".join(c["choices"][0]["text"] for c in chunks if c["choices"][0]["index"] == i) for i in range(8)]
    assert all(len(text) > 1000 and (TEXT * 1000).startswith(text.encode()) for text in texts)
    assert max(map(len, stream.sent)) < 8 * PART_BYTES, "chunks have at most that size"


def test_disconnect_of_slow_client_aborts_request(tokenizer: Tokenizer) -> None:
    async def left() -> Stream:
        stream = Stream(tokenizer, n=2, logprobs=None)
        running = asyncio.create_task(stream.run())
        await until(lambda: len(stream.core.boxes) == 2)
        stream.flow.pause()
        await stream.core.steps(20, logprobs=None)
        stream.gone.set()
        await running
        return stream

    stream = asyncio.run(left())
    assert (stream.core.num_aborted, [life.reason for life in stream.seen.lives]) == (2, ["abort", "abort"])


def test_buffered_output_precedes_the_error() -> None:
    async def pieces() -> AsyncGenerator[Piece, None]:
        for text in ("a", "b"):
            yield Piece(0, text, 1)
        raise ApiError(500, "broken core")

    async def read() -> None:
        async with aclosing(ReadAhead(pieces(), "r", keeps_ids=False)) as ahead:
            ahead.begin()
            assert (await anext(ahead)).text == "ab"
            with pytest.raises(ApiError, match="broken core"):
                await anext(ahead)

    asyncio.run(read())


def test_parts_are_in_order_and_complete() -> None:
    unread = PieceBuffer(keeps_ids=True)
    for number in range(2000):
        for index in (0, 1):
            logprobs = [TokenLogprobs([number], [-1.0], 1)]
            reason = "stop" if number == 1999 else None
            unread.put(Piece(index, f"{number} ", 1, logprobs, [number], reason, num_cached_tokens=5 * (number == 0)))
    parts = []
    while unread:
        parts.append(unread.take())
    assert unread.num_bytes == 0
    for index in (0, 1):
        own = [part for part in parts if part.index == index]
        assert len(own) > 2
        assert "".join(part.text for part in own) == "".join(f"{number} " for number in range(2000))
        assert [token for part in own for token in part.token_ids] == list(range(2000))
        assert [p.token_ids[0] for part in own for p in part.logprobs] == list(range(2000))
        assert sum(part.num_tokens for part in own) == 2000
        assert [part.finish_reason for part in own] == [None] * (len(own) - 1) + ["stop"]
        assert [part.num_cached_tokens for part in own] == [5] + [0] * (len(own) - 1)


def test_server_aborts_client_that_never_reads_and_serves_others(
    start_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_STEP_MILLISECONDS", "1")
    server = start_server()
    body = json.dumps({"prompt": "!slow ab", "n": 64, "logprobs": 20, "stream": True, "max_tokens": 200}).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as slow:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n"
        slow.sendall(head.encode() + b"Content-Type: application/json\r\nConnection: close\r\n\r\n" + body)
        aborted = {"finished_reason": "abort"}
        while server.metric("vllm:request_success_total", **aborted) < 64:
            answer = server.http.post("/v1/completions", json={"prompt": "ab", "max_tokens": 3})
            assert answer.json()["choices"][0]["text"] == "aba"
            time.sleep(0.05)
        assert server.core_state()["running"] == 0
        slow.settimeout(60)
        read = b""
        while came := slow.recv(1 << 20):
            read = read[-10_000:] + came
    assert b'"code":"slow_reader"' in read
    assert "the client has more than" in server.log.read_text()

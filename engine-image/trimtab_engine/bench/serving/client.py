"""One streamed request, and the arrival time of each chunk. Optimized for low CPU use, so that the client does not
affect the result: each chunk is decoded once, with only the needed fields.
"""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

MAX_ERROR_CHARACTERS = 300
EVENT_END = b"\n\n"


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """Newer name of reasoning_content."""
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(_Chunk)


@dataclass(slots=True)
class RequestResult:
    """One request as seen by the client, in seconds; `start_time` counts from the start of the run.

    `itl` are the gaps between chunks with output. `latency` ends with the last of them; `client_queue_time` is the wait
    for a free place under --max-concurrency.
    """

    prompt_len: int = 0
    output_len: int = 0
    start_time: float = 0.0
    ttft: float = 0.0
    itl: list[float] = field(default_factory=list)
    latency: float = 0.0
    client_queue_time: float = 0.0
    send_lag: float = 0.0
    """Delay of sending relative to the plan."""
    success: bool = False
    error: str = ""
    text: str = ""

    @property
    def tpot(self) -> float:
        """Mean time per token after the first one; 0 for one token, as in vLLM."""
        return (self.latency - self.ttft) / (self.output_len - 1) if self.output_len > 1 else 0.0


@dataclass(frozen=True, slots=True)
class Target:
    """Destination of requests."""

    url: str
    headers: dict[str, str]
    timeout_seconds: float = 6 * 3600.0


async def send(session: aiohttp.ClientSession, target: Target, body: dict[str, Any], result: RequestResult) -> None:
    """Send one request and record its chunks in `result`. Only raises on cancellation."""
    started = time.perf_counter()
    stream = _Stream(started, result)
    try:
        timeout = aiohttp.ClientTimeout(total=target.timeout_seconds)
        data = msgspec.json.encode(body)
        async with session.post(target.url, data=data, headers=target.headers, timeout=timeout) as answer:
            if answer.status != 200:
                text = (await answer.text(errors="replace")).strip()
                result.error = f"HTTP {answer.status}: {' '.join(text.split())[:MAX_ERROR_CHARACTERS]}"
                return
            async for data in answer.content.iter_any():
                stream.feed(data, time.perf_counter())
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        result.error = f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARACTERS]
        return
    except asyncio.CancelledError:
        result.error = "interrupted"
        raise
    finally:
        stream.end()
    result.success = not result.error and stream.num_chunks > 0
    if not result.success and not result.error:
        result.error = "the stream ended without any output"


class _Stream:
    """Parser of server-sent events in pieces of any size."""

    def __init__(self, started: float, result: RequestResult) -> None:
        self._started = self._last = started
        self._result = result
        self._rest = b""
        self._texts: list[str] = []
        self.num_chunks = 0

    def feed(self, data: bytes, now: float) -> None:
        self._rest += data.replace(b"\r\n", b"\n")
        *events, self._rest = self._rest.split(EVENT_END)
        for event in events:
            if event.startswith(b"data:") and not event.endswith(b"[DONE]"):
                self._chunk(event[5:], now)

    def _chunk(self, data: bytes, now: float) -> None:
        result = self._result
        try:
            chunk = _decoder.decode(data)
        except msgspec.DecodeError as error:
            result.error = f"invalid chunk: {error}"
            return
        if chunk.error is not None:
            result.error = str(chunk.error)[:MAX_ERROR_CHARACTERS]
        if chunk.usage is not None:
            result.prompt_len = chunk.usage.prompt_tokens or result.prompt_len
            result.output_len = chunk.usage.completion_tokens or result.output_len
        for choice in chunk.choices:
            if self._has_output(choice):
                self._note(now)

    def _has_output(self, choice: _Choice) -> bool:
        """Return True for text, reasoning, a tool call or the end, but not for a chat's opening chunk with the role."""
        delta = choice.delta
        text = choice.text or (delta.content or delta.reasoning_content or delta.reasoning if delta else None)
        if text:
            self._texts.append(text)
        return bool(text) or bool(delta and delta.tool_calls) or (choice.finish_reason is not None)

    def _note(self, now: float) -> None:
        self.num_chunks += 1
        if self.num_chunks == 1:
            self._result.ttft = now - self._started
        else:
            self._result.itl.append(now - self._last)
        self._last = now

    def end(self) -> None:
        result = self._result
        result.latency = self._last - self._started
        result.text = "".join(self._texts)
        result.output_len = result.output_len or self.num_chunks

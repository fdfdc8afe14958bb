"""Generation: one HTTP request's sequences, their text and stop strings, and their metrics."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from operator import sub

from trimtab_engine.api.http.dispatches import PendingDispatch
from trimtab_engine.api.http.errors import ApiError
from trimtab_engine.api.metrics.observations import FinishedSequence, Observer
from trimtab_engine.api.metrics.tracing import Tracer
from trimtab_engine.api.openai.admission import Ticket
from trimtab_engine.engine_client.client import CoreClient
from trimtab_engine.engine_client.output_queue import PlainRun
from trimtab_engine.messages.requests import AddRequest, SequenceOutput
from trimtab_engine.messages.state_stream import PrefixCuts
from trimtab_engine.multimodal.items import Span
from trimtab_engine.scheduling.sampling import PackedLogprobs, Sampling, TokenLogprobs
from trimtab_engine.text.stream import TextStream
from trimtab_engine.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """A validated request: prompts, sampling of each choice, and stop strings. Times are CLOCK_MONOTONIC seconds.

    Choices are prompt-major, as OpenAI numbers them: with n choices per prompt, choice i continues prompt i // n.
    """

    request_id: str
    prompts: Sequence[list[int]]
    """Token IDs of each prompt."""
    sampling: Sequence[Sampling]
    stop: Sequence[str]
    include_stop: bool
    skip_special_tokens: bool
    arrival_time: float
    special_stop: Mapping[int, str] = field(default_factory=dict)
    """Stop strings that are special tokens, by token ID; the sampling contains them as stop tokens."""
    cache_salt: str = ""
    adapter: str = ""
    """Adapter name, or empty for the base model."""
    spans: tuple[Span, ...] = ()
    """Images and videos of a plan with one prompt."""
    priority: int = 0
    data_parallel_rank: int | None = None
    """Data-parallel core to run on, or None for any."""
    stream_interval: int = 1
    """Minimum tokens per piece, except a choice's first and last one."""
    trace_headers: Mapping[str, str] = field(default_factory=dict)
    """Trace headers of the request."""
    ticket: Ticket | None = None
    """Admission ticket, notified of each choice's first token."""
    cuts: Sequence[PrefixCuts] = ()
    """Prefix keys of each prompt; empty if no router listens."""
    dispatch: PendingDispatch | None = None
    """Dispatch that the last choice acknowledges. None if the request did not come from a router."""

    @property
    def n(self) -> int:
        """Choices per prompt."""
        return len(self.sampling) // len(self.prompts)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt in self.prompts)

    def prompt_of(self, index: int) -> list[int]:
        """Return the prompt that choice `index` continues."""
        return self.prompts[index // self.n]


@dataclass(slots=True)
class Piece:
    """Output of one step for one choice. `text` may be empty while characters or stop strings are held back."""

    index: int
    text: str
    num_tokens: int
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    """Token IDs that count, `num_tokens` of them."""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache; set on the choice's first piece."""
    num_host_cached_tokens: int = 0
    """Part of the cached tokens that came from host memory."""
    engine: int = 0
    """Data-parallel core that computed it."""
    prompt_logprobs: PackedLogprobs | None = None
    """Prompt logprobs from the second token on; set on the choice's first piece if requested."""
    texts: list[str] | None = None
    """Text of each token, if known; each is one chunk of a stream."""

    def split(self) -> "Sequence[Piece]":
        """Split into single tokens, if the text of each is known. The finish reason stays with the last one."""
        if self.texts is None or len(self.texts) < 2:
            return (self,)
        pairs = zip(self.texts, self.token_ids, strict=True)
        pieces = [Piece(self.index, text, 1, token_ids=[token_id], engine=self.engine) for text, token_id in pairs]
        pieces[-1].finish_reason, pieces[-1].stop_reason = self.finish_reason, self.stop_reason
        return pieces

    def join(self, later: "Piece") -> None:
        """Append a later piece of the same choice."""
        self.text += later.text
        self.num_tokens += later.num_tokens
        self.logprobs += later.logprobs
        self.token_ids += later.token_ids
        self.texts = None
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason


class Generator:
    """Runs GenerationPlans on the core."""

    def __init__(
        self, client: CoreClient, tokenizer: Tokenizer, observer: Observer, tracer: Tracer | None = None
    ) -> None:
        self.observer = observer
        self._client, self._tokenizer, self._tracer = client, tokenizer, tracer

    async def run(self, plan: GenerationPlan) -> AsyncGenerator[Piece, None]:
        """Yield the pieces of all choices in order of arrival. Cancellation aborts the remaining choices."""
        num_tokens, engine = [0] * len(plan.sampling), self._client.first_rank
        try:
            choices = self._run_choice(plan, 0) if len(plan.sampling) == 1 else self._run_choices(plan)
            async with aclosing(choices) as pieces:
                async for piece in pieces:
                    num_tokens[piece.index] += piece.num_tokens
                    engine = piece.engine
                    yield piece
        finally:
            for first in range(0, len(num_tokens), plan.n):
                self.observer.request_finished(plan.n, max(num_tokens[first : first + plan.n]), engine)

    async def _run_choices(self, plan: GenerationPlan) -> AsyncGenerator[Piece, None]:
        """Yield the pieces of several choices in order of arrival."""
        merged: asyncio.Queue[Piece | Exception | None] = asyncio.Queue()
        tasks = [asyncio.create_task(self._forward(plan, index, merged)) for index in range(len(plan.sampling))]
        try:
            left = len(tasks)
            while left:
                item = await merged.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    left -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _forward(self, plan: GenerationPlan, index: int, merged: asyncio.Queue[Piece | Exception | None]) -> None:
        try:
            async with aclosing(self._run_choice(plan, index)) as pieces:
                async for piece in pieces:
                    merged.put_nowait(piece)
            merged.put_nowait(None)
        except Exception as error:  # passed to the consumer, which raises it
            merged.put_nowait(error)

    async def _run_choice(self, plan: GenerationPlan, index: int) -> AsyncGenerator[Piece, None]:
        request_id = f"{plan.request_id}-{index}-{uuid.uuid4().hex[:8]}"
        stream = TextStream(
            self._tokenizer,
            plan.prompt_of(index),
            skip_special_tokens=plan.skip_special_tokens,
            stop=plan.stop,
            include_stop=plan.include_stop,
            min_tokens=plan.sampling[index].min_tokens,
        )
        clock = SequenceClock(plan, index, self.observer, engine=self._client.first_rank)
        finish_reason: str | None = None
        request = AddRequest(
            request_id,
            plan.prompt_of(index),
            plan.sampling[index],
            plan.arrival_time,
            priority=plan.priority,
            data_parallel_rank=plan.data_parallel_rank,
            cache_salt=plan.cache_salt,
            adapter=plan.adapter,
            spans=plan.spans,
        )
        if plan.cuts and index % plan.n == 0:
            request.cuts = plan.cuts[index // plan.n]
        if plan.dispatch is not None and index == len(plan.sampling) - 1:
            request.dispatch = plan.dispatch.take()
        outputs = self._client.generate(request)
        held: Piece | None = None
        is_first = True
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    if isinstance(output, PlainRun):
                        piece = piece_of_run(output, stream, index=index)
                        clock.record_run(output, piece.num_tokens)
                    else:
                        clock.record(output)
                        piece = piece_of(output, stream, index=index)
                        if piece.finish_reason == "error":
                            finish_reason = "error"
                            raise error_of(output)
                        if isinstance(piece.stop_reason, int):
                            piece.stop_reason = plan.special_stop.get(piece.stop_reason, piece.stop_reason)
                    for part in (piece,) if plan.stream_interval == 1 else piece.split():
                        finish_reason = part.finish_reason
                        if held is None:
                            held = part
                        else:
                            held.join(part)
                        if held.num_tokens < plan.stream_interval and finish_reason is None and not is_first:
                            continue
                        is_first = False
                        yield held
                        held = None
                    if finish_reason is not None:
                        break
        finally:
            life = clock.finish(finish_reason or "abort")
            if self._tracer is not None:
                name = plan.request_id if len(plan.sampling) == 1 else f"{plan.request_id}-{index}"
                self._tracer.record(name, life, plan.sampling[index], plan.n, plan.trace_headers)


def error_of(output: SequenceOutput) -> ApiError:
    """Return 400 for an invalid request, 500 for any other engine error."""
    status = 400 if output.error and not output.is_engines_fault else 500
    return ApiError(status, output.error or "the engine failed to run this request")


def piece_of(output: SequenceOutput, stream: TextStream, *, index: int) -> Piece:
    """Return a step's output for a choice, with text cut at a stop string. Tokens after a stop string are dropped."""
    taken = stream.take(output.token_ids, output.finish_reason, ends_with_text=output.ends_with_text)
    piece = Piece(
        index,
        taken.text,
        taken.num_tokens,
        (output.logprobs or [])[: taken.num_tokens],
        output.token_ids[: taken.num_tokens],
        output.finish_reason,
        output.stop_token_id,
        output.num_cached_tokens,
        output.num_host_cached_tokens,
        output.engine_index,
        output.prompt_logprobs,
    )
    if stream.matched is not None:
        piece.finish_reason, piece.stop_reason = "stop", stream.matched
    return piece


def piece_of_run(run: PlainRun, stream: TextStream, *, index: int) -> Piece:
    """Return several steps' output for a choice. Tokens after a stop string are dropped."""
    texts = stream.take_each(run.token_ids)
    count = len(texts)
    piece = Piece(index, "".join(texts), count, [], run.token_ids[:count], engine=run.engine_index, texts=texts)
    if stream.matched is not None:
        piece.finish_reason, piece.stop_reason = "stop", stream.matched
    return piece


class SequenceClock:
    """Timestamps of one sequence in the core, reported to the metrics when the server receives them.

    Times of the core are used, so that slow clients do not affect the engine's latency metrics.
    """

    def __init__(
        self,
        plan: GenerationPlan,
        index: int,
        observer: Observer,
        now: Callable[[], float] = time.monotonic,
        *,
        engine: int = 0,
    ) -> None:
        self._plan, self._index, self._observer, self._now = plan, index, observer, now
        self._engine = engine
        self._max_tokens = plan.sampling[index].max_tokens
        self._num_prompt_tokens = len(plan.prompt_of(index))
        self._scheduled: float | None = None
        self._first_token: float | None = None
        self._last_token: float | None = None
        self._end: float | None = None
        self.num_tokens = 0
        self._num_preemptions = 0
        self._num_cached_tokens = 0

    def record(self, output: SequenceOutput) -> None:
        self._engine = output.engine_index
        if output.first_scheduled_time is not None:
            self._scheduled = output.first_scheduled_time
        self._num_cached_tokens = max(self._num_cached_tokens, output.num_cached_tokens)
        self._num_preemptions = max(self._num_preemptions, output.num_preemptions)
        self._end = output.time or self._now()
        if not output.token_ids:
            return
        now = self._end
        if self._last_token is None:
            self._first_token = now
            self._observer.first_token(now - self._plan.arrival_time, self._engine)
            if self._plan.ticket is not None:
                self._plan.ticket.started(self._index)
        else:
            self._observer.next_tokens([now - self._last_token], self._engine)
        self._last_token = now
        self.num_tokens += len(output.token_ids)

    def record_run(self, run: PlainRun, count: int) -> None:
        """Record the first `count` tokens of a run that is not the sequence's first output."""
        self._engine = run.engine_index
        times = run.times[:count]
        if not times:
            return
        if self._last_token is not None:
            self._observer.next_tokens(list(map(sub, times, [self._last_token, *times])), self._engine)
        self._last_token = self._end = times[-1]
        self.num_tokens += count

    def finish(self, reason: str) -> FinishedSequence:
        life = FinishedSequence(
            reason=reason,
            arrival=self._plan.arrival_time,
            scheduled=self._scheduled,
            first_token=self._first_token,
            last_token=self._last_token,
            end=self._now() if self._end is None or reason == "abort" else self._end,
            num_prompt_tokens=self._num_prompt_tokens,
            num_generation_tokens=self.num_tokens,
            max_tokens=self._max_tokens,
            num_preemptions=self._num_preemptions,
            num_cached_tokens=self._num_cached_tokens,
            engine=self._engine,
        )
        self._observer.finished(life)
        return life

"""Responses of a plan: the pieces of all choices, collected into one body or streamed as server-sent events."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from fastapi import Request, Response

from trimtab_engine.api.http.errors import ApiError, invalid
from trimtab_engine.api.http.long_json import long_json
from trimtab_engine.api.http.streaming import EventStream, EventTemplate, cancel_on_disconnect, event
from trimtab_engine.api.openai.admission import QueueFull, Ticket
from trimtab_engine.api.openai.generation import GenerationPlan, Piece
from trimtab_engine.api.openai.logprobs import prompt_logprobs
from trimtab_engine.api.openai.protocol import MAX_REPORTED, GenerationRequest
from trimtab_engine.api.openai.read_ahead import ReadAhead
from trimtab_engine.api.openai.response_builders import ResponseBuilder, Usage
from trimtab_engine.api.openai.state import ServerState, Serving
from trimtab_engine.scheduling.sampling import PackedLogprobs, TokenLogprobs

MAX_INLINE_LOGPROBS = 1000  # log-probabilities that are serialized within milliseconds
TOKEN_IDS_PER_LOGPROB = 10  # token IDs that take as long to serialize as one log-probability

logger = logging.getLogger("trimtab_engine.requests")


@dataclass(frozen=True, slots=True)
class Echo:
    """Prompts returned before their continuations; with max_tokens 0 only the prompts are returned."""

    texts: Sequence[str]
    alone: bool


@dataclass(slots=True)
class ChoiceStream:
    """State of one streamed choice."""

    owes_prompt_ids: bool
    """True until the prompt's token IDs are sent."""
    has_started: bool = False
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Log-probabilities not sent yet."""
    token_ids: list[int] = field(default_factory=list)
    """Token IDs not sent yet."""
    offset: int = 0
    """Characters sent so far."""
    template: EventTemplate | None = None


@dataclass(slots=True)
class ChoiceState:
    """Output of one choice so far."""

    text: str = ""
    logprobs: PackedLogprobs = field(default_factory=PackedLogprobs)
    token_ids: list[int] = field(default_factory=list)
    last: Piece | None = None
    prompt_logprobs: PackedLogprobs | None = None


async def respond(
    state: ServerState,
    request: Request,
    body: GenerationRequest,
    builder: ResponseBuilder,
    plan: GenerationPlan,
    until: ExitStack,
    echo: Echo | None = None,
) -> Response:
    """Return a complete response or a stream. A stream takes ownership of `until`, so that the request counts as active
    until its end.
    """
    if state.options.log_requests:
        _log(builder, plan)
    plan = replace(plan, ticket=admit(state, plan, until))
    if body.stream:
        pieces = ReadAhead(
            _require(state).generator.run(plan), builder.request_id, keeps_ids=bool(body.return_token_ids)
        )
        return EventStream(_stream(pieces, body, builder, plan, echo), until.pop_all(), pieces.begin)
    return await cancel_on_disconnect(request, _respond_whole(state, body, builder, plan, echo))


def admit(state: ServerState, plan: GenerationPlan, until: ExitStack) -> Ticket:
    """Admit the request until it ends.

    Raises:
        QueueFull: A queue limit is reached.
    """
    try:
        ticket = state.admission.admit([len(plan.prompt_of(index)) for index in range(len(plan.sampling))])
    except QueueFull as full:
        _require(state).generator.observer.rejected(full.reason)
        raise
    until.callback(ticket.close)
    return ticket


async def _respond_whole(
    state: ServerState, body: GenerationRequest, builder: ResponseBuilder, plan: GenerationPlan, echo: Echo | None
) -> Response:
    """Return the complete response, serialized in a thread if it is large, so that other requests' streams continue."""
    serving = _require(state)
    choices = [ChoiceState() for _ in plan.sampling]
    num_reported = 0
    usage = Usage(plan.num_prompt_tokens)
    async with aclosing(serving.generator.run(plan)) as pieces:
        async for piece in pieces:
            choice = choices[piece.index]
            if choice.last is None:
                count_prompt(usage, plan, piece)
                choice.prompt_logprobs = piece.prompt_logprobs
            if echo is not None:
                _add_echo(piece, plan, echo, is_first=choice.last is None)
            choice.text += piece.text
            choice.logprobs.extend(piece.logprobs)
            if body.return_token_ids:
                choice.token_ids += piece.token_ids
            choice.last = replace(piece, logprobs=[], prompt_logprobs=None)
            num_reported += sum(len(position.token_ids) for position in piece.logprobs)
            if num_reported > MAX_REPORTED:
                raise invalid(
                    f"the response would have more than {MAX_REPORTED} log-probabilities; set max_tokens, lower n or "
                    f"logprobs, or set stream to true",
                    "logprobs",
                )
            usage.num_completion_tokens += piece.num_tokens
    wants_logprobs = plan.sampling[0].logprobs is not None

    def build_response() -> Response:
        entries = []
        for choice in choices:
            assert choice.last is not None  # every choice ends with a piece
            entry = builder.choice(choice.last, choice.text, list(choice.logprobs) if wants_logprobs else None)
            if body.prompt_logprobs is not None and not builder.has_one_prompt:
                entry["prompt_logprobs"] = prompt_logprobs(serving.tokenizer, choice.prompt_logprobs or [])
            if body.return_token_ids:
                entry["token_ids"] = choice.token_ids
            entries.append(entry)
        whole = builder.whole(entries, usage)
        if body.prompt_logprobs is not None and builder.has_one_prompt:
            whole["prompt_logprobs"] = prompt_logprobs(serving.tokenizer, choices[0].prompt_logprobs or [])
        if body.return_token_ids:
            builder.add_prompt_ids(whole, [plan.prompt_of(index) for index in range(len(choices))])
        return Response(long_json(whole), media_type="application/json")

    if body.return_token_ids:
        num_reported += plan.num_prompt_tokens * plan.n // TOKEN_IDS_PER_LOGPROB
    num_reported += sum(choice.prompt_logprobs.num_values for choice in choices if choice.prompt_logprobs is not None)
    if num_reported <= MAX_INLINE_LOGPROBS:
        return build_response()
    async with state.long_responses:
        return await asyncio.to_thread(build_response)


async def _stream(
    ahead: ReadAhead, body: GenerationRequest, builder: ResponseBuilder, plan: GenerationPlan, echo: Echo | None
) -> AsyncGenerator[str, None]:
    options = body.stream_options
    includes_usage = options is not None and options.include_usage
    has_continuous_usage = includes_usage and options is not None and options.continuous_usage_stats
    wants_logprobs = plan.sampling[0].logprobs is not None
    choices = [ChoiceStream(owes_prompt_ids=bool(body.return_token_ids)) for _ in plan.sampling]
    usage = Usage(plan.num_prompt_tokens)

    def write_chunk(chunk: dict[str, Any], index: int) -> str:
        if choices[index].owes_prompt_ids:
            builder.add_prompt_ids(chunk, [plan.prompt_of(index)])
            choices[index].owes_prompt_ids = False
        if includes_usage:
            chunk["usage"] = usage.to_json() if has_continuous_usage else None
        return event(chunk)

    def piece_event(piece: Piece) -> str | None:
        """Return the event of a piece, or None if there is nothing to send yet."""
        choice = choices[piece.index]
        if not choice.has_started:
            count_prompt(usage, plan, piece)
        if echo is not None:
            _add_echo(piece, plan, echo, is_first=not choice.has_started)
        choice.has_started = True
        usage.num_completion_tokens += piece.num_tokens
        choice.logprobs += piece.logprobs
        if body.return_token_ids:
            choice.token_ids += piece.token_ids
        if not piece.text and piece.finish_reason is None:
            return None  # characters or a possible stop string are held back
        positions = choice.logprobs if wants_logprobs else None
        chunk = builder.chunk(piece, positions, choice.offset)
        if chunk is None:
            return None
        if body.return_token_ids:
            chunk["choices"][0]["token_ids"] = choice.token_ids
            choice.token_ids = []
        choice.logprobs = []
        choice.offset += len(piece.text)
        return write_chunk(chunk, piece.index)

    def plain_chunk(text: str, index: int) -> dict[str, Any]:
        chunk = builder.chunk(Piece(index, text, 1), None, 0)
        assert chunk is not None  # plain formats always return a chunk
        return chunk | ({"usage": None} if includes_usage else {})

    # Fast path for chunks that only differ in their text, nearly all of them.
    is_uniform = builder.is_plain and not (
        wants_logprobs or body.return_token_ids or has_continuous_usage or echo is not None
    )
    async with aclosing(ahead) as pieces:
        for index in range(len(plan.sampling)):
            for chunk in builder.opening(index):
                yield write_chunk(chunk, index)
        async for piece in pieces:
            choice = choices[piece.index]
            if is_uniform and piece.texts is not None and piece.finish_reason is None and choice.has_started:
                if choice.template is None:
                    choice.template = EventTemplate.of(partial(plain_chunk, index=piece.index))
                usage.num_completion_tokens += piece.num_tokens
                events = choice.template.fill(filter(None, piece.texts))
            else:
                events = "".join(filter(None, map(piece_event, piece.split())))
            if events:
                yield events
    if includes_usage:
        yield event(builder.usage_chunk(usage))


def count_prompt(usage: Usage, plan: GenerationPlan, piece: Piece) -> None:
    """Count cached tokens once per prompt, for any number of choices."""
    if piece.index % plan.n == 0:
        usage.num_cached_tokens += piece.num_cached_tokens
        usage.num_host_cached_tokens += piece.num_host_cached_tokens


def _add_echo(piece: Piece, plan: GenerationPlan, echo: Echo, *, is_first: bool) -> None:
    """Prepend the echoed prompt to the piece; remove the generated token if only the prompt is returned."""
    if echo.alone:
        piece.text, piece.num_tokens, piece.logprobs, piece.token_ids = "", 0, [], []
    if is_first:
        prompt = plan.prompt_of(piece.index)
        piece.text = echo.texts[piece.index // plan.n] + piece.text
        if piece.prompt_logprobs is not None:
            first = TokenLogprobs([prompt[0]], [], 0)  # the first token has no predecessor and no probability
            piece.logprobs = [first, *piece.prompt_logprobs, *piece.logprobs]


def _log(builder: ResponseBuilder, plan: GenerationPlan) -> None:
    """Log vLLM's line, without the client's prompt."""
    logger.info(
        "Received request %s: %d prompts of %d tokens, n: %d, priority: %d, params: %s",
        builder.request_id,
        len(plan.prompts),
        plan.num_prompt_tokens,
        plan.n,
        plan.priority,
        plan.sampling[0],
    )


def _require(state: ServerState) -> Serving:
    if state.serving is None:
        raise ApiError(503, "the engine is loading")
    return state.serving

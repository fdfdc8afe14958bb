"""From a plan to an answer: the pieces of all choices, collected into one body or written as a stream of events."""

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
from trimtab_engine.api.http.streaming import EventStream, EventTemplate, event, unless_gone
from trimtab_engine.api.openai.admission import QueueFull, Ticket
from trimtab_engine.api.openai.forms import AnswerForm, Usage
from trimtab_engine.api.openai.generation import GenerationPlan, Piece
from trimtab_engine.api.openai.logprobs import prompt_logprobs
from trimtab_engine.api.openai.protocol import MAX_REPORTED, GenerationRequest
from trimtab_engine.api.openai.read_ahead import ReadAhead
from trimtab_engine.api.openai.state import ServerState, Serving
from trimtab_engine.scheduling.sampling import TokenLogprobs

REPORTED_AT_ONCE = 1000  # log-probabilities that are written within milliseconds
IDS_LIKE_ONE_REPORT = 10  # token ids take as long to write as one log-probability

logger = logging.getLogger("trimtab_engine.requests")


@dataclass(frozen=True, slots=True)
class Echo:
    """Prompts that come back before their continuations; with max_tokens 0 they come back alone."""

    texts: Sequence[str]
    alone: bool


@dataclass(slots=True)
class ChoiceSoFar:
    """What has come of one choice."""

    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    last: Piece | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None


async def answer(
    state: ServerState,
    request: Request,
    body: GenerationRequest,
    form: AnswerForm,
    plan: GenerationPlan,
    until: ExitStack,
    echo: Echo | None = None,
) -> Response:
    """A whole answer, or a stream; that takes over `until`, so the request counts as being answered to its end."""
    if state.options.log_requests:
        _log(form, plan)
    plan = replace(plan, ticket=_admitted(state, plan, until))
    if body.stream:
        pieces = ReadAhead(_require(state).generator.run(plan), form.request_id, keeps_ids=bool(body.return_token_ids))
        return EventStream(_stream(pieces, body, form, plan, echo), until.pop_all(), pieces.begin)
    return await unless_gone(request, _whole(state, body, form, plan, echo))


def _admitted(state: ServerState, plan: GenerationPlan, until: ExitStack) -> Ticket:
    """A place in the queue until the request ends. Raises QueueFull."""
    try:
        ticket = state.admission.admit([len(plan.prompt_of(index)) for index in range(len(plan.sampling))])
    except QueueFull as full:
        _require(state).generator.observer.rejected(full.reason)
        raise
    until.callback(ticket.close)
    return ticket


async def _whole(
    state: ServerState, body: GenerationRequest, form: AnswerForm, plan: GenerationPlan, echo: Echo | None
) -> Response:
    """The answer, written in a thread where it has much to report: other requests' streams go on meanwhile."""
    serving = _require(state)
    choices = [ChoiceSoFar() for _ in plan.sampling]
    num_reported = 0
    usage = Usage(plan.num_prompt_tokens)
    async with aclosing(serving.generator.run(plan)) as pieces:
        async for piece in pieces:
            choice = choices[piece.index]
            if choice.last is None:
                _count_prompt(usage, plan, piece)
                choice.prompt_logprobs = piece.prompt_logprobs
            if echo is not None:
                _echo_into(piece, plan, echo, is_first=choice.last is None)
            choice.text += piece.text
            choice.logprobs += piece.logprobs
            if body.return_token_ids:
                choice.token_ids += piece.token_ids
            choice.last = piece
            num_reported += sum(len(position.token_ids) for position in piece.logprobs)
            if num_reported > MAX_REPORTED:
                raise invalid(
                    f"more than {MAX_REPORTED} log-probabilities would be in one answer: set max_tokens, lower n or "
                    f"the number at each token, or set stream to true",
                    "logprobs",
                )
            usage.num_completion_tokens += piece.num_tokens
    wants_logprobs = plan.sampling[0].logprobs is not None

    def written() -> Response:
        entries = []
        for choice in choices:
            assert choice.last is not None  # every choice ends with a piece
            entry = form.choice(choice.last, choice.text, choice.logprobs if wants_logprobs else None)
            if body.prompt_logprobs is not None:
                entry["prompt_logprobs"] = prompt_logprobs(serving.tokenizer, choice.prompt_logprobs or [])
            if body.return_token_ids:
                entry["token_ids"] = choice.token_ids
            entries.append(entry)
        whole = form.whole(entries, usage)
        if body.return_token_ids:
            form.add_prompt_ids(whole, [plan.prompt_of(index) for index in range(len(choices))])
        return Response(long_json(whole), media_type="application/json")

    if body.return_token_ids:
        num_reported += plan.num_prompt_tokens * plan.n // IDS_LIKE_ONE_REPORT
    num_reported += sum(len(position.token_ids) for c in choices for position in c.prompt_logprobs or ())
    return written() if num_reported <= REPORTED_AT_ONCE else await asyncio.to_thread(written)


async def _stream(
    ahead: ReadAhead, body: GenerationRequest, form: AnswerForm, plan: GenerationPlan, echo: Echo | None
) -> AsyncGenerator[str, None]:
    options = body.stream_options
    includes_usage = options is not None and options.include_usage
    counts_on = includes_usage and options is not None and options.continuous_usage_stats
    wants_logprobs = plan.sampling[0].logprobs is not None
    held: list[list[TokenLogprobs]] = [[] for _ in plan.sampling]
    held_ids: list[list[int]] = [[] for _ in plan.sampling]
    offsets = [0] * len(plan.sampling)
    has_begun = [False] * len(plan.sampling)
    owed_prompt = [bool(body.return_token_ids)] * len(plan.sampling)
    usage = Usage(plan.num_prompt_tokens)

    def written(chunk: dict[str, Any], index: int) -> str:
        if owed_prompt[index]:
            form.add_prompt_ids(chunk, [plan.prompt_of(index)])
            owed_prompt[index] = False
        if includes_usage:
            chunk["usage"] = usage.to_json() if counts_on else None
        return event(chunk)

    def events_of(piece: Piece) -> str | None:
        """The piece as a chunk; None: nothing to send yet."""
        index = piece.index
        if not has_begun[index]:
            _count_prompt(usage, plan, piece)
        if echo is not None:
            _echo_into(piece, plan, echo, is_first=not has_begun[index])
        has_begun[index] = True
        usage.num_completion_tokens += piece.num_tokens
        held[index] += piece.logprobs
        if body.return_token_ids:
            held_ids[index] += piece.token_ids
        if not piece.text and piece.finish_reason is None:
            return None  # characters or a possible stop string are held back
        positions = held[index] if wants_logprobs else None
        body_of_piece = form.chunk(piece, positions, offsets[index])
        if body_of_piece is None:
            return None
        if body.return_token_ids:
            body_of_piece["choices"][0]["token_ids"] = held_ids[index]
            held_ids[index] = []
        held[index] = []
        offsets[index] += len(piece.text)
        return written(body_of_piece, index)

    def chunk_of(text: str, index: int) -> dict[str, Any]:
        chunk = form.chunk(Piece(index, text, 1), None, 0)
        assert chunk is not None  # the form is a plain one
        return chunk | ({"usage": None} if includes_usage else {})

    # Chunks that differ in their text alone: nearly all, and so kept short.
    are_alike = form.is_plain and not (wants_logprobs or body.return_token_ids or counts_on or echo is not None)
    templates: dict[int, EventTemplate] = {}
    async with aclosing(ahead) as pieces:
        for index in range(len(plan.sampling)):
            for chunk in form.opening(index):
                yield written(chunk, index)
        async for piece in pieces:
            index = piece.index
            if are_alike and piece.texts is not None and piece.finish_reason is None and has_begun[index]:
                if index not in templates:
                    templates[index] = EventTemplate.of(partial(chunk_of, index=index))
                usage.num_completion_tokens += piece.num_tokens
                events = templates[index].fill(filter(None, piece.texts))
            else:
                events = "".join(filter(None, map(events_of, piece.split())))
            if events:
                yield events
    if includes_usage:
        yield event(form.usage_chunk(usage))


def _count_prompt(usage: Usage, plan: GenerationPlan, piece: Piece) -> None:
    """Cached tokens count once per prompt, however many choices continue it."""
    if piece.index % plan.n == 0:
        usage.num_cached_tokens += piece.num_cached_tokens
        usage.num_host_cached_tokens += piece.num_host_cached_tokens


def _echo_into(piece: Piece, plan: GenerationPlan, echo: Echo, *, is_first: bool) -> None:
    """Put what comes back of the prompt before the piece; take out what was generated when the prompt comes alone."""
    if echo.alone:
        piece.text, piece.num_tokens, piece.logprobs, piece.token_ids = "", 0, [], []
    if is_first:
        prompt = plan.prompt_of(piece.index)
        piece.text = echo.texts[piece.index // plan.n] + piece.text
        if piece.prompt_logprobs is not None:
            first = TokenLogprobs([prompt[0]], [], 0)  # nothing comes before it: it has no probability
            piece.logprobs = [first, *piece.prompt_logprobs, *piece.logprobs]


def _log(form: AnswerForm, plan: GenerationPlan) -> None:
    """vLLM's line, without the prompt: that is the client's."""
    logger.info(
        "Received request %s: %d prompts of %d tokens, n: %d, priority: %d, params: %s",
        form.request_id,
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

"""OpenAI's surface: completions, chat completions, models, and vLLM's /tokenize. protocol.py checks the requests."""

import time
from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from trimtab_engine.api.answers import AnswerForm, ChatForm, CompletionForm, usage
from trimtab_engine.api.error_responses import ApiError, invalid
from trimtab_engine.api.generation import GenerationPlan, Piece
from trimtab_engine.api.protocol import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    TokenizeRequest,
)
from trimtab_engine.api.state import ServerState, Serving
from trimtab_engine.api.streaming import EventStream, event, unless_gone
from trimtab_engine.errors import InvalidRequest
from trimtab_engine.messages import TokenLogprobs

MAX_CHARACTERS_PER_TOKEN = 64  # no prompt within max_model_len is longer; beyond it, tokenising would be a waste


def openai_router(state: ServerState) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        arrival, serving = time.monotonic(), state.require_serving()
        with state.answering() as until:
            form = CompletionForm(state.check_model(body.model), serving.tokenizer)
            try:
                prompt = body.single_prompt()
            except ValueError as error:
                raise invalid(str(error), "prompt") from error
            ids = await _encode(serving, prompt, "prompt") if isinstance(prompt, str) else _known(serving, prompt)
            plan = _plan(state, serving, body, form, ids, body.max_tokens or 16, body.logprobs, arrival)
            return await _answer(state, request, body, form, plan, until)

    @router.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        arrival, serving = time.monotonic(), state.require_serving()
        max_tokens = body.max_completion_tokens or body.max_tokens
        if max_tokens is not None and body.min_tokens > max_tokens:
            raise invalid(f"min_tokens is {body.min_tokens}, above max_completion_tokens {max_tokens}", "min_tokens")
        with state.answering() as until:
            form = ChatForm(state.check_model(body.model), serving.tokenizer)
            text = await _rendered(serving, [message.for_template() for message in body.messages])
            ids = await _encode(serving, text, "messages", add_special_tokens=False)
            plan = _plan(state, serving, body, form, ids, max_tokens, body.num_logprobs, arrival)
            return await _answer(state, request, body, form, plan, until)

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        serving = state.serving
        entries = [
            {
                "id": name,
                "object": "model",
                "created": int(state.started),
                "owned_by": "trimtab",
                "root": state.options.served_model_names[0],
                "parent": None,
                "max_model_len": serving.facts.max_model_len if serving else None,
            }
            for name in state.options.served_model_names
        ]
        return {"object": "list", "data": entries}

    @router.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        serving = state.require_serving()
        state.check_model(body.model)
        if body.messages is not None:
            messages = [message.for_template() for message in body.messages]
            text = await _rendered(serving, messages, add_generation_prompt=body.add_generation_prompt)
            ids = await _bounded(serving, text, "messages", add_special_tokens=False)
        else:
            ids = await _bounded(serving, body.prompt or "", "prompt", add_special_tokens=body.add_special_tokens)
        names = [serving.tokenizer.token_name(token_id) for token_id in ids] if body.return_token_strs else None
        return {
            "count": len(ids),
            "max_model_len": serving.facts.max_model_len,
            "tokens": ids,
            "token_strs": names,
        }

    return router


# --- from a request to a plan -------------------------------------------------------------------------------------


async def _rendered(serving: Serving, messages: list[dict[str, str]], *, add_generation_prompt: bool = True) -> str:
    try:
        return await serving.tokenizer.render_chat_async(messages, add_generation_prompt=add_generation_prompt)
    except InvalidRequest as error:
        raise invalid(str(error), "messages") from error


async def _bounded(serving: Serving, text: str, param: str, *, add_special_tokens: bool) -> list[int]:
    """Tokens of a text that is not absurdly long."""
    limit = serving.facts.max_model_len
    if len(text) > limit * MAX_CHARACTERS_PER_TOKEN:
        raise invalid(
            f"this model's maximum context length is {limit} tokens; the {param} has {len(text)} characters, which "
            f"cannot be fewer tokens than that; shorten it",
            param,
        )
    return await serving.tokenizer.encode_async(text, add_special_tokens=add_special_tokens)


async def _encode(serving: Serving, text: str, param: str, *, add_special_tokens: bool = True) -> list[int]:
    ids = await _bounded(serving, text, param, add_special_tokens=add_special_tokens)
    if not ids:
        raise invalid(f"{param} has no tokens; send at least one", param)
    return ids


def _known(serving: Serving, ids: list[int]) -> list[int]:
    """Token ids as the client sent them, all inside the vocabulary."""
    highest = max(ids)
    if highest >= serving.facts.vocab_size:
        raise invalid(f"token id {highest} is out of vocabulary; it has {serving.facts.vocab_size} tokens", "prompt")
    return ids


def _plan(
    state: ServerState,
    serving: Serving,
    body: GenerationRequest,
    form: AnswerForm,
    ids: list[int],
    max_tokens: int | None,
    logprobs: int | None,
    arrival: float,
) -> GenerationPlan:
    """Judge lengths against the model's context. `max_tokens` None: as much as fits."""
    limit, asked = serving.facts.max_model_len, len(ids)
    if asked >= limit:
        raise invalid(
            f"This model's maximum context length is {limit} tokens. However, your request has {asked} input tokens, "
            f"and one token of output needs room. Please reduce the length of the input.",
            "prompt",
        )
    if max_tokens is not None and asked + max_tokens > limit:
        raise invalid(
            f"This model's maximum context length is {limit} tokens. However, you requested {max_tokens} output tokens "
            f"and your prompt contains {asked} input tokens, {asked + max_tokens} in all. Please reduce either.",
            "max_tokens",
        )
    if logprobs is not None and logprobs > state.options.max_logprobs:
        raise invalid(f"logprobs is {logprobs}; at most {state.options.max_logprobs} are given here", "logprobs")
    outside = [token_id for token_id in body.stop_token_ids or () if token_id >= serving.facts.vocab_size]
    if outside:
        raise invalid(
            f"stop_token_ids has {outside[0]}, out of a vocabulary of {serving.facts.vocab_size}", "stop_token_ids"
        )
    room = max_tokens or limit - asked
    if body.min_tokens > room:
        raise invalid(f"min_tokens is {body.min_tokens}, but at most {room} tokens can be generated", "min_tokens")
    return GenerationPlan(
        request_id=form.request_id,
        prompt_token_ids=ids,
        sampling=[body.sampling(max_tokens=room, logprobs=logprobs, index=index) for index in range(body.n)],
        stop=body.stop_strings,
        include_stop=body.include_stop_str_in_output,
        skip_special_tokens=body.skip_special_tokens,
        arrival_time=arrival,
    )


# --- from pieces to an answer -------------------------------------------------------------------------------------


async def _answer(
    state: ServerState,
    request: Request,
    body: GenerationRequest,
    form: AnswerForm,
    plan: GenerationPlan,
    until: ExitStack,
) -> Response:
    """A whole answer, or a stream; that takes over `until`, so the request counts as being answered to its end."""
    if body.stream:
        return EventStream(_stream(state, body, form, plan), until.pop_all())
    return JSONResponse(await unless_gone(request, _whole(state, form, plan)))


async def _whole(state: ServerState, form: AnswerForm, plan: GenerationPlan) -> dict[str, Any]:
    texts = [""] * len(plan.sampling)
    logprobs: list[list[TokenLogprobs]] = [[] for _ in plan.sampling]
    last: list[Piece | None] = [None] * len(plan.sampling)
    num_tokens = 0
    async with aclosing(_require(state).generator.run(plan)) as pieces:
        async for piece in pieces:
            texts[piece.index] += piece.text
            logprobs[piece.index] += piece.logprobs
            num_tokens += piece.num_tokens
            last[piece.index] = piece
    wants_logprobs = plan.sampling[0].logprobs is not None
    choices = [
        form.choice(piece, text, positions if wants_logprobs else None)
        for piece, text, positions in zip(last, texts, logprobs, strict=True)
        if piece is not None
    ]
    return form.whole(choices, usage(len(plan.prompt_token_ids), num_tokens))


async def _stream(
    state: ServerState, body: GenerationRequest, form: AnswerForm, plan: GenerationPlan
) -> AsyncGenerator[str, None]:
    wants_logprobs = plan.sampling[0].logprobs is not None
    held: list[list[TokenLogprobs]] = [[] for _ in plan.sampling]
    offsets = [0] * len(plan.sampling)
    num_tokens = 0
    for index in range(len(plan.sampling)):
        for chunk in form.opening(index):
            yield event(chunk)
    async with aclosing(_require(state).generator.run(plan)) as pieces:
        async for piece in pieces:
            num_tokens += piece.num_tokens
            held[piece.index] += piece.logprobs
            if not piece.text and piece.finish_reason is None:
                continue  # characters or a possible stop string are held back
            positions = held[piece.index] if wants_logprobs else None
            yield event(form.chunk(piece, positions, offsets[piece.index]))
            held[piece.index] = []
            offsets[piece.index] += len(piece.text)
    if body.includes_usage:
        yield event(form.usage_chunk(usage(len(plan.prompt_token_ids), num_tokens)))


def _require(state: ServerState) -> Serving:
    if state.serving is None:
        raise ApiError(503, "the engine is loading")
    return state.serving

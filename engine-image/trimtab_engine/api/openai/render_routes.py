"""vLLM's …/render routes: a request's prompt tokens and sampling parameters, without running it.

The response has the format of vLLM's token-in, token-out routes.
"""

from typing import Any

from fastapi import APIRouter, Request

from trimtab_engine.api.openai.constraints import Constraint
from trimtab_engine.api.openai.planning import reject_media
from trimtab_engine.api.openai.preparation import PreparedRequest, prepare_chat, prepare_completion
from trimtab_engine.api.openai.protocol import ChatRequest, CompletionRequest, GenerationRequest
from trimtab_engine.api.openai.state import ServerState
from trimtab_engine.scheduling.sampling import tokens_of

Json = dict[str, Any]


def render_router(state: ServerState) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions/render")
    async def render_completion(body: CompletionRequest, request: Request) -> list[Json]:
        prepared = await prepare_completion(state, state.require_generation(), body, request)
        several = len(prepared.plan.prompts) > 1
        return [
            _render_request(body, prepared, state.check_model(body.model), number, f"-{number}" if several else "")
            for number in range(len(prepared.plan.prompts))
        ]

    @router.post("/v1/chat/completions/render")
    async def render_chat(body: ChatRequest, request: Request) -> Json:
        reject_media(body.messages, "/v1/chat/completions/render")
        prepared = await prepare_chat(state, state.require_generation(), body, request)
        return _render_request(body, prepared, state.check_model(body.model), 0, "")

    return router


def _render_request(body: GenerationRequest, prepared: PreparedRequest, model: str, number: int, suffix: str) -> Json:
    """Return prompt `number` of the request; `suffix` makes its ID unique."""
    plan = prepared.plan
    return {
        "request_id": plan.request_id + suffix,
        "model": model,
        "token_ids": plan.prompts[number],
        "features": None,
        "sampling_params": _sampling_params(body, prepared, number),
        "stream": body.stream,
        "stream_options": None if body.stream_options is None else body.stream_options.model_dump(),
        "cache_salt": body.cache_salt,
        "priority": body.priority,
        "kv_transfer_params": None,
    }


def _sampling_params(body: GenerationRequest, prepared: PreparedRequest, number: int) -> Json:
    """Return the first choice's parameters under vLLM's names; the choices of a prompt only differ by their seeds."""
    sampling = prepared.plan.sampling[number * body.n]
    return {
        "n": body.n,
        "max_tokens": sampling.max_tokens,
        "min_tokens": sampling.min_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "seed": sampling.seed,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "stop": body.stop_strings,
        "stop_token_ids": list(sampling.stop_token_ids),
        "include_stop_str_in_output": body.include_stop_str_in_output,
        "ignore_eos": sampling.ignore_eos,
        "skip_special_tokens": body.skip_special_tokens,
        "logprobs": sampling.logprobs,
        "prompt_logprobs": sampling.prompt_logprobs,
        "logit_bias": sampling.logit_bias,
        "allowed_token_ids": tokens_of(sampling.allowed_tokens) or None,
        "bad_words": body.bad_words or [],
        "structured_outputs": _structured_outputs(prepared.constraint),
    }


def _structured_outputs(constraint: Constraint | None) -> Json | None:
    if constraint is None:
        return None
    return {
        constraint.kind: constraint.value,
        "disable_any_whitespace": not constraint.any_whitespace,
        "whitespace_pattern": constraint.whitespace_pattern,
    }

"""POST /v1/embeddings: one vector per input, in OpenAI's format."""

import base64
import json
import logging
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace

from fastapi import APIRouter, Request, Response

from trimtab_engine.api.http.dispatches import dispatch_of
from trimtab_engine.api.http.errors import invalid
from trimtab_engine.api.http.request_identity import key_salt, request_id_of
from trimtab_engine.api.http.streaming import cancel_on_disconnect
from trimtab_engine.api.metrics.tracing import TRACE_HEADERS
from trimtab_engine.api.openai.admission import QueueFull
from trimtab_engine.api.openai.embedding import EmbeddingPlan, EmbeddingResult
from trimtab_engine.api.openai.embedding_request import MAX_VALUES, EmbeddingRequest
from trimtab_engine.api.openai.planning import (
    check_known,
    pinned_rank,
    reject_media,
    render_chat,
    tokenize_bounded,
    tokenize_prompts,
)
from trimtab_engine.api.openai.response_builders import Usage
from trimtab_engine.api.openai.state import ServerState, Serving
from trimtab_engine.scheduling.pooling import Pooling

DIGITS = 9  # enough to distinguish any two float32 values

logger = logging.getLogger("trimtab_engine.requests")


def embedding_router(state: ServerState) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/embeddings")
    async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
        serving = state.require_serving()
        with state.track_generation() as until:
            model = state.check_model(body.model)
            plan = await build_embedding_plan(state, serving, body, request)
            if state.options.log_requests:
                _log(plan)
            return await cancel_on_disconnect(request, _answer(state, serving, body, model, plan, until))

    return router


async def build_embedding_plan(
    state: ServerState, serving: Serving, body: EmbeddingRequest, request: Request
) -> EmbeddingPlan:
    arrival = time.monotonic()
    pooling = _pooling_params(serving, body)
    prompts = await _tokenize_inputs(serving, body)
    _check_size(serving, body, pooling, len(prompts))
    return EmbeddingPlan(
        request_id=request_id_of(request, body.request_id),
        prompts=prompts,
        pooling=pooling,
        arrival_time=arrival,
        cache_salt=key_salt(request) + (body.cache_salt or ""),
        priority=body.priority,
        data_parallel_rank=pinned_rank(state, request),
        adapter=state.adapter_of(body.model),
        trace_headers={name: request.headers[name] for name in TRACE_HEADERS if name in request.headers}
        if state.options.otlp_traces_endpoint
        else {},
        dispatch=dispatch_of(request),
    )


def _pooling_params(serving: Serving, body: EmbeddingRequest) -> Pooling:
    """Return the pooling parameters.

    Raises:
        ApiError: 400 if this engine does not compute embeddings, or `dimensions` is too large.
    """
    tasks = serving.facts.tasks
    if tasks.no_pooling:
        raise invalid(f"this engine does not compute embeddings: {tasks.no_pooling}")
    most = tasks.pooler.hidden_size
    if body.dimensions is not None and body.dimensions > most:
        raise invalid(f"dimensions exceeds the model's {most} ({body.dimensions}); set at most {most}", "dimensions")
    return tasks.pooler.pooling(dimensions=body.dimensions, normalize=body.is_normalised)


async def _tokenize_inputs(serving: Serving, body: EmbeddingRequest) -> list[list[int]]:
    """Return the token IDs of every input, checked against the maximum length."""
    if body.messages is not None:
        reject_media(body.messages, "/v1/embeddings")
        text = await render_chat(serving, body.messages, body)
        ids = [await tokenize_bounded(serving, text, "messages", add_special_tokens=bool(body.add_special_tokens))]
        param = "messages"
    else:
        param = "input"
        try:
            inputs = body.inputs()
        except ValueError as error:
            raise invalid(str(error), param) from error
        ids, _ = await tokenize_prompts(serving, inputs, param, add_special_tokens=body.add_special_tokens is not False)
    if not all(ids):
        raise invalid(f"{param} has no tokens; send at least one", param)
    limit = serving.facts.max_model_len
    kept = [body.kept(prompt, max_model_len=limit + 1, max_tokens=None) for prompt in ids]  # no output tokens follow
    for index, prompt in enumerate(kept):
        if len(prompt) > limit:
            which = f"input {index}" if len(kept) > 1 else "your request"
            raise invalid(
                f"This model's maximum context length is {limit} tokens. However, {which} has {len(prompt)} input "
                f"tokens. Please reduce the length of the input, or set truncate_prompt_tokens.",
                param,
            )
        check_known(serving, prompt, param)
    return kept


def _check_size(serving: Serving, body: EmbeddingRequest, pooling: Pooling, num_inputs: int) -> None:
    """Check the number of values in one response against MAX_VALUES."""
    width = pooling.dimensions or serving.facts.tasks.pooler.hidden_size
    most = MAX_VALUES[body.encoding_format]
    if num_inputs * width > most:
        hint = "" if body.encoding_format == "base64" else ", or set encoding_format to base64"
        raise invalid(
            f"the response would have {num_inputs * width} values (inputs x dimensions), above {most}; send fewer "
            f"inputs, lower dimensions{hint}",
            "input",
        )


async def _answer(
    state: ServerState, serving: Serving, body: EmbeddingRequest, model: str, plan: EmbeddingPlan, until: ExitStack
) -> Response:
    embedded = await embed(state, serving, plan, WRITERS[body.encoding_format], until)
    return Response(_response_body(model, plan, embedded), media_type="application/json")


async def embed(
    state: ServerState, serving: Serving, plan: EmbeddingPlan, write: Callable[[bytes], bytes], until: ExitStack
) -> list[EmbeddingResult]:
    """Admit the plan and return the vectors of its inputs.

    Raises:
        QueueFull: A queue limit is reached.
    """
    try:
        ticket = state.admission.admit([len(prompt) for prompt in plan.prompts])
    except QueueFull as full:
        serving.embedder.observer.rejected(full.reason)
        raise
    until.callback(ticket.close)
    return await serving.embedder.run(replace(plan, ticket=ticket), write)


def _to_json_list(vector: bytes) -> bytes:
    """Return a float32 vector as a JSON list."""
    values = array("f", vector)
    return f"[{','.join([format(value, f'.{DIGITS}g') for value in values])}]".encode()


def _to_base64(vector: bytes) -> bytes:
    """Return a vector's little-endian bytes as a JSON base64 string."""
    return b'"%b"' % base64.b64encode(vector)


WRITERS: dict[str, Callable[[bytes], bytes]] = {"float": _to_json_list, "base64": _to_base64}


def _response_body(model: str, plan: EmbeddingPlan, embedded: Sequence[EmbeddingResult]) -> bytes:
    """Return OpenAI's response body; the vectors are already JSON."""
    entries = b",".join(
        [b'{"object":"embedding","index":%d,"embedding":%b}' % (i, one.written) for i, one in enumerate(embedded)]
    )
    usage = Usage(
        plan.num_prompt_tokens,
        num_cached_tokens=sum(one.num_cached_tokens for one in embedded),
        num_host_cached_tokens=sum(one.num_host_cached_tokens for one in embedded),
    )
    head = json.dumps(
        {"id": f"embd-{plan.request_id}", "object": "list", "created": int(time.time()), "model": model},
        ensure_ascii=False,
        separators=(",", ":"),
    )
    counted = json.dumps(usage.to_json(), separators=(",", ":"))
    return b'%b,"data":[%b],"usage":%b}' % (head[:-1].encode(), entries, counted.encode())


def _log(plan: EmbeddingPlan) -> None:
    """Log vLLM's line, without the client's inputs."""
    logger.info(
        "Received request %s: %d prompts of %d tokens, priority: %d, params: %s",
        plan.request_id,
        len(plan.prompts),
        plan.num_prompt_tokens,
        plan.priority,
        plan.pooling,
    )

"""POST /v1/embeddings: one vector for each input, as OpenAI's clients ask for them."""

import base64
import json
import logging
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace

from fastapi import APIRouter, Request, Response

from trimtab_engine.api.http.errors import invalid
from trimtab_engine.api.http.request_identity import key_salt, request_id_of
from trimtab_engine.api.http.streaming import unless_gone
from trimtab_engine.api.metrics.tracing import TRACE_HEADERS
from trimtab_engine.api.openai.admission import QueueFull
from trimtab_engine.api.openai.embedding import Embedded, EmbeddingPlan
from trimtab_engine.api.openai.embedding_request import MAX_VALUES, EmbeddingRequest
from trimtab_engine.api.openai.forms import Usage
from trimtab_engine.api.openai.planning import bounded, check_known, ids_of_prompts, pinned_rank, refuse_media, rendered
from trimtab_engine.api.openai.state import ServerState, Serving
from trimtab_engine.scheduling.pooling import Pooling

DIGITS = 9  # as many as tell any two float32 apart

logger = logging.getLogger("trimtab_engine.requests")


def embedding_router(state: ServerState) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/embeddings")
    async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
        serving = state.require_serving()
        with state.answering() as until:
            model = state.check_model(body.model)
            plan = await _plan_of(state, serving, body, request)
            if state.options.log_requests:
                _log(plan)
            return await unless_gone(request, _answer(state, serving, body, model, plan, until))

    return router


async def _plan_of(state: ServerState, serving: Serving, body: EmbeddingRequest, request: Request) -> EmbeddingPlan:
    arrival = time.monotonic()
    pooling = _pooling_of(serving, body)
    prompts = await _prompts_of(serving, body)
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
    )


def _pooling_of(serving: Serving, body: EmbeddingRequest) -> Pooling:
    """ApiError 400 where this engine gives no vectors, and for more dimensions than there are."""
    tasks = serving.facts.tasks
    if tasks.no_pooling:
        raise invalid(f"this engine gives no vectors: {tasks.no_pooling}")
    most = tasks.pooler.hidden_size
    if body.dimensions is not None and body.dimensions > most:
        raise invalid(f"dimensions is {body.dimensions}; this model's vectors have {most}", "dimensions")
    return tasks.pooler.pooling(dimensions=body.dimensions, normalize=body.is_normalised)


async def _prompts_of(serving: Serving, body: EmbeddingRequest) -> list[list[int]]:
    """Token ids of every input, of which each fits."""
    if body.messages is not None:
        refuse_media(body.messages, "/v1/embeddings")
        text = await rendered(serving, body.messages, body)
        ids = [await bounded(serving, text, "messages", add_special_tokens=bool(body.add_special_tokens))]
        param = "messages"
    else:
        param = "input"
        try:
            inputs = body.inputs()
        except ValueError as error:
            raise invalid(str(error), param) from error
        ids, _ = await ids_of_prompts(serving, inputs, param, add_special_tokens=body.add_special_tokens is not False)
    if not all(ids):
        raise invalid(f"{param} has no tokens; send at least one", param)
    limit = serving.facts.max_model_len
    kept = [body.kept(prompt, max_model_len=limit + 1, max_tokens=None) for prompt in ids]  # nothing comes after it
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
    """One answer has so many values of vectors."""
    width = pooling.dimensions or serving.facts.tasks.pooler.hidden_size
    most = MAX_VALUES[body.encoding_format]
    if num_inputs * width > most:
        hint = "" if body.encoding_format == "base64" else ", or set encoding_format to base64"
        raise invalid(
            f"{num_inputs * width} values would be in one answer (inputs x dimensions); at most {most} are: send fewer "
            f"inputs at once, lower dimensions{hint}",
            "input",
        )


async def _answer(
    state: ServerState, serving: Serving, body: EmbeddingRequest, model: str, plan: EmbeddingPlan, until: ExitStack
) -> Response:
    try:
        ticket = state.admission.admit([len(prompt) for prompt in plan.prompts])
    except QueueFull as full:
        serving.embedder.observer.rejected(full.reason)
        raise
    until.callback(ticket.close)
    embedded = await serving.embedder.run(replace(plan, ticket=ticket), WRITERS[body.encoding_format])
    return Response(_written(model, plan, embedded), media_type="application/json")


def _in_numbers(vector: bytes) -> bytes:
    """A vector of float32 as a JSON list."""
    values = array("f", vector)
    return f"[{','.join([format(value, f'.{DIGITS}g') for value in values])}]".encode()


def _in_base64(vector: bytes) -> bytes:
    """Its bytes, little endian, as a JSON text."""
    return b'"%b"' % base64.b64encode(vector)


WRITERS: dict[str, Callable[[bytes], bytes]] = {"float": _in_numbers, "base64": _in_base64}


def _written(model: str, plan: EmbeddingPlan, embedded: Sequence[Embedded]) -> bytes:
    """OpenAI's body. The vectors are JSON already."""
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
    """vLLM's line, without the inputs: those are the client's."""
    logger.info(
        "Received request %s: %d prompts of %d tokens, priority: %d, params: %s",
        plan.request_id,
        len(plan.prompts),
        plan.num_prompt_tokens,
        plan.priority,
        plan.pooling,
    )

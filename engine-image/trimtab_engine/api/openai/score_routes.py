"""vLLM's routes /score and /rerank for embedding models: the cosine similarity of two texts' vectors."""

import asyncio
import math
import operator
import time
from array import array
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field, model_validator

from trimtab_engine.api.http.errors import WrongField, invalid
from trimtab_engine.api.http.long_json import long_json
from trimtab_engine.api.http.streaming import cancel_on_disconnect
from trimtab_engine.api.openai.embedding import EmbeddingPlan
from trimtab_engine.api.openai.embedding_request import MAX_INPUTS, EmbeddingRequest
from trimtab_engine.api.openai.embedding_routes import build_embedding_plan, embed
from trimtab_engine.api.openai.protocol import MAX_NAME_CHARACTERS, MAX_PRIORITY, check_fields
from trimtab_engine.api.openai.state import ServerState, Serving

MAX_INLINE_VALUES = 1 << 18  # products that take about 10 ms
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "activation": (None,),
    "chat_template": (None,),
    "instruction": (None,),
    "max_tokens_per_doc": (None, 0),
    "mm_processor_kwargs": (None,),
    "rank_fields": (None,),
    "softmax": (None,),
    "use_activation": (None,),
}
"""Field: values without effect, which are accepted."""
Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[list[Text], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
Json = dict[str, Any]


class _ScoringRequest(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    model: Annotated[str, Field(max_length=MAX_NAME_CHARACTERS)] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    request_id: str | None = None

    def embedding_request(self, texts: Sequence[str]) -> EmbeddingRequest:
        fields = self.model_dump(include={"model", "truncate_prompt_tokens", "priority", "request_id"})
        given = {key: value for key, value in fields.items() if value is not None}
        return EmbeddingRequest.model_validate({"input": list(texts), "normalize": True, **given})


class ScoreRequest(_ScoringRequest):
    """Body of POST /score: one text against each of several, or two lists pair by pair."""

    text_1: Text | Texts
    text_2: Text | Texts

    @model_validator(mode="before")
    @classmethod
    def _rename(cls, data: Any) -> Any:
        """Accept vLLM's newer names."""
        if not isinstance(data, dict):
            return data
        names = {"queries": "text_1", "data_1": "text_1", "items": "text_2", "documents": "text_2", "data_2": "text_2"}
        renamed = {names[key] if names.get(key, key) not in data else key: data[key] for key in data if key in names}
        return check_fields(cls, {**{k: v for k, v in data.items() if k not in names}, **renamed}, UNSUPPORTED)

    def pairs(self) -> tuple[list[str], list[str]]:
        """Return both sides with equal lengths.

        Raises:
            WrongField: The lists have different lengths.
        """
        left = [self.text_1] if isinstance(self.text_1, str) else self.text_1
        right = [self.text_2] if isinstance(self.text_2, str) else self.text_2
        if len(left) == 1:
            left = left * len(right)
        if len(left) != len(right):
            raise invalid(f"text_1 has {len(left)} texts and text_2 {len(right)}; send one or as many", "text_1")
        return left, right


class Document(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    text: Text


class RerankRequest(_ScoringRequest):
    """Body of POST /rerank, in the form of Jina and Cohere."""

    query: Text
    documents: Annotated[list[Text | Document], Field(min_length=1, max_length=MAX_INPUTS - 1, fail_fast=True)]
    top_n: Annotated[int, Field(ge=0)] = 0
    """Number of results; 0 for all."""
    return_documents: bool = True

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("query"), dict | list):
            raise WrongField("query", "query must be a text; images are not supported")
        return check_fields(cls, data, UNSUPPORTED)

    @property
    def texts(self) -> list[str]:
        return [each if isinstance(each, str) else each.text for each in self.documents]


def score_router(state: ServerState) -> APIRouter:
    router = APIRouter()

    async def score(body: ScoreRequest, request: Request) -> Response:
        left, right = body.pairs()
        texts = list(dict.fromkeys([*left, *right]))
        plan, vectors = await _embedded(state, body, texts, request)
        place = {text: index for index, text in enumerate(texts)}
        pairs = [(place[a], place[b]) for a, b in zip(left, right, strict=True)]
        scores = await _similarities(vectors, pairs)
        data = [{"index": index, "object": "score", "score": value} for index, value in enumerate(scores)]
        return _response(_head(state, body, plan, "score") | {"object": "list", "data": data, "usage": _usage(plan)})

    async def rerank(body: RerankRequest, request: Request) -> Response:
        plan, vectors = await _embedded(state, body, [body.query, *body.texts], request)
        scores = await _similarities(vectors, [(0, index + 1) for index in range(len(body.texts))])
        best = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n or None]
        results: list[Json] = [
            {"index": index, "relevance_score": scores[index]}
            | ({"document": {"text": body.texts[index]}} if body.return_documents else {})
            for index in best
        ]
        usage = {"prompt_tokens": plan.num_prompt_tokens, "total_tokens": plan.num_prompt_tokens}
        return _response(_head(state, body, plan, "rerank") | {"results": results, "usage": usage})

    for path in ("/score", "/v1/score"):
        router.add_api_route(path, score, methods=["POST"])
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        router.add_api_route(path, rerank, methods=["POST"])
    return router


async def _embedded(
    state: ServerState, body: _ScoringRequest, texts: Sequence[str], request: Request
) -> tuple[EmbeddingPlan, list["array[float]"]]:
    """Return the plan, and the normalized vector of each text."""
    serving: Serving = state.require_serving()
    with state.track_generation() as until:
        state.check_model(body.model)
        plan = await build_embedding_plan(state, serving, body.embedding_request(texts), request)
        results = await cancel_on_disconnect(request, embed(state, serving, plan, bytes, until))
    return plan, [array("f", one.written) for one in results]


async def _similarities(vectors: Sequence["array[float]"], pairs: Sequence[tuple[int, int]]) -> list[float]:
    """Return the cosine similarity of each pair; in a thread if there are many."""

    def compute() -> list[float]:
        lengths = [math.sqrt(sum(map(operator.mul, vector, vector))) or 1.0 for vector in vectors]
        return [sum(map(operator.mul, vectors[a], vectors[b])) / (lengths[a] * lengths[b]) for a, b in pairs]

    if (len(vectors) + len(pairs)) * len(vectors[0]) <= MAX_INLINE_VALUES:
        return compute()
    return await asyncio.to_thread(compute)


def _head(state: ServerState, body: _ScoringRequest, plan: EmbeddingPlan, kind: str) -> Json:
    return {"id": f"{kind}-{plan.request_id}", "created": int(time.time()), "model": state.check_model(body.model)}


def _usage(plan: EmbeddingPlan) -> Json:
    total = plan.num_prompt_tokens
    return {"prompt_tokens": total, "total_tokens": total, "completion_tokens": 0, "prompt_tokens_details": None}


def _response(body: Json) -> Response:
    return Response(long_json(body), media_type="application/json")

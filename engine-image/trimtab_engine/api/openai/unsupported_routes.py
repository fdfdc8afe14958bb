"""OpenAI's paths that are known here and not supported: each says so by its name, and what there is instead."""

from collections.abc import Awaitable, Callable

from fastapi import APIRouter, Response

from trimtab_engine.api.http.errors import ApiError

GENERATION = "use /v1/chat/completions or /v1/completions"
NO_SCORES = "models that rank or score are not served; /v1/embeddings gives vectors to compare"
TEXT_ONLY = "this engine takes and gives text"
UNSUPPORTED = {
    "/v1/responses": GENERATION,
    "/v1/moderations": TEXT_ONLY,
    "/v1/rerank": NO_SCORES,
    "/v2/rerank": NO_SCORES,
    "/rerank": NO_SCORES,
    "/v1/score": NO_SCORES,
    "/score": NO_SCORES,
    "/classify": "models that classify are not served",
    "/pooling": "hidden states of all tokens are not given; /v1/embeddings gives one vector of each input",
    "/v2/embed": "Cohere's form is not spoken; use /v1/embeddings",
    "/v1/audio/speech": TEXT_ONLY,
    "/v1/audio/transcriptions": TEXT_ONLY,
    "/v1/audio/translations": TEXT_ONLY,
    "/v1/images/generations": TEXT_ONLY,
    "/v1/files": "send each request by itself",
    "/v1/batches": f"send each request by itself, or {GENERATION}",
    "/v1/fine_tuning/jobs": "models are served as they are",
    "/v1/messages": f"Anthropic's form of a chat is not spoken; {GENERATION}",
}


def not_built_router() -> APIRouter:
    """404 for each of them, whatever the method."""
    router = APIRouter()
    for path, instead in UNSUPPORTED.items():
        router.add_api_route(path, _refusal(path, instead), methods=["GET", "POST"], include_in_schema=False)
    return router


def _refusal(path: str, instead: str) -> Callable[[], Awaitable[Response]]:
    async def refuse() -> Response:
        raise ApiError(404, f"{path} is not supported; {instead}")

    return refuse

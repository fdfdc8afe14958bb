"""OpenAI and vLLM routes that are known but not supported: each returns 404 with an alternative."""

from collections.abc import Awaitable, Callable

from fastapi import APIRouter, Response

from trimtab_engine.api.http.errors import ApiError

TEXT_ONLY = "only text output is supported"
UNSUPPORTED = {
    "/v1/moderations": TEXT_ONLY,
    "/classify": "classification models are not supported",
    "/pooling": "hidden states of all tokens are not available; /v1/embeddings returns one vector per input",
    "/v2/embed": "Cohere's API is not supported; use /v1/embeddings",
    "/v1/audio/speech": TEXT_ONLY,
    "/v1/audio/transcriptions": TEXT_ONLY,
    "/v1/audio/translations": TEXT_ONLY,
    "/v1/images/generations": TEXT_ONLY,
    "/v1/files": "start the engine with --batch-dir DIR",
    "/v1/batches": "start the engine with --batch-dir DIR, or send single requests",
    "/v1/fine_tuning/jobs": "fine-tuning is not available",
}


def unsupported_router() -> APIRouter:
    """Return routes that respond with 404 for every method."""
    router = APIRouter()
    for path, alternative in UNSUPPORTED.items():
        router.add_api_route(
            path, _not_found_handler(path, alternative), methods=["GET", "POST"], include_in_schema=False
        )
    return router


def _not_found_handler(path: str, alternative: str) -> Callable[[], Awaitable[Response]]:
    async def respond_not_found() -> Response:
        raise ApiError(404, f"{path} is not supported; {alternative}")

    return respond_not_found

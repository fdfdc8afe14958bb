"""OpenAI routes: completions, chat completions, models. protocol.py validates requests, prepared.py creates plans,
respond.py runs them.
"""

from typing import Any

from fastapi import APIRouter, Request, Response

from trimtab_engine.api.http.get_and_head import get_and_head
from trimtab_engine.api.openai.preparation import prepare_chat, prepare_completion
from trimtab_engine.api.openai.protocol import ChatRequest, CompletionRequest
from trimtab_engine.api.openai.respond import respond
from trimtab_engine.api.openai.state import ServerState


def openai_router(state: ServerState) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        serving = state.require_generation()
        with state.track_generation() as until:
            prepared = await prepare_completion(state, serving, body, request)
            return await respond(state, request, body, prepared.builder, prepared.plan, until, prepared.echo)

    @router.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        serving = state.require_generation()
        with state.track_generation() as until:
            prepared = await prepare_chat(state, serving, body, request)
            return await respond(state, request, body, prepared.builder, prepared.plan, until)

    @get_and_head(router, "/v1/models")
    async def models() -> dict[str, Any]:
        return _models(state)

    @get_and_head(router, "/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        if not name:  # a slash at the end
            return _models(state)
        return _model(state, state.check_model(name))

    return router


def _models(state: ServerState) -> dict[str, Any]:
    """Return the cards of all served models and adapters."""
    names = [*state.options.served_model_names, *(card.name for card in state.adapters)]
    return {"object": "list", "data": [_model(state, name) for name in names]}


def _model(state: ServerState, name: str) -> dict[str, Any]:
    """Return a model card by served name, or an adapter's card, whose root is its folder (as in vLLM)."""
    adapter = state.adapter_of(name)
    card = next((card for card in state.adapters if card.name == adapter), None)
    first = state.options.served_model_names[0]
    return {
        "id": name,
        "object": "model",
        "created": int(state.started),
        "owned_by": "trimtab",
        "root": first if card is None else card.folder,
        "parent": None if card is None else card.parent or first,
        "max_model_len": state.serving.facts.max_model_len if state.serving else None,
        "default_sampling_params": state.options.sampling_defaults.values,
    }

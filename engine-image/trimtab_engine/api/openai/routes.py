"""OpenAI's surface: completions, chat completions, models. protocol.py checks the requests, prepared.py makes plans of
them, respond.py carries those out."""

from typing import Any

from fastapi import APIRouter, Request, Response

from trimtab_engine.api.http.look import look
from trimtab_engine.api.openai.prepared import prepared_chat, prepared_completion
from trimtab_engine.api.openai.protocol import ChatRequest, CompletionRequest
from trimtab_engine.api.openai.respond import answer
from trimtab_engine.api.openai.state import ServerState


def openai_router(state: ServerState) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        serving = state.require_generation()
        with state.answering() as until:
            asked = await prepared_completion(state, serving, body, request)
            return await answer(state, request, body, asked.form, asked.plan, until, asked.echo)

    @router.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        serving = state.require_generation()
        with state.answering() as until:
            asked = await prepared_chat(state, serving, body, request)
            return await answer(state, request, body, asked.form, asked.plan, until)

    @look(router, "/v1/models")
    async def models() -> dict[str, Any]:
        names = [*state.options.served_model_names, *(card.name for card in state.adapters)]
        return {"object": "list", "data": [_model(state, name) for name in names]}

    @look(router, "/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        return _model(state, state.check_model(name))

    return router


def _model(state: ServerState, name: str) -> dict[str, Any]:
    """The model by one of its names, or an adapter of it: its root is its folder then, as vLLM shows it."""
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
    }

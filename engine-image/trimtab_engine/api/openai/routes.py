"""OpenAI's surface: completions, chat completions, models. protocol.py checks the requests, planning.py makes plans of
them, respond.py carries those out."""

import time
from typing import Any

from fastapi import APIRouter, Request, Response

from trimtab_engine.api.http.errors import invalid
from trimtab_engine.api.http.request_identity import request_id_of
from trimtab_engine.api.openai.forms import ChatForm, CompletionForm
from trimtab_engine.api.openai.planning import chat_prompt, completion_prompts, plan_of
from trimtab_engine.api.openai.protocol import ChatRequest, CompletionRequest
from trimtab_engine.api.openai.respond import Echo, answer
from trimtab_engine.api.openai.restrictions import restrictions_of
from trimtab_engine.api.openai.state import ServerState, Serving
from trimtab_engine.api.openai.tool_form import ToolForm
from trimtab_engine.api.openai.tools import ToolUse, tool_use_of

DEFAULT_MAX_TOKENS = 16  # of a completion that does not say; OpenAI's number


def openai_router(state: ServerState) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        arrival, serving = time.monotonic(), state.require_serving()
        with state.answering() as until:
            form = CompletionForm(state.check_model(body.model), serving.tokenizer, request_id_of(request))
            prompts, texts = await completion_prompts(serving, body)
            max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
            plan = plan_of(
                state,
                serving,
                request,
                body,
                form,
                prompts,
                max_tokens=max_tokens,
                logprobs=body.logprobs,
                prompt_logprobs=body.logprobs if body.echo and body.prompt_logprobs is None else body.prompt_logprobs,
                restrictions=await restrictions_of(body, serving),
                arrival=arrival,
            )
            echo = None if texts is None else Echo(texts, alone=max_tokens == 0)
            return await answer(state, request, body, form, plan, until, echo)

    @router.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        arrival, serving = time.monotonic(), state.require_serving()
        max_tokens = body.max_completion_tokens or body.max_tokens
        if max_tokens is not None and body.min_tokens > max_tokens:
            raise invalid(f"min_tokens is {body.min_tokens}, above max_completion_tokens {max_tokens}", "min_tokens")
        with state.answering() as until:
            use = tool_use_of(
                body,
                template_knows_tools=serving.renderer.uses_tools,
                auto_parser=state.options.tool_call_parser if state.options.enable_auto_tool_choice else None,
                is_constrained=body.constraint() is not None,
            )
            form = _chat_form(state, serving, body, request, use)
            ids = await chat_prompt(serving, body, use.for_template)
            plan = plan_of(
                state,
                serving,
                request,
                body,
                form,
                [ids],
                max_tokens=max_tokens,
                logprobs=body.num_logprobs,
                prompt_logprobs=body.prompt_logprobs,
                restrictions=await restrictions_of(body, serving, use.constraint),
                arrival=arrival,
            )
            return await answer(state, request, body, form, plan, until)

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(state, name) for name in state.options.served_model_names]}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        return _model(state, state.check_model(name))

    return router


def _model(state: ServerState, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": int(state.started),
        "owned_by": "trimtab",
        "root": state.options.served_model_names[0],
        "parent": None,
        "max_model_len": state.serving.facts.max_model_len if state.serving else None,
    }


def _chat_form(state: ServerState, serving: Serving, body: ChatRequest, request: Request, use: ToolUse) -> ChatForm:
    """Calls are read from text in which special tokens are not skipped: some models write calls with them."""
    model, request_id = state.check_model(body.model), request_id_of(request)
    if use.parser is None:
        return ChatForm(model, serving.tokenizer, request_id)
    body.skip_special_tokens = False
    return ToolForm(model, serving.tokenizer, request_id, use.parser, use.only_first)

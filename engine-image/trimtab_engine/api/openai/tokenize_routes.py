"""vLLM's routes /tokenize and /detokenize."""

from typing import Any

from fastapi import APIRouter

from trimtab_engine.api.http.errors import invalid
from trimtab_engine.api.openai.planning import reject_media, render_chat, tokenize_bounded
from trimtab_engine.api.openai.protocol import DetokenizeRequest, TokenizeRequest
from trimtab_engine.api.openai.state import ServerState


def tokenize_router(state: ServerState) -> APIRouter:
    router = APIRouter()

    @router.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        serving = state.require_serving()
        state.check_model(body.model)
        if body.messages is not None:
            reject_media(body.messages, "/tokenize")
            tools = body.for_template(template_knows_tools=serving.renderer.uses_tools)
            text = await render_chat(serving, body.messages, body, tools=tools)
            ids = await tokenize_bounded(serving, text, "messages", add_special_tokens=bool(body.add_special_tokens))
        else:
            adds = body.add_special_tokens is not False
            ids = await tokenize_bounded(serving, body.prompt or "", "prompt", add_special_tokens=adds)
        names = [serving.tokenizer.token_name(token_id) for token_id in ids] if body.return_token_strs else None
        return {
            "count": len(ids),
            "max_model_len": serving.facts.max_model_len,
            "tokens": ids,
            "token_strs": names,
        }

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, Any]:
        serving = state.require_serving()
        state.check_model(body.model)
        if len(body.tokens) > serving.facts.max_model_len:
            raise invalid(
                f"{len(body.tokens)} tokens exceed the maximum of {serving.facts.max_model_len}; send fewer", "tokens"
            )
        outside = [token_id for token_id in body.tokens if token_id >= serving.facts.vocab_size]
        if outside:
            raise invalid(
                f"token id {outside[0]} is out of vocabulary; the model has {serving.facts.vocab_size} tokens", "tokens"
            )
        return {"prompt": serving.tokenizer.decode(body.tokens)}

    return router

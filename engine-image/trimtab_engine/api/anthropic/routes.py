"""Anthropic's routes: /v1/messages and /v1/messages/count_tokens."""

from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute

from trimtab_engine.api.anthropic.protocol import CountTokensRequest, MessagesRequest
from trimtab_engine.api.anthropic.writer import MessageWriter, error_body
from trimtab_engine.api.http.errors import ApiError, validated, validation_error
from trimtab_engine.api.http.long_json import long_json
from trimtab_engine.api.http.request_identity import request_id_of
from trimtab_engine.api.http.streaming import EventStream, cancel_on_disconnect
from trimtab_engine.api.openai.message_reader import MessageDelta, MessageReader
from trimtab_engine.api.openai.planning import render_chat, tokenize_bounded
from trimtab_engine.api.openai.preparation import prepare_chat
from trimtab_engine.api.openai.protocol import ChatRequest
from trimtab_engine.api.openai.state import ServerState
from trimtab_engine.errors import EngineDead


class AnthropicRoute(APIRoute):
    """Route whose errors have Anthropic's format."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def with_errors(request: Request) -> Response:
            try:
                return await handle(request)
            except ApiError as error:
                failure = error
            except RequestValidationError as error:
                sent_as = request.headers.get("content-type", "application/json")
                failure = validation_error(error.errors(), error.body, sent_as)
            except EngineDead as error:
                failure = ApiError(500, f"the engine has failed: {error}")
            headers = {"Retry-After": str(failure.retry_after)} if failure.retry_after else None
            return JSONResponse(error_body(failure), failure.status, headers)

        return with_errors


def anthropic_router(state: ServerState) -> APIRouter:
    router = APIRouter(route_class=AnthropicRoute)

    @router.post("/v1/messages")
    async def messages(body: MessagesRequest, request: Request) -> Response:
        serving = state.require_generation()
        with state.track_generation() as until:
            has_parser = state.options.reasoning_parser is not None
            chat = validated(lambda: body.chat_request(has_reasoning_parser=has_parser))
            prepared = await prepare_chat(state, serving, chat, request)
            reader = MessageReader.start(state, serving, prepared, until)
            writer = MessageWriter(f"msg_{request_id_of(request)}", body.model)
            if body.stream:
                events = _stream(reader, writer)
                return EventStream(events, until.pop_all(), reader.read_ahead, error_event=writer.error, end="")
            whole = await cancel_on_disconnect(request, reader.whole())
            return Response(long_json(writer.whole(whole, reader.usage)), media_type="application/json")

    @router.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountTokensRequest) -> dict[str, int]:
        serving = state.require_serving()
        state.check_model(body.model)
        chat = validated(lambda: ChatRequest.model_validate(body.chat_fields()))
        tools = chat.for_template(template_knows_tools=serving.renderer.uses_tools)
        text = await render_chat(serving, chat.messages, chat, tools=tools)
        return {"input_tokens": len(await tokenize_bounded(serving, text, "messages", add_special_tokens=False))}

    return router


async def _stream(reader: MessageReader, writer: MessageWriter) -> AsyncGenerator[str, None]:
    yield writer.start(reader.usage)
    last: MessageDelta | None = None
    async with aclosing(reader.deltas()) as deltas:
        async for delta in deltas:
            last = delta
            if events := writer.delta(delta):
                yield events
    assert last is not None  # a message ends with a finish reason
    yield writer.end(last, reader.usage)

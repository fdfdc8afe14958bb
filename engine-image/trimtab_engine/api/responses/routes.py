"""OpenAI's routes below /v1/responses."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request, Response

from trimtab_engine.api.http.errors import ApiError, invalid, validated
from trimtab_engine.api.http.get_and_head import get_and_head
from trimtab_engine.api.http.long_json import long_json
from trimtab_engine.api.http.request_identity import key_salt
from trimtab_engine.api.http.streaming import EventStream, cancel_on_disconnect
from trimtab_engine.api.openai.message_reader import MessageDelta, MessageReader
from trimtab_engine.api.openai.preparation import prepare_chat
from trimtab_engine.api.openai.state import ServerState
from trimtab_engine.api.responses.protocol import ResponsesRequest
from trimtab_engine.api.responses.store import ResponseStore, StoredResponse
from trimtab_engine.api.responses.writer import ResponseWriter, new_id

Json = dict[str, Any]


def responses_router(state: ServerState) -> APIRouter:
    router, store = APIRouter(), ResponseStore()

    @router.post("/v1/responses")
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        serving = state.require_generation()
        owner = key_salt(request)
        with state.track_generation() as until:
            earlier = _earlier_messages(state, store, owner, body)
            has_parser = state.options.reasoning_parser is not None
            chat = validated(lambda: body.chat_request(earlier, has_reasoning_parser=has_parser))
            prepared = await prepare_chat(state, serving, chat, request)
            reader = MessageReader.start(state, serving, prepared, until)
            writer = ResponseWriter(new_id("resp"), state.check_model(body.model), body, reader)

            def keep(response: Json) -> None:
                if body.store and state.options.api_server_count == 1:
                    messages = [*earlier, *body.new_messages(), *_output_messages(response)]
                    store.put(owner, StoredResponse(response, _input_items(body), messages))

            if body.stream:
                events = _stream(reader, writer, keep)
                return EventStream(events, until.pop_all(), reader.read_ahead, error_event=writer.error, end="")
            whole = writer.whole(await cancel_on_disconnect(request, reader.whole()))
            keep(whole)
            return Response(long_json(whole), media_type="application/json")

    @get_and_head(router, "/v1/responses/{response_id}")
    async def response(response_id: str, request: Request) -> Json:
        return _stored(store, request, response_id).response

    @get_and_head(router, "/v1/responses/{response_id}/input_items")
    async def input_items(response_id: str, request: Request) -> Json:
        items = _stored(store, request, response_id).input_items
        ends = {"first_id": items[0]["id"] if items else None, "last_id": items[-1]["id"] if items else None}
        return {"object": "list", "data": items, "has_more": False, **ends}

    @router.delete("/v1/responses/{response_id}")
    async def delete(response_id: str, request: Request) -> Json:
        _stored(store, request, response_id)
        store.remove(key_salt(request), response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    @router.post("/v1/responses/{response_id}/cancel")
    async def cancel(response_id: str, request: Request) -> Json:
        _stored(store, request, response_id)
        raise invalid("only background responses can be cancelled, and background is not supported")

    return router


def _stored(store: ResponseStore, request: Request, response_id: str) -> StoredResponse:
    found = store.get(key_salt(request), response_id)
    if found is None:
        raise ApiError(404, f"the response {response_id[:100]!r} is not stored (any more)", code="response_not_found")
    return found


def _earlier_messages(state: ServerState, store: ResponseStore, owner: str, body: ResponsesRequest) -> list[Json]:
    """Return the conversation that the request continues.

    Raises:
        ApiError: 400 if the previous response is not stored.
    """
    if body.previous_response_id is None:
        return []
    if state.options.api_server_count > 1:
        raise invalid(
            "previous_response_id needs one API server, because each stores its own responses; send the whole "
            "conversation as input, or start the engine with --api-server-count 1",
            "previous_response_id",
        )
    found = store.get(owner, body.previous_response_id)
    if found is None:
        raise ApiError(
            400,
            f"the response {body.previous_response_id[:100]!r} is not stored (any more); send the whole conversation "
            "as input",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return found.messages


def _input_items(body: ResponsesRequest) -> list[Json]:
    """Return the input as items, each with an ID."""
    if isinstance(body.input, str):
        content = [{"type": "input_text", "text": body.input}]
        return [{"id": new_id("msg"), "type": "message", "role": "user", "status": "completed", "content": content}]
    return [{"id": new_id("item"), **item.model_dump(exclude_none=True)} for item in body.input]


def _output_messages(response: Json) -> list[Json]:
    """Return the answer as a chat message, as a client would return it."""
    output = response["output"]
    text = "".join(part["text"] for item in output if item["type"] == "message" for part in item["content"])
    reasoning = "".join(part["text"] for item in output if item["type"] == "reasoning" for part in item["content"])
    calls = [
        {"id": item["call_id"], "type": "function", "function": {"name": item["name"], "arguments": item["arguments"]}}
        for item in output
        if item["type"] == "function_call"
    ]
    message: Json = {"role": "assistant", "content": text or (None if calls or reasoning else "")}
    return [message | ({"reasoning": reasoning} if reasoning else {}) | ({"tool_calls": calls} if calls else {})]


async def _stream(
    reader: MessageReader, writer: ResponseWriter, keep: Callable[[Json], None]
) -> AsyncGenerator[str, None]:
    yield writer.start()
    last: MessageDelta | None = None
    async with aclosing(reader.deltas()) as deltas:
        async for delta in deltas:
            last = delta
            if events := writer.delta(delta):
                yield events
    assert last is not None  # a message ends with a finish reason
    ended = writer.end(last)
    keep(writer.response("incomplete" if last.finish_reason == "length" else "completed", usage=reader.usage))
    yield ended

"""Format of Anthropic's messages, complete and as events."""

import json
import uuid
from typing import Any

from trimtab_engine.api.http.errors import ApiError
from trimtab_engine.api.http.streaming import event
from trimtab_engine.api.openai.message_reader import MessageDelta
from trimtab_engine.api.openai.response_builders import Usage
from trimtab_engine.api.openai.tool_parsers.parsed import CallDelta

Json = dict[str, Any]
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_body(error: ApiError) -> Json:
    """Return an error in Anthropic's format."""
    return {"type": "error", "error": {"type": ERROR_TYPES.get(error.status, "api_error"), "message": error.message}}


def usage_json(usage: Usage) -> Json:
    """Return the token counts. Input tokens exclude tokens of the prefix cache."""
    return {
        "input_tokens": usage.num_prompt_tokens - usage.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.num_cached_tokens,
        "output_tokens": usage.num_completion_tokens,
    }


def stop_fields(delta: MessageDelta) -> Json:
    """Return stop_reason and stop_sequence of an ended message."""
    is_sequence = delta.finish_reason == "stop" and isinstance(delta.stop_reason, str)
    reason = "stop_sequence" if is_sequence else STOP_REASONS.get(delta.finish_reason or "", "end_turn")
    return {"stop_reason": reason, "stop_sequence": delta.stop_reason if is_sequence else None}


def tool_use_id() -> str:
    return f"toolu_{uuid.uuid4().hex}"


class MessageWriter:
    """Events of one message."""

    def __init__(self, message_id: str, model: str) -> None:
        self._head = {"id": message_id, "type": "message", "role": "assistant", "model": model}
        self._index = -1
        self._open: str | None = None
        """Kind of the open content block: text, thinking, or tool_use and the number of the call."""

    def whole(self, message: MessageDelta, usage: Usage) -> Json:
        """Return the complete message."""
        parsed = message.parsed
        content: list[Json] = []
        if parsed.reasoning:
            content.append({"type": "thinking", "thinking": parsed.reasoning, "signature": ""})
        if parsed.content:
            content.append({"type": "text", "text": parsed.content})
        for name, arguments in joined_calls(parsed.calls):
            content.append({"type": "tool_use", "id": tool_use_id(), "name": name, "input": as_object(arguments)})
        return self._head | {"content": content, **stop_fields(message), "usage": usage_json(usage)}

    def start(self, usage: Usage) -> str:
        message: Json = self._head | {
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage_json(usage),
        }
        return event({"type": "message_start", "message": message}, "message_start")

    def delta(self, delta: MessageDelta) -> str:
        """Return the events of a delta."""
        parsed, events = delta.parsed, ""
        if parsed.reasoning:
            events += self._block("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            events += self._block_delta({"type": "thinking_delta", "thinking": parsed.reasoning})
        if parsed.content:
            events += self._block("text", {"type": "text", "text": ""})
            events += self._block_delta({"type": "text_delta", "text": parsed.content})
        for call in parsed.calls:
            if call.name is not None:
                block = {"type": "tool_use", "id": tool_use_id(), "name": call.name, "input": {}}
                events += self._block(f"tool_use {call.index}", block)
            if call.arguments:
                events += self._block_delta({"type": "input_json_delta", "partial_json": call.arguments})
        return events

    def end(self, last: MessageDelta, usage: Usage) -> str:
        body = {"type": "message_delta", "delta": stop_fields(last), "usage": usage_json(usage)}
        return self._close() + event(body, "message_delta") + event({"type": "message_stop"}, "message_stop")

    def error(self, error: ApiError) -> str:
        return event(error_body(error), "error")

    def _block(self, kind: str, block: Json) -> str:
        """Open a block unless it is open already; a block of another kind is closed."""
        if kind == self._open:
            return ""
        closed = self._close()
        self._open, self._index = kind, self._index + 1
        body = {"type": "content_block_start", "index": self._index, "content_block": block}
        return closed + event(body, "content_block_start")

    def _block_delta(self, delta: Json) -> str:
        return event({"type": "content_block_delta", "index": self._index, "delta": delta}, "content_block_delta")

    def _close(self) -> str:
        if self._open is None:
            return ""
        signature = ""
        if self._open == "thinking":
            signature = self._block_delta({"type": "signature_delta", "signature": ""})
        self._open = None
        return signature + event({"type": "content_block_stop", "index": self._index}, "content_block_stop")


def joined_calls(deltas: list[CallDelta]) -> list[tuple[str, str]]:
    """Return the name and the arguments of each call."""
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    for delta in deltas:
        if delta.name is not None:
            names[delta.index] = delta.name
        arguments[delta.index] = arguments.get(delta.index, "") + delta.arguments
    return [(names[index], arguments[index]) for index in sorted(names)]


def as_object(arguments: str) -> Json:
    """Return the arguments of a call. A call that was cut by max_tokens has none."""
    try:
        value = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}

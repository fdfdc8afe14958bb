"""Format of OpenAI's responses, complete and as events."""

import time
import uuid
from typing import Any

from trimtab_engine.api.http.errors import ApiError
from trimtab_engine.api.http.streaming import event
from trimtab_engine.api.openai.message_reader import MessageDelta, MessageReader
from trimtab_engine.api.openai.response_builders import Usage
from trimtab_engine.api.responses.protocol import ResponsesRequest

Json = dict[str, Any]
REASONING, MESSAGE, CALL = "reasoning", "message", "function_call"


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


class ResponseWriter:
    """One response: its items, and the events that build them.

    An item is open while its deltas arrive; the next item or the end closes it.
    """

    def __init__(self, response_id: str, model: str, body: ResponsesRequest, reader: MessageReader) -> None:
        self._reader = reader
        self._output: list[Json] = []
        self._open: tuple[str, int] | None = None
        """Kind of the open item, and the number of the call."""
        self._sequence = 0
        text = body.text.format if body.text is not None and body.text.format is not None else None
        self._head: Json = {
            "id": response_id,
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "store": body.store,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": {"type": "text"} if text is None else text.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": _choice(body),
            "tools": [tool.model_dump(exclude_none=True) for tool in body.tools or ()],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": body.truncation or "disabled",
            "user": body.user,
            "background": False,
            "service_tier": "default",
        }

    # --- the response -------------------------------------------------------------------------------------------------

    def response(self, status: str, *, usage: Usage | None = None, error: ApiError | None = None) -> Json:
        """Return the response object in this state: in_progress, completed, incomplete or failed."""
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        failure = None if error is None else {"code": "server_error", "message": error.message}
        return self._head | {
            "status": status,
            "error": failure,
            "incomplete_details": incomplete,
            "output": [dict(item) for item in self._output],
            "usage": None if usage is None else self._usage_json(usage),
            "completed_at": int(time.time()) if status == "completed" else None,
        }

    def whole(self, message: MessageDelta) -> Json:
        """Return the complete response."""
        self.delta(message)
        self._close_item(message.finish_reason)
        return self.response(_status(message), usage=self._reader.usage)

    def _usage_json(self, usage: Usage) -> Json:
        return {
            "input_tokens": usage.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.num_cached_tokens},
            "output_tokens": usage.num_completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._reader.num_reasoning_tokens},
            "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
        }

    # --- events -------------------------------------------------------------------------------------------------------

    def start(self) -> str:
        response = self.response("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def delta(self, delta: MessageDelta) -> str:
        """Return the events of a delta."""
        parsed, events = delta.parsed, ""
        if parsed.reasoning:
            events += self._item(REASONING) + self._text_delta("response.reasoning_text.delta", parsed.reasoning)
        if parsed.content:
            events += self._item(MESSAGE) + self._text_delta("response.output_text.delta", parsed.content)
        for call in parsed.calls:
            if call.name is not None:
                events += self._item(CALL, call.index, call.name)
            if call.arguments:
                self._output[-1]["arguments"] += call.arguments
                events += self._item_event("response.function_call_arguments.delta", delta=call.arguments)
        return events

    def end(self, last: MessageDelta) -> str:
        status = _status(last)
        closed = self._close_item(last.finish_reason)
        return closed + self._event(f"response.{status}", response=self.response(status, usage=self._reader.usage))

    def error(self, error: ApiError) -> str:
        return self._event("response.failed", response=self.response("failed", error=error))

    def _event(self, kind: str, **fields: Any) -> str:
        body = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return event(body, kind)

    def _item_event(self, kind: str, **fields: Any) -> str:
        place = {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}
        return self._event(kind, **place, **fields)

    def _item(self, kind: str, number: int = 0, name: str = "") -> str:
        """Open an item unless it is open already."""
        if self._open == (kind, number):
            return ""
        events = self._close_item("stop")
        self._open = kind, number
        item: Json
        if kind == CALL:
            item = {"id": new_id("fc"), "type": CALL, "call_id": new_id("call"), "name": name, "arguments": ""}
        elif kind == REASONING:
            item = {"id": new_id("rs"), "type": REASONING, "summary": [], "content": []}
        else:
            item = {"id": new_id("msg"), "type": MESSAGE, "role": "assistant", "content": []}
        item["status"] = "in_progress"
        self._output.append(item)
        added = self._event("response.output_item.added", output_index=len(self._output) - 1, item=dict(item))
        if kind == CALL:
            return events + added
        part: Json = {"type": "reasoning_text", "text": ""}
        if kind == MESSAGE:
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        item["content"] = [part]
        return events + added + self._item_event("response.content_part.added", content_index=0, part=dict(part))

    def _text_delta(self, kind: str, text: str) -> str:
        self._output[-1]["content"][0]["text"] += text
        extra: Json = {"logprobs": []} if kind == "response.output_text.delta" else {}
        return self._item_event(kind, content_index=0, delta=text, **extra)

    def _close_item(self, finish_reason: str | None) -> str:
        """Close the open item. It is incomplete if the length ended it."""
        if self._open is None:
            return ""
        kind, item = self._open[0], self._output[-1]
        self._open = None
        item["status"] = "incomplete" if finish_reason == "length" else "completed"
        if kind == CALL:
            item["arguments"] = item["arguments"] or "{}"
            events = self._item_event(
                "response.function_call_arguments.done", arguments=item["arguments"], name=item["name"]
            )
        else:
            part = item["content"][0]
            done = "response.output_text.done" if kind == MESSAGE else "response.reasoning_text.done"
            extra: Json = {"logprobs": []} if kind == MESSAGE else {}
            events = self._item_event(done, content_index=0, text=part["text"], **extra)
            events += self._item_event("response.content_part.done", content_index=0, part=dict(part))
        return events + self._event("response.output_item.done", output_index=len(self._output) - 1, item=dict(item))


def _status(last: MessageDelta) -> str:
    return "incomplete" if last.finish_reason == "length" else "completed"


def _choice(body: ResponsesRequest) -> Any:
    choice = body.tool_choice
    return choice.model_dump() if choice is not None and not isinstance(choice, str) else choice or "auto"

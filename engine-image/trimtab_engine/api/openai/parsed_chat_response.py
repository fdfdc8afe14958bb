"""Chat responses with reasoning content and tool calls, complete and streamed."""

import uuid
from collections import defaultdict
from collections.abc import Callable

from trimtab_engine.api.openai.answer_reader import ResponseParser
from trimtab_engine.api.openai.generation import Piece
from trimtab_engine.api.openai.response_builders import ChatResponseBuilder, Json, Positions
from trimtab_engine.api.openai.tool_parsers.parsed import CallDelta
from trimtab_engine.text.tokenizer import Tokenizer


class ParsedChatResponseBuilder(ChatResponseBuilder):
    """Chat format with parsing. `make_reader` returns a reader per choice; with `only_first`, a choice's further tool
    calls are dropped.
    """

    is_plain = False

    def __init__(
        self,
        model: str,
        tokenizer: Tokenizer,
        request_id: str,
        make_reader: Callable[[], ResponseParser],
        only_first: bool,
        *,
        tokens_by_id: bool = False,
    ) -> None:
        super().__init__(model, tokenizer, request_id, tokens_by_id=tokens_by_id)
        self._make_reader, self._only_first = make_reader, only_first
        self._readers: defaultdict[int, ResponseParser] = defaultdict(make_reader)
        self._with_calls: set[int] = set()

    def reader(self) -> ResponseParser:
        return self._make_reader()

    def choice(self, last: Piece, text: str, positions: Positions) -> Json:
        reader = self._make_reader()
        parsed = reader.push(text).plus(reader.flush())
        calls = self.select_calls(parsed.calls)
        content = parsed.content or (None if calls or parsed.reasoning else "")
        message: Json = {
            "role": "assistant",
            "content": content,
            "refusal": None,
            **_reasoning_fields(parsed.reasoning),
        }
        if calls:
            message["tool_calls"] = [
                {"id": _call_id(), "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in calls
            ]
        return self._entry(_with_tool_calls_finish(last, bool(calls)), {"message": message}, positions)

    def chunk(self, piece: Piece, positions: Positions, offset: int) -> Json | None:
        reader = self._readers[piece.index]
        parsed = reader.push(piece.text)
        if piece.finish_reason is not None:
            parsed = parsed.plus(reader.flush())
        calls = self.select_calls(parsed.calls)
        if calls:
            self._with_calls.add(piece.index)
        if not parsed.content and not parsed.reasoning and not calls and piece.finish_reason is None:
            return None
        delta = _reasoning_fields(parsed.reasoning) | ({"content": parsed.content} if parsed.content else {})
        if calls:
            delta["tool_calls"] = [_delta_of(call) for call in calls]
        ended = _with_tool_calls_finish(piece, piece.index in self._with_calls)
        return self._head(self.object_chunk) | {"choices": [self._entry(ended, {"delta": delta}, positions)]}

    def select_calls(self, calls: list[CallDelta]) -> list[CallDelta]:
        return [call for call in calls if call.index == 0] if self._only_first else calls


def _reasoning_fields(reasoning: str) -> Json:
    """Return the reasoning fields under vLLM's current and former name, the latter used by DeepSeek's API and most
    clients.
    """
    return {"reasoning": reasoning, "reasoning_content": reasoning} if reasoning else {}


def _with_tool_calls_finish(piece: Piece, has_calls: bool) -> Piece:
    """Return the piece with finish reason tool_calls, unless it was cut off by length."""
    if has_calls and piece.finish_reason == "stop":
        piece.finish_reason = "tool_calls"
    return piece


def _delta_of(call: CallDelta) -> Json:
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": _call_id(), "type": "function", "function": function}


def _call_id() -> str:
    """Return a call ID in vLLM's format."""
    return f"chatcmpl-tool-{uuid.uuid4().hex}"

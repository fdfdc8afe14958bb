"""Chat answers that may hold tool calls, whole and in chunks."""

import uuid
from collections import defaultdict
from collections.abc import Callable

from trimtab_engine.api.openai.forms import ChatForm, Json, Positions
from trimtab_engine.api.openai.generation import Piece
from trimtab_engine.api.openai.tool_parsers import ToolParser
from trimtab_engine.api.openai.tool_parsers.parsed import CallDelta, Parsed
from trimtab_engine.text.tokenizer import Tokenizer


class ToolForm(ChatForm):
    """`make_parser` gives each choice's reader. With `only_first`, calls after a choice's first are left out."""

    def __init__(
        self,
        model: str,
        tokenizer: Tokenizer,
        request_id: str,
        make_parser: Callable[[], ToolParser],
        only_first: bool,
        *,
        tokens_by_id: bool = False,
    ) -> None:
        super().__init__(model, tokenizer, request_id, tokens_by_id=tokens_by_id)
        self._make_parser, self._only_first = make_parser, only_first
        self._parsers: defaultdict[int, ToolParser] = defaultdict(make_parser)
        self._with_calls: set[int] = set()

    def choice(self, last: Piece, text: str, positions: Positions) -> Json:
        parser = self._make_parser()
        parsed, rest = parser.push(text), parser.flush()
        content = parsed.content + rest.content
        calls = self._kept([*parsed.calls, *rest.calls])
        message: Json = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
        if calls:
            message["tool_calls"] = [
                {"id": _call_id(), "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in calls
            ]
        return self._entry(_ended_by_calls(last, bool(calls)), {"message": message}, positions)

    def chunk(self, piece: Piece, positions: Positions, offset: int) -> Json | None:
        parser = self._parsers[piece.index]
        parsed = parser.push(piece.text)
        if piece.finish_reason is not None:
            rest = parser.flush()
            parsed = Parsed(parsed.content + rest.content, [*parsed.calls, *rest.calls])
        calls = self._kept(parsed.calls)
        if calls:
            self._with_calls.add(piece.index)
        if not parsed.content and not calls and piece.finish_reason is None:
            return None
        delta: Json = {"content": parsed.content} if parsed.content else {}
        if calls:
            delta["tool_calls"] = [_delta_of(call) for call in calls]
        ended = _ended_by_calls(piece, piece.index in self._with_calls)
        return self._head(self.object_chunk) | {"choices": [self._entry(ended, {"delta": delta}, positions)]}

    def _kept(self, calls: list[CallDelta]) -> list[CallDelta]:
        return [call for call in calls if call.index == 0] if self._only_first else calls


def _ended_by_calls(piece: Piece, has_calls: bool) -> Piece:
    """An answer with calls that came to its end ends with tool_calls; one that was cut says so."""
    if has_calls and piece.finish_reason == "stop":
        piece.finish_reason = "tool_calls"
    return piece


def _delta_of(call: CallDelta) -> Json:
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": _call_id(), "type": "function", "function": function}


def _call_id() -> str:
    """In vLLM's form."""
    return f"chatcmpl-tool-{uuid.uuid4().hex}"

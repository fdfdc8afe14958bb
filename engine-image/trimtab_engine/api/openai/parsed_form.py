"""Chat answers that may hold thoughts and tool calls, whole and in chunks."""

import uuid
from collections import defaultdict
from collections.abc import Callable

from trimtab_engine.api.openai.answer_reader import AnswerReader
from trimtab_engine.api.openai.forms import ChatForm, Json, Positions
from trimtab_engine.api.openai.generation import Piece
from trimtab_engine.api.openai.tool_parsers.parsed import CallDelta
from trimtab_engine.text.tokenizer import Tokenizer


class ParsedForm(ChatForm):
    """`make_reader` gives each choice's reader. With `only_first`, calls after a choice's first are left out."""

    is_plain = False

    def __init__(
        self,
        model: str,
        tokenizer: Tokenizer,
        request_id: str,
        make_reader: Callable[[], AnswerReader],
        only_first: bool,
        *,
        tokens_by_id: bool = False,
    ) -> None:
        super().__init__(model, tokenizer, request_id, tokens_by_id=tokens_by_id)
        self._make_reader, self._only_first = make_reader, only_first
        self._readers: defaultdict[int, AnswerReader] = defaultdict(make_reader)
        self._with_calls: set[int] = set()

    def choice(self, last: Piece, text: str, positions: Positions) -> Json:
        reader = self._make_reader()
        parsed = reader.push(text).plus(reader.flush())
        calls = self._kept(parsed.calls)
        content = parsed.content or (None if calls or parsed.reasoning else "")
        message: Json = {"role": "assistant", "content": content, "refusal": None, **_thoughts(parsed.reasoning)}
        if calls:
            message["tool_calls"] = [
                {"id": _call_id(), "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in calls
            ]
        return self._entry(_ended_by_calls(last, bool(calls)), {"message": message}, positions)

    def chunk(self, piece: Piece, positions: Positions, offset: int) -> Json | None:
        reader = self._readers[piece.index]
        parsed = reader.push(piece.text)
        if piece.finish_reason is not None:
            parsed = parsed.plus(reader.flush())
        calls = self._kept(parsed.calls)
        if calls:
            self._with_calls.add(piece.index)
        if not parsed.content and not parsed.reasoning and not calls and piece.finish_reason is None:
            return None
        delta = _thoughts(parsed.reasoning) | ({"content": parsed.content} if parsed.content else {})
        if calls:
            delta["tool_calls"] = [_delta_of(call) for call in calls]
        ended = _ended_by_calls(piece, piece.index in self._with_calls)
        return self._head(self.object_chunk) | {"choices": [self._entry(ended, {"delta": delta}, positions)]}

    def _kept(self, calls: list[CallDelta]) -> list[CallDelta]:
        return [call for call in calls if call.index == 0] if self._only_first else calls


def _thoughts(reasoning: str) -> Json:
    """Under vLLM's name, and under the one that it had before, which DeepSeek's API and most clients know."""
    return {"reasoning": reasoning, "reasoning_content": reasoning} if reasoning else {}


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

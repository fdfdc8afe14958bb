"""OpenAI response formats, complete and streamed: text_completion and chat.completion."""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trimtab_engine.api.openai.answer_reader import ResponseParser
from trimtab_engine.api.openai.generation import Piece
from trimtab_engine.api.openai.logprobs import chat_logprobs, completion_logprobs, format_token_id
from trimtab_engine.api.openai.tool_parsers.parsed import CallDelta
from trimtab_engine.scheduling.sampling import TokenLogprobs
from trimtab_engine.text.tokenizer import Tokenizer

Json = dict[str, Any]
Positions = Sequence[TokenLogprobs] | None


@dataclass(slots=True)
class Usage:
    """Token counts of a request. `num_cached_tokens` is the part of the prompts found in the prefix cache, of which
    `num_host_cached_tokens` came from host memory; each is reported if above 0.
    """

    num_prompt_tokens: int
    num_completion_tokens: int = 0
    num_cached_tokens: int = 0
    num_host_cached_tokens: int = 0

    def to_json(self) -> Json:
        details = {"cached_tokens": self.num_cached_tokens}
        if self.num_host_cached_tokens:
            details["host_cached_tokens"] = self.num_host_cached_tokens
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_completion_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_completion_tokens,
            "prompt_tokens_details": details,
        }


class ResponseBuilder(ABC):
    """Format of one request's response: its ID, choices and chunks."""

    prefix: str
    is_plain = True
    """Template of a chunk of generated text; all fields except the text are constant per choice until the finish
    reason."""
    has_one_prompt = False
    """True if all choices share one prompt, whose log-probabilities are then in the response instead of each choice."""
    object_whole: str
    object_chunk: str

    def __init__(self, model: str, tokenizer: Tokenizer, request_id: str, *, tokens_by_id: bool = False) -> None:
        """With `tokens_by_id`, log-probabilities name tokens by ID instead of text."""
        self.request_id = f"{self.prefix}-{request_id}"
        self._model, self._tokenizer, self._created = model, tokenizer, int(time.time())
        self._token_name = format_token_id if tokens_by_id else None

    def whole(self, choices: list[Json], usage: Usage) -> Json:
        return self._head(self.object_whole) | {"choices": choices, "usage": usage.to_json()}

    def usage_chunk(self, usage: Usage) -> Json:
        """Return the last chunk of a stream that requested usage; it has no choices."""
        return self._head(self.object_chunk) | {"choices": [], "usage": usage.to_json()}

    def chunk(self, piece: Piece, positions: Positions, offset: int) -> Json | None:
        """Return the chunk for this piece, or None if nothing can be sent yet."""
        return self._head(self.object_chunk) | {"choices": [self._delta(piece, positions, offset)]}

    def opening(self, index: int) -> list[Json]:
        """Return the chunks sent before the first token."""
        return []

    @abstractmethod
    def add_prompt_ids(self, answer: Json, prompts: Sequence[list[int]]) -> None:
        """Add the prompt token IDs in vLLM's format, to a complete response or to each choice's first chunk (`prompts`
        are those of the chunk's choices).
        """

    @abstractmethod
    def choice(self, last: Piece, text: str, positions: Positions) -> Json:
        """Return one choice of a complete response; `last` has the finish reason. A position without a logprob is the
        first of a prompt.
        """

    @abstractmethod
    def _delta(self, piece: Piece, positions: Positions, offset: int) -> Json:
        """Return one choice of a chunk; `offset` is the start of its text."""

    def _head(self, kind: str) -> Json:
        return {"id": self.request_id, "object": kind, "created": self._created, "model": self._model}


class CompletionResponseBuilder(ResponseBuilder):
    prefix, object_whole, object_chunk = "cmpl", "text_completion", "text_completion"

    def choice(self, last: Piece, text: str, positions: Positions) -> Json:
        return self._entry(last, text, positions, 0)

    def _delta(self, piece: Piece, positions: Positions, offset: int) -> Json:
        return self._entry(piece, piece.text, positions, offset)

    def _entry(self, piece: Piece, text: str, positions: Positions, offset: int) -> Json:
        return {
            "index": piece.index,
            "text": text,
            "logprobs": None if positions is None else self._logprobs(positions, offset),
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }

    def _logprobs(self, positions: Sequence[TokenLogprobs], offset: int) -> Json:
        return completion_logprobs(self._tokenizer, positions, offset, self._token_name)

    def add_prompt_ids(self, answer: Json, prompts: Sequence[list[int]]) -> None:
        for choice, prompt in zip(answer["choices"], prompts, strict=True):
            choice["prompt_token_ids"] = prompt


class ChatResponseBuilder(ResponseBuilder):
    prefix, object_whole, object_chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"
    has_one_prompt = True

    def reader(self) -> ResponseParser:
        """Return a reader of one choice's text."""
        return ResponseParser(None, None, include_reasoning=False)

    def select_calls(self, calls: list[CallDelta]) -> list[CallDelta]:
        """Return the tool calls that the client allows."""
        return calls

    def opening(self, index: int) -> list[Json]:
        """Return the role chunk, sent before any token."""
        choice = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        return [self._head(self.object_chunk) | {"choices": [choice]}]

    def add_prompt_ids(self, answer: Json, prompts: Sequence[list[int]]) -> None:
        """Add the prompt token IDs once, because all choices share one prompt."""
        answer["prompt_token_ids"] = prompts[0]

    def choice(self, last: Piece, text: str, positions: Positions) -> Json:
        message = {"role": "assistant", "content": text, "refusal": None}
        return self._entry(last, {"message": message}, positions)

    def _delta(self, piece: Piece, positions: Positions, offset: int) -> Json:
        return self._entry(piece, {"delta": {"content": piece.text} if piece.text else {}}, positions)

    def _entry(self, piece: Piece, body: Json, positions: Positions) -> Json:
        return {
            "index": piece.index,
            **body,
            "logprobs": None if positions is None else chat_logprobs(self._tokenizer, positions, self._token_name),
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }

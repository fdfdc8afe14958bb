"""The two forms of OpenAI's answers, whole and in chunks: text_completion and chat.completion. Values only."""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trimtab_engine.api.openai.generation import Piece
from trimtab_engine.api.openai.logprobs import by_id, chat_logprobs, completion_logprobs
from trimtab_engine.scheduling.sampling import TokenLogprobs
from trimtab_engine.text.tokenizer import Tokenizer

Json = dict[str, Any]
Positions = Sequence[TokenLogprobs] | None


@dataclass(slots=True)
class Usage:
    """A request's tokens so far. `num_cached_tokens` is the part of the prompts that the prefix cache held, and
    `num_host_cached_tokens` the part of that which came from host memory; told where there is any."""

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


class AnswerForm(ABC):
    """One request's answer: its id, and how choices and chunks are written."""

    prefix: str
    is_plain = True
    """A chunk is a piece's text among what is the same in all chunks of its choice, but for how it ends and what is
    reported."""
    object_whole: str
    object_chunk: str

    def __init__(self, model: str, tokenizer: Tokenizer, request_id: str, *, tokens_by_id: bool = False) -> None:
        """`tokens_by_id`: log-probabilities name tokens by their ids instead of their texts."""
        self.request_id = f"{self.prefix}-{request_id}"
        self._model, self._tokenizer, self._created = model, tokenizer, int(time.time())
        self._token_name = by_id if tokens_by_id else None

    def whole(self, choices: list[Json], usage: Usage) -> Json:
        return self._head(self.object_whole) | {"choices": choices, "usage": usage.to_json()}

    def usage_chunk(self, usage: Usage) -> Json:
        """The last chunk of a stream that asked for usage: no choices."""
        return self._head(self.object_chunk) | {"choices": [], "usage": usage.to_json()}

    def chunk(self, piece: Piece, positions: Positions, offset: int) -> Json | None:
        """What to send of this piece; None: nothing yet."""
        return self._head(self.object_chunk) | {"choices": [self._delta(piece, positions, offset)]}

    def opening(self, index: int) -> list[Json]:
        """Chunks that go out before the first token."""
        return []

    @abstractmethod
    def add_prompt_ids(self, answer: Json, prompts: Sequence[list[int]]) -> None:
        """Put in the token ids of each choice's prompt, where vLLM has them: into a whole answer, or into the chunk
        that is a choice's first (its `prompts` are those of the chunk's choices)."""

    @abstractmethod
    def choice(self, last: Piece, text: str, positions: Positions) -> Json:
        """One choice of a whole answer; `last` says how it ended. A position without a logprob is a prompt's first."""

    @abstractmethod
    def _delta(self, piece: Piece, positions: Positions, offset: int) -> Json:
        """One choice of a chunk; `offset` is where its text begins."""

    def _head(self, kind: str) -> Json:
        return {"id": self.request_id, "object": kind, "created": self._created, "model": self._model}


class CompletionForm(AnswerForm):
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


class ChatForm(AnswerForm):
    prefix, object_whole, object_chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self, index: int) -> list[Json]:
        """The role comes first, before any token."""
        choice = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        return [self._head(self.object_chunk) | {"choices": [choice]}]

    def add_prompt_ids(self, answer: Json, prompts: Sequence[list[int]]) -> None:
        """All choices have one prompt, so the answer has it once."""
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

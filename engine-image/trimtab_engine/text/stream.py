"""Conversion of a sequence's tokens to text, for the server and the offline API: whole characters after the prompt, cut
at a stop string, without the stop token. Pure.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from trimtab_engine.text.stop_strings import StopStrings
from trimtab_engine.text.tokenizer import Detokenizer, Tokenizer


@dataclass(frozen=True, slots=True)
class StepText:
    """Result of a step's tokens: their text, and the number of tokens that count. Tokens after a stop string do not."""

    text: str
    num_tokens: int


class TextStream:
    """Incremental text of one sequence.

    Stop strings are not searched in the first `min_tokens` tokens. With `include_stop` the text includes the stop
    string, or the text of the stop token.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = Detokenizer(
            tokenizer, skip_special_tokens=skip_special_tokens, prompt_token_ids=prompt_token_ids
        )
        self._stop = StopStrings(stop, include=include_stop)
        self._searched: _SearchedText | None = None
        """None if stop strings are searched in the text as it is returned."""
        if skip_special_tokens and any(map(tokenizer.mixes_special_text, stop)):
            whole = Detokenizer(tokenizer, skip_special_tokens=False, prompt_token_ids=prompt_token_ids)
            self._searched = _SearchedText(whole, self._stop)
        self._include_stop, self._min_tokens = include_stop, min_tokens
        self._num_tokens = 0

    @property
    def matched(self) -> str | None:
        """Stop string that ended the text."""
        return self._stop.matched

    def take_each(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text of each token, up to the one that completes a stop string. More tokens must follow."""
        if not self._stop.is_watching:
            self._num_tokens += len(token_ids)
            return self._detokenizer.push_each(token_ids)
        texts = []
        for token_id in token_ids:
            texts.append(self.take([token_id], None).text)
            if self.matched is not None:
                break
        return texts

    def take(self, token_ids: Sequence[int], finish_reason: str | None, *, ends_with_text: bool = False) -> StepText:
        """Return the text of a step's tokens (several with accepted drafts).

        With a `finish_reason` held-back text is included. The last token of a sequence that ended by `stop` is the stop
        token and has no text, unless `ends_with_text`.
        """
        ended_by_token = finish_reason == "stop" and not ends_with_text and not self._include_stop
        num_texts = len(token_ids) - 1 if ended_by_token else len(token_ids)
        text = ""
        for number, token_id in enumerate(token_ids[: max(num_texts, 0)], start=1):
            self._stop.armed = self._num_tokens + number > self._min_tokens
            piece = self._detokenizer.push(token_id)
            text += self._stop.push(piece) if self._searched is None else self._searched.push(token_id, piece)
            if self.matched is not None:
                self._num_tokens += number
                return StepText(text, number)
        self._num_tokens += len(token_ids)
        if finish_reason is not None and self._searched is not None:
            text += self._searched.flush(self._detokenizer.flush())
        elif finish_reason is not None:
            text += self._stop.push(self._detokenizer.flush())
            text += self._stop.flush() if self.matched is None else ""
        return StepText(text, len(token_ids))


class _SearchedText:
    """Search for stop strings in the text with special tokens, for an answer without them.

    ``` with    |a|<tool>|b c|      pieces, one per token
        without |a|      |b c|      released when the search has released the whole piece, or as far as both are equal
    ```
    """

    def __init__(self, detokenizer: Detokenizer, stop: StopStrings) -> None:
        self._detokenizer, self._stop = detokenizer, stop
        self._pieces: deque[tuple[str, str]] = deque()
        """Pieces not released whole: the text with special tokens, and without."""

    def push(self, token_id: int, without: str) -> str:
        """Return the text to send after this token. `without`: its text without special tokens."""
        return self._release(self._detokenizer.push(token_id), without)

    def flush(self, without: str) -> str:
        """Return the rest when the sequence ends for another reason, unless a stop string ends it."""
        text = self._release(self._detokenizer.flush(), without)
        if self._stop.matched is None:
            self._stop.flush()
            text += "".join(rest for _, rest in self._pieces)
            self._pieces.clear()
        return text

    def _release(self, piece: str, without: str) -> str:
        self._pieces.append((piece, without))
        left, text = len(self._stop.push(piece)), ""
        while self._pieces and (left > 0 or not self._pieces[0][0]):
            piece, without = self._pieces.popleft()
            if left >= len(piece):
                text += without
                left -= len(piece)
                continue
            same = piece == without
            text += without[:left] if same else ""
            self._pieces.appendleft((piece[left:], without[left:] if same else without))
            break
        return text

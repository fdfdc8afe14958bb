"""The one rule from a sequence's tokens to its text, for the server and for use in Python: whole characters behind the
prompt's, cut at a stop string, without the token that ended it. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from trimtab_engine.text.stop_strings import StopStrings
from trimtab_engine.text.tokenizer import Detokenizer, Tokenizer


@dataclass(frozen=True, slots=True)
class Taken:
    """What became of a step's tokens: their text, and how many of them count. Those behind a stop string do not."""

    text: str
    num_tokens: int


class TextStream:
    """One sequence's text, as its tokens come.

    No stop string is looked for in the first `min_tokens` tokens. `include_stop` leaves what ended the sequence in its
    text: a stop string, or a stop token as far as it has a text.
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
        self._include_stop, self._min_tokens = include_stop, min_tokens
        self._num_tokens = 0

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text."""
        return self._stop.matched

    def take_each(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each of these tokens, behind which others come; up to the one that completes a stop string."""
        if not self._stop.is_watching:
            self._num_tokens += len(token_ids)
            return self._detokenizer.push_each(token_ids)
        texts = []
        for token_id in token_ids:
            texts.append(self.take([token_id], None).text)
            if self.matched is not None:
                break
        return texts

    def take(self, token_ids: Sequence[int], finish_reason: str | None, *, ends_with_text: bool = False) -> Taken:
        """The text of a step's tokens, of which there are several when drafts were accepted.

        With a `finish_reason` nothing follows, and what was held back comes too. The newest token of a sequence that
        ended by `stop` is what ended it, and no text, unless it is said to be (`ends_with_text`).
        """
        ended_by_token = finish_reason == "stop" and not ends_with_text and not self._include_stop
        num_texts = len(token_ids) - 1 if ended_by_token else len(token_ids)
        text = ""
        for number, token_id in enumerate(token_ids[: max(num_texts, 0)], start=1):
            self._stop.armed = self._num_tokens + number > self._min_tokens
            text += self._stop.push(self._detokenizer.push(token_id))
            if self.matched is not None:
                self._num_tokens += number
                return Taken(text, number)
        self._num_tokens += len(token_ids)
        if finish_reason is not None:
            text += self._stop.push(self._detokenizer.flush())
            text += self._stop.flush() if self.matched is None else ""
        return Taken(text, len(token_ids))

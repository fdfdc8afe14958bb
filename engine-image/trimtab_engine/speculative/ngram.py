"""Drafts from the text itself (prompt lookup, Saxena 2023): where the text's end has occurred before, what followed
then is proposed now. Free, and right where answers repeat their prompt: code, summaries, extraction.

```
text      … a b c d e f …………………… a b c | ?
                |-----| proposed        |-----| looked up: the longest end of the text that occurs earlier
```
Linear in the text with a small constant: one vectorised comparison per token of the n-gram, over the places that
still match. The text is kept as an array that grows with the request, so a step converts only its new tokens.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from trimtab_engine.config.speculation import SpeculativeConfig
from trimtab_engine.scheduling.batch import Batch
from trimtab_engine.scheduling.request import Request
from trimtab_engine.scheduling.step_inputs import StepInputs
from trimtab_engine.speculative.proposer import Proposals, room_for_drafts

Tokens = npt.NDArray[np.int64]
SPARE = 256  # extra capacity in tokens when an array grows


def propose_ngram(tokens: Tokens, *, min_n: int, max_n: int, num_tokens: int) -> list[int]:
    """The up to `num_tokens` tokens after the earliest earlier occurrence of the longest end of `tokens` that has one.

    The end is `min_n` to `max_n` tokens long; an occurrence may overlap it. Empty when there is none.
    """
    length = len(tokens)
    if num_tokens < 1 or length <= min_n:
        return []
    ends = np.flatnonzero(tokens[: length - 1] == tokens[-1])  # index of an occurrence's last token
    matched = 1 if len(ends) else 0
    for n in range(2, min(max_n, length - 1) + 1):
        earlier = ends[ends >= n - 1]
        earlier = earlier[tokens[earlier - (n - 1)] == tokens[-n]]
        if not len(earlier):
            break
        ends, matched = earlier, n
    if matched < min_n:
        return []
    after = int(ends[0]) + 1
    drafts: list[int] = tokens[after : after + num_tokens].tolist()
    return drafts


class NgramProposer:
    """Proposes for every request from its own prompt and output."""

    waits_for_device = False

    def __init__(self, config: SpeculativeConfig) -> None:
        self._min_n, self._max_n = config.prompt_lookup_min, config.prompt_lookup_max
        self._texts: dict[Request, _Text] = {}

    def prepare(self, requests: Sequence[Request], depth: int) -> None:
        """Give each of these running requests its drafts for the next step."""
        if depth == 0:
            self._texts = {}
            for request in requests:
                request.draft_token_ids = []
            return
        texts = {request: self._texts.get(request) or _Text() for request in requests}
        for request, text in texts.items():
            drafts = propose_ngram(
                text.up_to_date(request.token_ids),
                min_n=self._min_n,
                max_n=self._max_n,
                num_tokens=room_for_drafts(request, depth),
            )
            if request.grammar is not None:
                del drafts[request.grammar.num_acceptable(drafts) :]
            request.draft_token_ids = drafts
        self._texts = texts

    def propose(self, batch: Batch) -> Proposals:
        """Nothing is left to do: the drafts are certain, so they have no distribution."""
        return Proposals()

    def learn(self, batch: Batch, inputs: StepInputs, new: Mapping[Request, list[int]]) -> None:
        """Nothing: texts are looked at between two steps."""


class _Text:
    """One request's tokens as an array with room to grow."""

    def __init__(self) -> None:
        self._array: Tokens = np.empty(0, dtype=np.int64)
        self._length = 0

    def up_to_date(self, token_ids: list[int]) -> Tokens:
        """Return all of `token_ids`; only tokens that are new since the last call are copied."""
        length = len(token_ids)
        if length > len(self._array):
            grown: Tokens = np.empty(length + max(SPARE, length // 2), dtype=np.int64)
            grown[: self._length] = self._array[: self._length]
            self._array = grown
        self._array[self._length : length] = token_ids[self._length :]
        self._length = length
        return self._array[:length]

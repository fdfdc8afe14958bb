"""Token masks of one step, computed in a thread while the device computes the logits."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from trimtab_engine.sampling.sampler import TokenMasks
from trimtab_engine.scheduling.request import Grammar
from trimtab_engine.structured.deep_stack import deep_stack_executor
from trimtab_engine.structured.matcher import WORD_BYTES


@dataclass(frozen=True, slots=True)
class MaskedRows:
    """One sequence's rows of the logits: `first` for its newest token, and one more after each draft token."""

    first: int
    matcher: Grammar
    draft_token_ids: Sequence[int] = ()


class MaskMaker:
    """Computes masks. Call begin() after the matchers have accepted the last step's tokens; they must not change until
    the result is ready.
    """

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None

    def begin(self, sequences: Sequence[MaskedRows]) -> "Future[TokenMasks] | None":
        """Start the computation; call result() for sampling. None if no sequence has a grammar."""
        if not sequences:
            return None
        if self._executor is None:
            self._executor = deep_stack_executor("grammar-masks")
        return self._executor.submit(self._compute, list(sequences))

    def _compute(self, sequences: list[MaskedRows]) -> TokenMasks:
        rows = [s.first + place for s in sequences for place in range(1 + len(s.draft_token_ids))]
        num_words = sequences[0].matcher.num_words
        bitmask = torch.empty(len(rows), num_words, dtype=torch.int32)
        address, num_bytes = bitmask.data_ptr(), num_words * WORD_BYTES
        for sequence in sequences:
            sequence.matcher.fill_with_drafts(sequence.draft_token_ids, address, num_bytes)
            address += (1 + len(sequence.draft_token_ids)) * num_bytes
        return TokenMasks(bitmask, rows)

"""Token masks of one step, computed in a thread while the device computes the logits."""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

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


WORTH_SECONDS = 0.001  # of expected work, from which on several threads compute it
MAX_THREADS = 4  # a mask holds no lock of Python's; more threads would take CPUs from steps on the CPU


class MaskMaker:
    """Computes masks. Call begin() after the matchers have accepted the last step's tokens; they must not change until
    the result is ready.
    """

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._helpers: list[ThreadPoolExecutor] = []
        self.seconds = 0.0
        """How long the last masks took."""

    def begin(self, sequences: Sequence[MaskedRows]) -> "Future[TokenMasks] | None":
        """Start the computation; call result() for sampling. None if no sequence has a grammar."""
        if not sequences:
            self.seconds = 0.0
            return None
        if self._executor is None:
            self._executor = deep_stack_executor("grammar-masks")
            others = min(MAX_THREADS, len(os.sched_getaffinity(0))) - 1
            self._helpers = [deep_stack_executor(f"grammar-masks-{number}") for number in range(others)]
        return self._executor.submit(self._compute, list(sequences))

    def _compute(self, sequences: list[MaskedRows]) -> TokenMasks:
        began = time.monotonic()
        rows = [s.first + place for s in sequences for place in range(1 + len(s.draft_token_ids))]
        num_words = sequences[0].matcher.num_words
        bitmask = torch.empty(len(rows), num_words, dtype=torch.int32)
        address, num_bytes = bitmask.data_ptr(), num_words * WORD_BYTES
        fills: list[Callable[[], None]] = []
        for sequence in sequences:
            fills.append(partial(sequence.matcher.fill_with_drafts, sequence.draft_token_ids, address, num_bytes))
            address += (1 + len(sequence.draft_token_ids)) * num_bytes
        self._run(fills, sum(sequence.matcher.mask_seconds for sequence in sequences))
        self.seconds = time.monotonic() - began
        return TokenMasks(bitmask, rows)

    def _run(self, fills: Sequence[Callable[[], None]], expected_seconds: float) -> None:
        """Run in this thread, and in others if that saves more time than it costs."""
        num_threads = 1 + len(self._helpers) if expected_seconds > WORTH_SECONDS else 1
        shares = [fills[first::num_threads] for first in range(num_threads)]
        futures = [helper.submit(_run_all, share) for helper, share in zip(self._helpers, shares[1:], strict=False)]
        _run_all(shares[0])
        for future in futures:
            future.result()


def _run_all(fills: Sequence[Callable[[], None]]) -> None:
    for fill in fills:
        fill()

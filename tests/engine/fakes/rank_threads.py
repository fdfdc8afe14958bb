"""Tensor-parallel ranks as threads of one process, without torch.distributed, for small tests."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, BrokenBarrierError
from typing import TypeVar

import torch

Result = TypeVar("Result")
PATIENCE_SECONDS = 120.0  # of one rank with another that may have failed


class ThreadRank:
    """Interface of a tensor-parallel rank to a model (parallel/groups.py)."""

    def __init__(self, index: int, desk: list[torch.Tensor | None], barrier: Barrier) -> None:
        self.size, self.index = len(desk), index
        self._desk, self._barrier = desk, barrier

    def _all(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's value in rank order."""
        self._desk[self.index] = x.clone()
        self._barrier.wait(PATIENCE_SECONDS)
        found = [part for part in self._desk if part is not None]
        self._barrier.wait(PATIENCE_SECONDS)
        return found

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(torch.stack(self._all(x)).sum(dim=0))

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._all(x))

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor | None:
        parts = self._all(x)
        return None if self.index else torch.cat(parts, dim=1)


def on_ranks(size: int, compute: Callable[[ThreadRank], Result]) -> list[Result]:
    """Return the results of `size` ranks. A failure ends the others."""
    desk: list[torch.Tensor | None] = [None] * size
    barrier = Barrier(size)

    def run(index: int) -> Result:
        try:
            return compute(ThreadRank(index, desk, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, index) for index in range(size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]

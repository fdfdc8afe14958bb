"""Parallel compilation of the launches that one process will time.

Triton compiles a launch when it first runs, one after the other and for seconds each; a tuner has thousands. Kernels
that another process has compiled are found in Triton's cache on disk.
"""

import math
import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from typing import TypeVar

import torch

from trimtab_kernels.launch.jit import record_launches

Item = TypeVar("Item")


def compile_launches(launch: Callable[[], object]) -> None:
    """Compile the kernels that `launch`, called with tensors on the meta device, would launch. Raises Triton's
    exceptions.
    """
    with record_launches() as launches:
        launch()
    for made in launches:
        made.kernel.function.warmup(grid=made.grid, **made.arguments, **made.options)


class CompileAhead:
    """A pool of processes on this GPU. `task` is a function of a module; it raises for an item that cannot be
    compiled.
    """

    def __init__(self, gpu: int | None, processes: int) -> None:
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        self._pool = ProcessPoolExecutor(processes, mp_context=context, initializer=_use, initargs=(gpu,))

    def run(self, task: Callable[[Item], object], items: Sequence[Item], seconds: float) -> list[Item]:
        """Return the items that were completed in that time, in their order."""
        futures: list[Future[object]] = [self._pool.submit(task, item) for item in items]
        wait(futures, timeout=seconds if math.isfinite(seconds) else None)
        for future in futures:
            future.cancel()
        wait(futures)  # items that had started
        done = [future for future in futures if not future.cancelled() and future.exception() is None]
        return [item for item, future in zip(items, futures, strict=True) if future in done]

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


def processes_per_gpu(num_gpus: int) -> int:
    """Return the processes per GPU. One core is left to the process that times."""
    return max(1, ((os.cpu_count() or 1) - 1) // max(1, num_gpus))


def _use(gpu: int | None) -> None:
    if gpu is not None:
        torch.cuda.set_device(gpu)

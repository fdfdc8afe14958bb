"""Recording of kernels for replay. CudaRecorder is the production implementation; the tests' recorder replays by
calling the recorded function again, so that everything but CUDA capture runs without a GPU.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.nn.functional as F

Replay = Callable[[], None]
Outside = Callable[[Callable[[], None]], None]
"""Runs its argument now and at every replay, outside of the recorded graph."""


class Recorder(Protocol):
    """Records functions whose tensors keep their addresses."""

    def record(self, run: Callable[[Outside], None]) -> Replay:
        """Run the function once and record it. Calls passed to its argument are not recorded but repeated at each
        replay.
        """

    def forget(self) -> None:
        """Prepare for new recordings after every replay was dropped."""


class CudaRecorder:
    """CUDA graphs that share one memory pool: they never run concurrently, so the pool is as large as the largest
    graph.
    """

    def __init__(self, device: torch.device) -> None:
        cuda: Any = torch.cuda
        self._pool = cuda.graph_pool_handle()
        self._stream = cuda.Stream(device)
        self._device, self._is_ready = device, False

    def forget(self) -> None:
        """Create a new pool: torch fails an assertion if a pool that has lost all its graphs gets another one."""
        cuda: Any = torch.cuda
        self._pool = cuda.graph_pool_handle()

    def record(self, run: Callable[[Outside], None]) -> Replay:
        """Record one graph, or several with calls between them."""
        cuda: Any = torch.cuda
        if not self._is_ready:
            self._open_libraries()
        pieces: list[Replay] = []
        graph: Any = None

        def begin() -> None:
            nonlocal graph
            graph = cuda.CUDAGraph()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

        def end() -> None:
            graph.capture_end()
            pieces.append(graph.replay)

        def outside(call: Callable[[], None]) -> None:
            end()
            call()
            pieces.append(call)
            begin()

        cuda.synchronize()
        with _without_collection(), cuda.stream(self._stream):
            begin()
            run(outside)
            end()
        cuda.synchronize()
        if len(pieces) == 1:
            return pieces[0]

        def replay() -> None:
            for piece in pieces:
                piece()

        return replay

    def _open_libraries(self) -> None:
        """Let cuBLAS allocate its permanent workspace per stream now: allocated while recording it would keep the pool
        alive.
        """
        cuda: Any = torch.cuda
        with cuda.stream(self._stream):
            square = torch.zeros(16, 16, device=self._device)
            F.linear(square, square)
            F.linear(square, square, square[0])  # cuBLASLt's, which has its own
        self._is_ready = True


@contextmanager
def _without_collection() -> Iterator[None]:
    """Freeing a device's memory in the middle of a recording would break it off. Collecting before each recording would
    take longer than the recording.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()

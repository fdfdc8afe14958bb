"""Side stream: device work concurrent with steps, ordered with the steps' stream by events."""

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

Work = Callable[[], None]


class StreamTicket(Protocol):
    """Handle of work on a side stream."""

    def seconds(self) -> float | None:
        """Return its duration. None until it has ended."""


class SideStream(Protocol):
    """A queue of sequential work."""

    def begin(self, work: Work) -> StreamTicket:
        """Start work after everything queued on the steps' stream so far, and after earlier side work."""

    def block_steps_until(self, ticket: StreamTicket) -> None:
        """Make later work of the steps' stream wait for this work. The host does not wait."""


def side_stream_of(device: torch.device) -> SideStream:
    """Return a side stream of a CUDA device; for other devices an immediate executor on the host."""
    return CudaSideStream(device) if device.type == "cuda" else HostSideStream()


class HostSideStream:
    """Runs work immediately on the host."""

    def begin(self, work: Work) -> StreamTicket:
        start = time.perf_counter()
        work()
        return _Done(time.perf_counter() - start)

    def block_steps_until(self, ticket: StreamTicket) -> None:
        """Do nothing: the work has ended."""


class _Done:
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def seconds(self) -> float:
        return self._seconds


class CudaSideStream:
    """A CUDA stream concurrent with the current one."""

    def __init__(self, device: torch.device) -> None:
        self._cuda: Any = torch.cuda  # torch types streams and events not
        self._stream: Any = self._cuda.Stream(device)

    def begin(self, work: Work) -> StreamTicket:
        self._stream.wait_stream(self._cuda.current_stream(self._stream.device))
        began, ended = (self._cuda.Event(enable_timing=True) for _ in range(2))
        with self._cuda.stream(self._stream):
            began.record()
            work()
            ended.record()
        return _Events(began, ended)

    def block_steps_until(self, ticket: StreamTicket) -> None:
        assert isinstance(ticket, _Events)  # it is one of this lane's
        self._cuda.current_stream(self._stream.device).wait_event(ticket.ended)


class _Events:
    def __init__(self, began: Any, ended: Any) -> None:
        self._began, self.ended = began, ended

    def seconds(self) -> float | None:
        return float(self._began.elapsed_time(self.ended)) / 1000 if self.ended.query() else None

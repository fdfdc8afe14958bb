"""Work of the device beside its steps: a queue of its own, ordered with the steps' queue by marks in both."""

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

Work = Callable[[], None]


class LaneTicket(Protocol):
    """Work that was begun in a side lane."""

    def seconds(self) -> float | None:
        """How long it took; None until it has ended."""


class SideLane(Protocol):
    """Takes work one after another."""

    def begin(self, work: Work) -> LaneTicket:
        """Begin it after all that the steps' queue has been given so far, and after the lane's own work before it."""

    def hold_steps(self, ticket: LaneTicket) -> None:
        """What the steps' queue is given from now on begins when that work has ended. The host does not wait."""


def side_lane(device: torch.device) -> SideLane:
    """A stream of a CUDA device; the host itself, at once, where there is none."""
    return CudaLane(device) if device.type == "cuda" else HostLane()


class HostLane:
    """Does what it is given, at once."""

    def begin(self, work: Work) -> LaneTicket:
        start = time.perf_counter()
        work()
        return _Done(time.perf_counter() - start)

    def hold_steps(self, ticket: LaneTicket) -> None:
        """It has ended."""


class _Done:
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def seconds(self) -> float:
        return self._seconds


class CudaLane:
    """A stream beside the current one."""

    def __init__(self, device: torch.device) -> None:
        self._cuda: Any = torch.cuda  # torch types streams and events not
        self._stream: Any = self._cuda.Stream(device)

    def begin(self, work: Work) -> LaneTicket:
        self._stream.wait_stream(self._cuda.current_stream(self._stream.device))
        began, ended = (self._cuda.Event(enable_timing=True) for _ in range(2))
        with self._cuda.stream(self._stream):
            began.record()
            work()
            ended.record()
        return _Events(began, ended)

    def hold_steps(self, ticket: LaneTicket) -> None:
        assert isinstance(ticket, _Events)  # it is one of this lane's
        self._cuda.current_stream(self._stream.device).wait_event(ticket.ended)


class _Events:
    def __init__(self, began: Any, ended: Any) -> None:
        self._began, self.ended = began, ended

    def seconds(self) -> float | None:
        return float(self._began.elapsed_time(self.ended)) / 1000 if self.ended.query() else None

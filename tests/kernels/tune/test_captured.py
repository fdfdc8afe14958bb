"""Timing in one captured graph, with copies of the weights used in rotation. The device is a fake that counts."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from trimtab_kernels.tune.captured import CALLS, ROTATED_BYTES, copies_needed, seconds_in_graph

MILLISECONDS_PER_CALL = 0.05
LAUNCH_MILLISECONDS = 0.04
"""Host time of each launch."""


class Device:
    """A fake device. Its clock advances by the duration of kernels; a launch from the host costs more, a call inside a
    capture nothing.
    """

    def __init__(self) -> None:
        self.milliseconds = 0.0
        self.captured: list[str] | None = None
        self.ran: list[str] = []

    def call(self, name: str) -> None:
        assert self.captured is not None, "only captured calls are timed"
        self.captured.append(name)

    def graph_type(device: "Device") -> type:  # the class below needs its own self
        class Graph:
            calls: tuple[str, ...] = ()

            def replay(self) -> None:
                device.ran += self.calls
                device.milliseconds += LAUNCH_MILLISECONDS + MILLISECONDS_PER_CALL * len(self.calls)

        return Graph

    def event_type(device: "Device") -> type:
        class Event:
            at = 0.0

            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = device.milliseconds

            def synchronize(self) -> None:
                """Return at once: the fake has no pending work."""

            def elapsed_time(self, other: "Event") -> float:
                return other.at - self.at

        return Event

    @contextmanager
    def capture(self, graph: object) -> Iterator[None]:
        self.captured = []
        yield
        graph.calls, self.captured = tuple(self.captured), None  # type: ignore[attr-defined]


def test_seconds_in_graph_excludes_host_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", device.graph_type())
    monkeypatch.setattr(torch.cuda, "Event", device.event_type())
    monkeypatch.setattr(torch.cuda, "graph", device.capture)
    seconds = seconds_in_graph([lambda: device.call("a"), lambda: device.call("b"), lambda: device.call("c")])
    true = MILLISECONDS_PER_CALL / 1000
    assert true <= seconds < 1.05 * true, "one launch by itself would have shown nearly twice as much"
    assert device.ran[:4] == ["a", "b", "c", "a"]
    assert len(device.ran) % CALLS == 0


def test_copies_needed_by_weight_size() -> None:
    assert copies_needed(1) == CALLS
    assert copies_needed(64 << 20) == 3
    assert copies_needed(2 * ROTATED_BYTES) == 1
    for size in (1 << 20, 10 << 20, 50 << 20):
        assert copies_needed(size) == CALLS or copies_needed(size) * size >= ROTATED_BYTES

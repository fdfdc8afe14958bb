"""Signals are computed as PromQL does."""

from __future__ import annotations

from trimtab_operator.tuner.samples import Counters, Gauges, Phase, ReplicaSnapshot, Sample
from trimtab_simulator.policies.policy import PolicyInput
from trimtab_simulator.policies.signals import Increases, Sliding


def make_view(now: float, **finished: float) -> PolicyInput:
    snapshots = [
        ReplicaSnapshot(name, Phase.READY, sample=Sample(now, Counters(0, 0, count, {}), Gauges(0, 0, 0)))
        for name, count in finished.items()
    ]
    return PolicyInput(now, len(snapshots), {}, tuple(snapshots))


def test_increases_sum_over_replicas_that_come_and_go() -> None:
    window = Increases(60, lambda sample: (sample.counters.finished,))
    for view in (make_view(0, a=100), make_view(30, a=110, b=5), make_view(60, b=9)):
        window.add(view)
    assert window.totals == [10 + 4]
    window.add(make_view(91, b=20))
    assert window.totals == [11]  # the first view in the window is that of 60 s


def test_sliding_window_of_no_length_keeps_the_newest_value() -> None:
    recent = Sliding(0)
    recent.add(0, 5)
    recent.add(15, 3)
    assert (recent.lowest, recent.mean) == (3, 3)

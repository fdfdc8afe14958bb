"""Rows by arrival: however late they are told, they lie in order."""

from __future__ import annotations

import random

from trimtab_operator.tuner.load.arrivals import merge_by_arrival, since
from trimtab_operator.tuner.load.lengths import Pair


def test_rows_that_are_told_late_lie_in_the_order_of_arrival() -> None:
    rng = random.Random(1)
    rows: list[Pair] = []
    known: tuple[Pair, ...] = ()
    for snapshot in range(20):
        new = [Pair(15.0 * snapshot - rng.expovariate(1 / 30), 1, 1) for _ in range(rng.randrange(12))]
        rows += new
        known = merge_by_arrival(known, new)
    assert [pair.arrived_at for pair in known] == sorted(pair.arrived_at for pair in rows)


def test_those_since_a_time_are_those_that_came_then_or_later() -> None:
    known = tuple(Pair(at, 1, 1) for at in (1.0, 2.0, 2.0, 3.0))
    assert [pair.arrived_at for pair in since(known, 2.0)] == [2.0, 2.0, 3.0]
    assert since(known, 9.0) == ()

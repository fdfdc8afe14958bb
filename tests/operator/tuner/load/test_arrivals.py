"""Rows in order of arrival, however late they are reported."""

from __future__ import annotations

import random

from trimtab_operator.tuner.load.arrivals import merge_by_arrival, since
from trimtab_operator.tuner.load.lengths import Pair


def test_merged_rows_are_in_order_of_arrival() -> None:
    rng = random.Random(1)
    rows: list[Pair] = []
    known: tuple[Pair, ...] = ()
    for snapshot in range(20):
        new = [Pair(15.0 * snapshot - rng.expovariate(1 / 30), 1, 1) for _ in range(rng.randrange(12))]
        rows += new
        known = merge_by_arrival(known, new)
    assert [pair.arrived_at for pair in known] == sorted(pair.arrived_at for pair in rows)


def test_since_returns_rows_from_that_time_on() -> None:
    known = tuple(Pair(at, 1, 1) for at in (1.0, 2.0, 2.0, 3.0))
    assert [pair.arrived_at for pair in since(known, 2.0)] == [2.0, 2.0, 3.0]
    assert since(known, 9.0) == ()

"""Detection of closed-loop clients."""

from __future__ import annotations

import random

import pytest
from trimtab_operator.tuner.load.clients import Clients, Count


def seen(*counts: tuple[float, float, float], replicas: int = 1) -> Clients:
    """Return the counts after samples of (in flight, waiting, ended)."""
    clients = Clients()
    for there, waiting, ended in counts:
        clients = clients.with_count(Count(replicas, there, waiting, ended))
    return clients


def test_balanced_arrivals_with_a_queue_are_closed_loop() -> None:
    assert seen((16, 6, 9), (16, 7, 9), (16, 6, 9)).are_closed_loop
    assert seen(
        (16, 6, 9), (15, 7, 9), (16, 6, 9), (16, 6, 9)
    ).are_closed_loop  # one request was between client and engine


@pytest.mark.parametrize(
    ("counts", "why"),
    [
        ([(16, 6, 9), (16, 6, 9)], "one step may be chance"),
        ([(16, 6, 1), (16, 6, 1), (16, 6, 1)], "almost no request has ended"),
        ([(16, 0, 9), (16, 0, 9), (16, 0, 9)], "no request waits"),
        ([(16, 6, 9), (22, 12, 9), (27, 17, 9)], "a queue that grows"),
    ],
)
def test_inconclusive_counts_are_open_loop(counts: list[tuple[float, float, float]], why: str) -> None:
    assert not seen(*counts).are_closed_loop, why


def counted(rng: random.Random, mean: float) -> int:
    """Return a Poisson count with this mean."""
    count, left = 0, rng.expovariate(1.0)
    while left < mean:
        count, left = count + 1, left + rng.expovariate(1.0)
    return count


@pytest.mark.parametrize("soon_over", [False, True], ids=["a queue", "short requests"])
def test_open_loop_load_is_rarely_classified_as_closed_loop(soon_over: bool) -> None:
    rng, taken, snapshots = random.Random(2), 0, 0
    for _ in range(100):
        clients, there = Clients(), 200.0
        for _ in range(20):
            there = float(counted(rng, 6)) if soon_over else there + counted(rng, 25) - 25
            clients = clients.with_count(Count(1, there, 3.0, 60.0 if soon_over else 25.0))
            taken, snapshots = taken + clients.are_closed_loop, snapshots + 1
    assert taken / snapshots < 0.1


def test_changed_replica_count_resets_the_counts() -> None:
    clients = seen((16, 6, 9), (16, 6, 9), (16, 6, 9))
    assert not clients.with_count(Count(2, 16, 6, 9)).are_closed_loop

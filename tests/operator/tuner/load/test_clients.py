"""Clients that wait: known by what comes being what ends, and never taken for a stream."""

from __future__ import annotations

import random

import pytest
from trimtab_operator.tuner.load.clients import Clients, Count


def seen(*counts: tuple[float, float, float], replicas: int = 1) -> Clients:
    """After looks that counted (what is there, what waits, what has ended)."""
    clients = Clients()
    for there, waiting, ended in counts:
        clients = clients.with_count(Count(replicas, there, waiting, ended))
    return clients


def test_as_many_come_as_end_while_some_wait() -> None:
    assert seen((16, 6, 9), (16, 7, 9), (16, 6, 9)).are_closed_loop
    assert seen((16, 6, 9), (15, 7, 9), (16, 6, 9), (16, 6, 9)).are_closed_loop  # one was on its way


@pytest.mark.parametrize(
    ("counts", "why"),
    [
        ([(16, 6, 9), (16, 6, 9)], "one step may be an accident"),
        ([(16, 6, 1), (16, 6, 1), (16, 6, 1)], "nearly nothing has ended"),
        ([(16, 0, 9), (16, 0, 9), (16, 0, 9)], "nobody is held back"),
        ([(16, 6, 9), (22, 12, 9), (27, 17, 9)], "a queue that grows"),
    ],
)
def test_what_says_nothing_of_clients_is_a_stream(counts: list[tuple[float, float, float]], why: str) -> None:
    assert not seen(*counts).are_closed_loop, why


def counted(rng: random.Random, mean: float) -> int:
    """What comes by chance where so many are usual."""
    count, left = 0, rng.expovariate(1.0)
    while left < mean:
        count, left = count + 1, left + rng.expovariate(1.0)
    return count


@pytest.mark.parametrize("soon_over", [False, True], ids=["a queue", "soon over"])
def test_a_stream_is_hardly_ever_taken_for_clients(soon_over: bool) -> None:
    rng, taken, snapshots = random.Random(2), 0, 0
    for _ in range(100):
        clients, there = Clients(), 200.0
        for _ in range(20):
            there = float(counted(rng, 6)) if soon_over else there + counted(rng, 25) - 25
            clients = clients.with_count(Count(1, there, 3.0, 60.0 if soon_over else 25.0))
            taken, snapshots = taken + clients.are_closed_loop, snapshots + 1
    assert taken / snapshots < 0.1


def test_when_another_replica_is_read_it_begins_anew() -> None:
    clients = seen((16, 6, 9), (16, 6, 9), (16, 6, 9))
    assert not clients.with_count(Count(2, 16, 6, 9)).are_closed_loop

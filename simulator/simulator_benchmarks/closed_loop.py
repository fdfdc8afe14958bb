"""Clients that wait, under one policy: each asks, has its answer, and asks again at once.

What they send depends on what they get, so there is no trace: a replay of them draws lengths as it goes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from trimtab_operator.tuner.engine_model import Sequence as Served
from trimtab_simulator.plant.fleet import Fleet, FleetSettings
from trimtab_simulator.plant.router import RouterKind, router_of
from trimtab_simulator.policies.policy import Policy, View
from trimtab_simulator.replay import Change

POLL_SECONDS = 0.05  # how soon a client that has its answer asks again
BEGIN_SECONDS = 5.0  # within which all of them have asked for the first time


@dataclass(frozen=True, slots=True)
class Clients:
    """How many there are, and what each asks for: tokens of a prompt and of its answer."""

    count: int
    draw: Callable[[random.Random], tuple[int, int]]


@dataclass(frozen=True, slots=True)
class ClosedLoopResult:
    """What came of it. `served` are the requests that have their answers."""

    served: tuple[Served, ...]
    changes: tuple[Change, ...]
    seconds: float


def play_clients(
    settings: FleetSettings, policy: Policy, clients: Clients, *, seconds: float, seed: int
) -> ClosedLoopResult:
    """Have the policy steer a fleet of fixed size that these clients ask; equal arguments come to the same."""
    return _ClosedLoop(settings, policy, clients, seed).play(seconds)


class _ClosedLoop:
    def __init__(self, settings: FleetSettings, policy: Policy, clients: Clients, seed: int) -> None:
        self._fleet = Fleet(settings, router_of(RouterKind.LEAST_REQUEST, seed))
        self._policy = policy
        self._clients = clients
        self._rng = random.Random(f"clients-{seed}")
        self._told: dict[str, int] = {}  # by replica, how many of its ended requests have been followed by another
        self._begins = sorted(self._rng.uniform(0.0, BEGIN_SECONDS) for _ in range(clients.count))
        self._now = 0.0
        self._changes: list[Change] = []

    def play(self, seconds: float) -> ClosedLoopResult:
        """Let so much time pass."""
        tick = self._policy.tick_seconds
        due = tick
        while self._now < seconds:
            self._serve(min(due, seconds))
            if self._now >= due:
                self._turn()
                due += tick
        served = tuple(s for replica in self._fleet.all for s in replica.engine.finished)
        return ClosedLoopResult(served, tuple(self._changes), seconds)

    def _serve(self, until: float) -> None:
        while self._now < until:
            self._now = min(until, self._now + POLL_SECONDS)
            while self._begins and self._begins[0] <= self._now:
                self._ask(self._begins.pop(0))
            for at in self._ended():
                self._ask(at)

    def _ended(self) -> list[float]:
        """When requests ended that nobody has followed up yet."""
        times: list[float] = []
        for replica in self._fleet.ready:
            replica.engine.run_until(self._now)
            finished = replica.engine.finished
            times += [s.finished_at or self._now for s in finished[self._told.get(replica.name, 0) :]]
            self._told[replica.name] = len(finished)
        return sorted(times)

    def _ask(self, at: float) -> None:
        self._fleet.send(Served(at, *self._clients.draw(self._rng)), max(at, self._now))

    def _turn(self) -> None:
        fleet = self._fleet
        snapshots = fleet.snapshot(self._now, with_requests=self._policy.reads_requests)
        moves = self._policy.decide(View(self._now, fleet.desired, dict(fleet.parameters), snapshots))
        for parameter, (before, after) in fleet.patch(moves.parameters, self._now).items():
            self._changes.append(Change(self._now, parameter.value, before, after, moves.why))

"""Closed-loop clients under one policy: each sends its next request when it has received a response.

Requests depend on responses, so there is no trace: lengths are sampled during the run.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from trimtab_operator.tuner.engine_model import Sequence as Served
from trimtab_simulator.plant.fleet import Fleet, FleetSettings
from trimtab_simulator.plant.routing import RouterSettings, router_of
from trimtab_simulator.policies.policy import Policy, PolicyInput
from trimtab_simulator.replay import Change

POLL_SECONDS = 0.05  # delay until a client sends its next request
BEGIN_SECONDS = 5.0  # within which all clients send their first request


@dataclass(frozen=True, slots=True)
class Clients:
    """Number of clients, and a sampler of prompt and output tokens."""

    count: int
    draw: Callable[[random.Random], tuple[int, int]]


@dataclass(frozen=True, slots=True)
class ClosedLoopResult:
    """Result of a run. `served` are the finished requests."""

    served: tuple[Served, ...]
    changes: tuple[Change, ...]
    seconds: float


def run_clients(
    settings: FleetSettings, policy: Policy, clients: Clients, *, seconds: float, seed: int
) -> ClosedLoopResult:
    """Run a policy on a fleet of fixed size with these clients. Deterministic."""
    return _ClosedLoop(settings, policy, clients, seed).run(seconds)


class _ClosedLoop:
    def __init__(self, settings: FleetSettings, policy: Policy, clients: Clients, seed: int) -> None:
        self._fleet = Fleet(settings, router_of(RouterSettings(), seed))
        self._policy = policy
        self._clients = clients
        self._rng = random.Random(f"clients-{seed}")
        self._num_followed_up: dict[str, int] = {}  # by replica: finished requests with a follow-up request
        self._begins = sorted(self._rng.uniform(0.0, BEGIN_SECONDS) for _ in range(clients.count))
        self._now = 0.0
        self._changes: list[Change] = []

    def run(self, seconds: float) -> ClosedLoopResult:
        """Run for this many seconds."""
        tick = self._policy.tick_seconds
        due = tick
        while self._now < seconds:
            self._serve(min(due, seconds))
            if self._now >= due:
                self._run_policy()
                due += tick
        served = tuple(s for replica in self._fleet.all for s in replica.engine.finished)
        return ClosedLoopResult(served, tuple(self._changes), seconds)

    def _serve(self, until: float) -> None:
        while self._now < until:
            self._now = min(until, self._now + POLL_SECONDS)
            while self._begins and self._begins[0] <= self._now:
                self._request_replica(self._begins.pop(0))
            for at in self._ended():
                self._request_replica(at)

    def _ended(self) -> list[float]:
        """Return the end times of requests without a follow-up request."""
        times: list[float] = []
        for replica in self._fleet.ready:
            replica.engine.run_until(self._now)
            finished = replica.engine.finished
            times += [s.finished_at or self._now for s in finished[self._num_followed_up.get(replica.name, 0) :]]
            self._num_followed_up[replica.name] = len(finished)
        return sorted(times)

    def _request_replica(self, at: float) -> None:
        self._fleet.send(Served(at, *self._clients.draw(self._rng)), max(at, self._now))

    def _run_policy(self) -> None:
        fleet = self._fleet
        snapshots = fleet.snapshot(self._now, with_requests=self._policy.reads_requests)
        moves = self._policy.decide(PolicyInput(self._now, fleet.desired, dict(fleet.parameters), snapshots))
        for parameter, (before, after) in fleet.patch(moves.parameters, self._now).items():
            self._changes.append(Change(self._now, parameter.value, before, after, moves.why))

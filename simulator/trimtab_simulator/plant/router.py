"""Routers: a Service picks replicas at random; the router sends to the replica with the fewest requests."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from enum import StrEnum

from trimtab_simulator.plant.replica import Replica

Router = Callable[[Sequence[Replica], float], Replica]
"""(ready replicas, time) → the replica that gets the request."""


class RouterKind(StrEnum):
    SERVICE = "service"
    LEAST_REQUEST = "least-request"


def router_of(kind: RouterKind, seed: int) -> Router:
    """Return a router; random choices are seeded."""
    if kind is RouterKind.LEAST_REQUEST:
        return least_request
    rng = random.Random(f"router-{seed}")

    def service(ready: Sequence[Replica], at: float) -> Replica:
        return ready[int(rng.random() * len(ready))]

    return service


def least_request(ready: Sequence[Replica], at: float) -> Replica:
    """Return the replica with the fewest unfinished requests, and of several the one with the fewest requests so
    far.
    """
    best = ready[0]
    fewest = best.count if best.quiet_until > at else best.refresh(at)
    for replica in ready[1:]:
        count = replica.count if replica.quiet_until > at else replica.refresh(at)
        if count < fewest or (count == fewest and replica.num_sent < best.num_sent):
            best, fewest = replica, count
    return best

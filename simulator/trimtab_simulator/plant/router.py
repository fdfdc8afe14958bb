"""Which replica gets a request. A Service knows nothing of load; the front door sends to who has the fewest."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from enum import StrEnum

from trimtab_simulator.plant.replica import Replica

Router = Callable[[Sequence[Replica], float], Replica]
"""(ready replicas, time) → the one that gets the request."""


class RouterKind(StrEnum):
    SERVICE = "service"
    LEAST_REQUEST = "least-request"


def router_of(kind: RouterKind, seed: int) -> Router:
    """A router that draws from `seed` where it draws."""
    if kind is RouterKind.LEAST_REQUEST:
        return least_request
    rng = random.Random(f"router-{seed}")

    def service(ready: Sequence[Replica], at: float) -> Replica:
        return ready[int(rng.random() * len(ready))]

    return service


def least_request(ready: Sequence[Replica], at: float) -> Replica:
    """The replica with the fewest unfinished requests; of several, the one that was sent the fewest so far."""
    best = ready[0]
    fewest = best.count if best.quiet_until > at else best.refresh(at)
    for replica in ready[1:]:
        count = replica.count if replica.quiet_until > at else replica.refresh(at)
        if count < fewest or (count == fewest and replica.num_sent < best.num_sent):
            best, fewest = replica, count
    return best

"""Routers that need no state of the engines: random, fewest requests, and consistent hashing with bounded loads."""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Sequence
from hashlib import blake2b

from trimtab_operator.tuner.engine_model import Sequence as Request

from trimtab_simulator.plant.replica import Replica

CHWBL_NODES = 256
"""Virtual nodes of a replica (KubeAI's `replication`)."""
CHWBL_LOAD_FACTOR = 1.25
"""Highest load of a replica, relative to the mean (KubeAI's `meanLoadFactor` 125)."""
CHWBL_KEYS = 2
"""Prefix ids that are hashed. KubeAI hashes the first 100 characters of the first user message; in a Mooncake trace
the first id is a system prompt common to all requests, the second the beginning of the conversation."""


class Service:
    """A Kubernetes Service: a random replica."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(f"router-{seed}")

    def choose(self, request: Request, ready: Sequence[Replica], now: float) -> Replica:
        """Return a random replica."""
        return ready[int(self._rng.random() * len(ready))]


class LeastRequest:
    """The replica with the fewest unfinished requests, and of several the one with the fewest requests so far."""

    def choose(self, request: Request, ready: Sequence[Replica], now: float) -> Replica:
        """Return the replica with the fewest requests."""
        best = ready[0]
        fewest = best.count if best.quiet_until > now else best.refresh(now)
        for replica in ready[1:]:
            count = replica.count if replica.quiet_until > now else replica.refresh(now)
            if count < fewest or (count == fewest and replica.num_sent < best.num_sent):
                best, fewest = replica, count
        return best


class Chwbl:
    """Consistent hashing with bounded loads, as KubeAI's strategy PrefixHash.

    The first replica on the hash circle after the request's hash whose load, with this request, is at most
    CHWBL_LOAD_FACTOR times the mean. Load is the number of unfinished requests. Requests without a prefix go to the
    replica with the fewest.
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        self._ring: list[tuple[int, int]] = []
        self._least = LeastRequest()

    def choose(self, request: Request, ready: Sequence[Replica], now: float) -> Replica:
        """Return the replica of the request's hash, or the next one on the circle with room."""
        if not request.keys:
            return self._least.choose(request, ready, now)
        names = [replica.name for replica in ready]
        if names != self._names:
            self._names = names
            self._ring = sorted(
                (_hash(f"{name}/{node}"), index) for index, name in enumerate(names) for node in range(CHWBL_NODES)
            )
        loads = [replica.count if replica.quiet_until > now else replica.refresh(now) for replica in ready]
        most = math.ceil(CHWBL_LOAD_FACTOR * (sum(loads) + 1) / len(ready))
        start = bisect_left(self._ring, (_hash(str(request.keys[:CHWBL_KEYS])), 0))
        for offset in range(len(self._ring)):
            index = self._ring[(start + offset) % len(self._ring)][1]
            if loads[index] + 1 <= most:
                return ready[index]
        return ready[0]


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")

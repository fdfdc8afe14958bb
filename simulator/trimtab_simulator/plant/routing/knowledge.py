"""Knowledge of routers about replicas: exact cached prefixes, and reports of the engine's state."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from trimtab_operator.tuner.engine_model import Sequence as Request
from trimtab_router.scoring.prefix_index import PrefixIndex

from trimtab_simulator.plant.pooled_blocks import PooledBlocks
from trimtab_simulator.plant.replica import Replica
from trimtab_simulator.plant.shared_blocks import CacheChange, SharedBlocks
from trimtab_simulator.trace.arrivals import KEY_TOKENS


@dataclass(slots=True)
class Knowledge:
    """The caches and queues of all replicas, exact as of the last `update`.

    Prefixes of requests on their way count as cached: a router knows its own dispatches.
    """

    index: PrefixIndex = field(default_factory=PrefixIndex)
    changes: list[tuple[int, CacheChange]] = field(default_factory=list)
    """Changes of the last `update`: (replica's number, change)."""
    _ready: dict[int, Replica] = field(default_factory=dict)
    _uncached: dict[Request, float] = field(default_factory=dict)

    def update(self, ready: Sequence[Replica], now: float) -> list[int]:
        """Advance all replicas to `now` and read their caches; return the numbers of replicas that are gone."""
        gone: list[int] = []
        if len(ready) != len(self._ready) or any(replica.number not in self._ready for replica in ready):
            current = {replica.number: replica for replica in ready}
            gone = [number for number in self._ready if number not in current]
            for number in gone:
                self.index.clear(number)
            for number, replica in current.items():
                if number not in self._ready and isinstance(
                    blocks := replica.engine.blocks, SharedBlocks | PooledBlocks
                ):
                    blocks.changes.start()
            self._ready = current
        self.changes = []
        for replica in ready:
            replica.engine.run_until(now)
            blocks = replica.engine.blocks
            if not isinstance(blocks, SharedBlocks | PooledBlocks):
                continue
            for change in blocks.changes.take():
                self.changes.append((replica.number, change))
                apply_change(self.index, replica.number, change)
        return gone

    def record(self, request: Request, replica: Replica) -> None:
        """Record that the request was sent to the replica."""
        cached = self.cached_tokens(request).get(replica.number, 0)
        self._uncached[request] = request.num_prompt - cached
        self.index.expect(replica.number, request.keys, math.inf)

    def cached_tokens(self, request: Request) -> dict[int, int]:
        """Return the cached prompt tokens by replica's number; the last token must always be computed."""
        counts = self.index.match(request.keys, 0.0)
        most = request.num_prompt - 1
        return {number: min(most, count * KEY_TOKENS) for number, count in counts.items()}

    def prefill_tokens(self, replica: Replica) -> float:
        """Return the uncached prompt tokens that the replica has yet to compute, without the current step's.

        Cached tokens of a waiting request are the ones known when it was sent, of a preempted one the remaining ones.
        """
        engine = replica.engine
        total = float(engine.prefill_left)
        for request in engine.waiting:
            if request.num_preemptions:
                total += request.num_tokens - engine.blocks.find_cached(request)[0] * engine.blocks.block_size
            else:
                total += self._uncached[request]
        return total

    def forget_started(self) -> None:
        """Drop requests that have their first token."""
        self._uncached = {r: tokens for r, tokens in self._uncached.items() if r.first_token_at is None}


def apply_change(index: PrefixIndex, number: int, change: CacheChange) -> None:
    """Apply a change of a replica's cache to an index."""
    key, is_cached = change
    if is_cached:
        index.add(number, (key,))
    else:
        index.remove(number, (key,))

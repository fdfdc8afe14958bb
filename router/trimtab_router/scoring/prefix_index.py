"""Index of the prefixes in the replicas' caches: a bit mask of replicas for each prefix key.

A key identifies the whole prompt up to its cut, so the leading keys of a prompt that a replica holds are the part of
the prompt that it need not compute. Keys of requests on their way are *expected*: requests of the same burst follow
the first one instead of computing the prefix on other replicas too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

MIN_REUSE_WINDOW = 1024
"""Least number of evicted keys over which `reuse_shares` are averaged."""


class PrefixIndex:
    """Prefix keys by replica. Replicas are numbers from 0, as in `ReplicaState.index`."""

    def __init__(self) -> None:
        self.reuse_shares: dict[int, float] = {}
        """Share, 0 to 1, of the keys evicted by each replica that had to be computed again later.

        This is the price of displacing a token from its cache, in recomputed tokens. A key that another replica still
        holds costs nothing. Replicas without such keys are absent.
        """
        self._masks: dict[int, int] = {}  # key → replicas that hold or expect it
        self._expected: dict[tuple[int, int], float] = {}  # (key, replica) that is not held → time until it counts
        self._expiries: list[tuple[float, int, int, Sequence[int]]] = []  # (time, number, replica, keys), a heap
        self._num_dispatches = 0
        self._num_held: dict[int, int] = {}
        self._evicted: dict[int, int] = {}  # key without any copy → replica that evicted the last one, oldest first
        self._num_evicted: dict[int, float] = {}
        self._num_recomputed: dict[int, float] = {}

    def add(self, replica: int, keys: Iterable[int]) -> None:
        """Record that the replica has cached these keys."""
        masks, expected, evicted, bit = self._masks, self._expected, self._evicted, 1 << replica
        count = 0
        for key in keys:
            mask = masks.get(key, 0)
            if not mask & bit:
                masks[key] = mask | bit
            elif not expected or expected.pop((key, replica), None) is None:
                continue
            count += 1
            if evicted and (loser := evicted.pop(key, None)) is not None:
                self._count_recomputed(loser)
        self._num_held[replica] = self._num_held.get(replica, 0) + count

    def remove(self, replica: int, keys: Iterable[int]) -> None:
        """Record that the replica has evicted these keys."""
        masks, expected, bit = self._masks, self._expected, 1 << replica
        count = 0
        for key in keys:
            mask = masks.get(key, 0)
            if not mask & bit or (key, replica) in expected:
                continue
            count += 1
            if mask == bit:
                del masks[key]
                self._evicted[key] = replica
            else:
                masks[key] = mask ^ bit
        self._num_held[replica] = self._num_held.get(replica, 0) - count
        self._count_evictions(replica, count)

    def clear(self, replica: int) -> None:
        """Forget everything about the replica: it is gone, or it sends a new snapshot."""
        bit = 1 << replica
        for key in [key for key, mask in self._masks.items() if mask & bit]:
            self._unset(key, bit)
        for entry in [entry for entry in self._expected if entry[1] == replica]:
            del self._expected[entry]
        for counts in (self._num_held, self._num_evicted, self._num_recomputed, self.reuse_shares):
            counts.pop(replica, None)

    def expect(self, replica: int, keys: Sequence[int], until: float) -> None:
        """Treat the keys as cached by the replica until that time: a request that computes them was sent there."""
        masks, expected, bit = self._masks, self._expected, 1 << replica
        is_new = False
        for key in keys:
            mask = masks.get(key, 0)
            if not mask & bit:
                masks[key] = mask | bit
            elif expected.get((key, replica), until) >= until:  # held, or expected for longer
                continue
            expected[key, replica] = until
            is_new = True
        if is_new:
            self._num_dispatches += 1
            heappush(self._expiries, (until, self._num_dispatches, replica, keys))

    def match(self, keys: Sequence[int], now: float) -> dict[int, int]:
        """Return the number of leading keys that each replica holds or expects; replicas with none are absent."""
        if self._expiries and self._expiries[0][0] <= now:
            self._expire(now)
        counts: dict[int, int] = {}
        get = self._masks.get
        mask = get(keys[0], 0) if keys else 0
        if not mask:
            return counts
        number = 0
        for key in keys:
            left = mask & get(key, 0)
            if left != mask:
                _assign(counts, mask ^ left, number)
                mask = left
                if not mask:
                    return counts
            number += 1
        _assign(counts, mask, number)
        return counts

    def num_keys(self, replica: int) -> int:
        """Return the number of keys that the replica holds."""
        return self._num_held.get(replica, 0)

    # --- parts ----------------------------------------------------------------------------------------------------

    def _unset(self, key: int, bit: int) -> None:
        mask = self._masks[key] & ~bit
        if mask:
            self._masks[key] = mask
        else:
            del self._masks[key]

    def _count_recomputed(self, loser: int) -> None:
        """Count a key that `loser` evicted and that is computed again."""
        recomputed = self._num_recomputed[loser] = self._num_recomputed.get(loser, 0.0) + 1
        evicted = self._num_evicted.get(loser, 0.0)
        self.reuse_shares[loser] = recomputed / evicted if evicted > recomputed else 1.0

    def _count_evictions(self, replica: int, count: int) -> None:
        """Add to the replica's evictions, which are averaged over about two turnovers of its cache."""
        evicted = self._num_evicted.get(replica, 0.0) + count
        recomputed = self._num_recomputed.get(replica, 0.0)
        if evicted > max(MIN_REUSE_WINDOW, 2 * self.num_keys(replica)):
            evicted, recomputed = evicted / 2, recomputed / 2
            self._num_recomputed[replica] = recomputed
        self._num_evicted[replica] = evicted
        if recomputed:
            self.reuse_shares[replica] = recomputed / evicted if evicted > recomputed else 1.0
        most = max(MIN_REUSE_WINDOW, len(self._masks))
        while len(self._evicted) > most:
            del self._evicted[next(iter(self._evicted))]

    def _expire(self, now: float) -> None:
        expiries, expected = self._expiries, self._expected
        while expiries and expiries[0][0] <= now:
            _, _, replica, keys = heappop(expiries)
            for key in keys:
                if expected.get((key, replica), now + 1.0) <= now:
                    del expected[key, replica]
                    self._unset(key, 1 << replica)


def _assign(counts: dict[int, int], mask: int, number: int) -> None:
    """Set the count of every replica in the mask."""
    while mask:
        bit = mask & -mask
        counts[bit.bit_length() - 1] = number
        mask ^= bit

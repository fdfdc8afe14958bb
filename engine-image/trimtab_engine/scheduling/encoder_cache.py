"""Encoder cache for image and video embeddings: device residency, readers, and the encoder budget of a step.

An item is computed as a whole in the step that schedules its first token, and held while a request is in the middle of
it. Unheld items stay until their room is needed, evicted in LRU order. An image is therefore computed once for all
requests that contain it, unless it is displaced.

```
capacity, in tokens     |---- held by some request ---------------|---- idle ----|---- free ----|
budget of a step        |---- items computed in this step ----|---- left ----|
```
Two rules guarantee progress. A request in the middle of an item needs no further room to finish it. And a request that
finds no room blocks all later ones in the same step, so that held items decrease until it fits.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from trimtab_engine.errors import IntegrityError
from trimtab_engine.multimodal.items import MultiModalItem, Span
from trimtab_engine.scheduling.request import Request

Named = tuple[bytes, MultiModalItem]
"""(key, item). A key names embeddings: to requests of different salts one content has different ones."""


@dataclass(frozen=True, slots=True)
class ItemReach:
    """How far a request's tokens can be computed in this step, and which items that range covers."""

    end: int
    found: tuple[bytes, ...] = ()
    """Keys of covered items that are on the device."""
    missing: tuple[Named, ...] = ()
    """Items that the step must compute first."""


class EncoderCache:
    """Counts embeddings in tokens: `capacity` is how many are kept, `step_budget` how many a step computes."""

    def __init__(self, capacity: int, step_budget: int) -> None:
        if min(capacity, step_budget) < 1:
            raise ValueError(f"capacity is {capacity} and step_budget {step_budget}; both must be 1 or more")
        self.capacity, self.step_budget = capacity, step_budget
        self._sizes: dict[bytes, int] = {}
        """Sizes of all cached items, in tokens."""
        self._num_holders: dict[bytes, int] = {}
        self._idle: OrderedDict[bytes, None] = OrderedDict()  # evicted in this order
        self._held_by: dict[Request, set[bytes]] = {}
        self._num_held_tokens = 0
        self._num_kept_tokens = 0
        self._num_spent = 0
        self._is_closed = False
        self._displaced: list[bytes] = []

    @property
    def num_kept_tokens(self) -> int:
        return self._num_kept_tokens

    @property
    def largest_item(self) -> int:
        """Tokens of the largest item that it can ever take."""
        return min(self.capacity, self.step_budget)

    def begin_step(self) -> None:
        """Start a step: release items passed in the last step and reset the encoder budget."""
        self._num_spent, self._is_closed = 0, False
        for request in list(self._held_by):
            computed = request.num_computed_tokens
            inside = {key_of(request, s.item) for s in request.spans if s.offset < computed < s.end}
            self._release_items(request, self._held_by[request] - inside)

    def reach(self, request: Request, start: int, end: int) -> ItemReach:
        """Return how far the request's tokens from `start` can be computed, up to `end`. If an item finds no room,
        requests after it in this step get no new room either; nothing else changes.
        """
        own = self._held_by.get(request, set())
        found: dict[bytes, None] = {}
        missing: dict[bytes, MultiModalItem] = {}
        num_spent, num_held = self._num_spent, self._num_held_tokens
        for span in spans_between(request.spans, start, end):
            key = key_of(request, span.item)
            if key in found or key in missing:
                continue
            if key in own:
                found[key] = None
                continue
            num_tokens, is_kept = span.item.num_tokens, key in self._sizes
            num_held += 0 if key in self._num_holders else num_tokens
            num_spent += 0 if is_kept else num_tokens
            if self._is_closed or num_held > self.capacity or num_spent > self.step_budget:
                self._is_closed = True
                return ItemReach(max(start, span.offset), tuple(found), tuple(missing.items()))
            if is_kept:
                found[key] = None
            else:
                missing[key] = span.item
        return ItemReach(end, tuple(found), tuple(missing.items()))

    def take(self, request: Request, reach: ItemReach) -> list[Named]:
        """Hold the items in `reach` and return the ones that this step must compute. No other request may take items
        between the computation of `reach` and this call.
        """
        if not reach.found and not reach.missing:
            return []
        own = self._held_by.setdefault(request, set())
        for key in reach.found:
            if key not in own:
                self._hold(own, key)
        for key, item in reach.missing:
            self._make_room(item.num_tokens)
            self._sizes[key] = item.num_tokens
            self._num_kept_tokens += item.num_tokens
            self._num_spent += item.num_tokens
            self._idle[key] = None
            self._hold(own, key)
        return list(reach.missing)

    def release(self, request: Request) -> None:
        """Release all items of a request that left the device or ended."""
        if request in self._held_by:
            self._release_items(request, set(self._held_by[request]))

    def invalidate_blocks(self, request: Request) -> None:
        """Drop the embeddings of all its items that no other request reads: they may contain NaN."""
        self.release(request)
        for key in {key_of(request, span.item) for span in request.spans} & self._idle.keys():
            self._displace(key)

    def take_displaced(self) -> list[bytes]:
        """Return keys displaced since the last call. Drop them before any item is computed."""
        displaced, self._displaced = self._displaced, []
        return displaced

    def _hold(self, own: set[bytes], key: bytes) -> None:
        own.add(key)
        if key in self._idle:
            del self._idle[key]
            self._num_held_tokens += self._sizes[key]
        self._num_holders[key] = self._num_holders.get(key, 0) + 1

    def _release_items(self, request: Request, keys: Iterable[bytes]) -> None:
        own = self._held_by[request]
        for key in sorted(keys):  # an order that does not depend on how sets hash
            own.remove(key)
            self._num_holders[key] -= 1
            if not self._num_holders[key]:
                del self._num_holders[key]
                self._num_held_tokens -= self._sizes[key]
                self._idle[key] = None
        if not own:
            del self._held_by[request]

    def _make_room(self, num_tokens: int) -> None:
        while self._num_kept_tokens + num_tokens > self.capacity:
            self._displace(next(iter(self._idle)))

    def _displace(self, key: bytes) -> None:
        del self._idle[key]
        self._num_kept_tokens -= self._sizes.pop(key)
        self._displaced.append(key)

    def check_integrity(self, running: Iterable[Request]) -> None:
        """Raise IntegrityError unless cached items fit, each is held or idle, and only running requests hold items."""
        runs = set(running)
        holders: dict[bytes, int] = {}
        for request, keys in self._held_by.items():
            if request not in runs or not keys:
                raise IntegrityError(
                    f"request {request.request_id} holds {len(keys)} items, and does not run or need any"
                )
            for key in keys:
                holders[key] = holders.get(key, 0) + 1
        if holders != self._num_holders or holders.keys() & self._idle.keys():
            raise IntegrityError("the held items differ from the items that requests hold")
        if holders.keys() | self._idle.keys() != self._sizes.keys():
            raise IntegrityError("an item is kept, but neither held nor idle")
        if self._num_held_tokens != sum(self._sizes[key] for key in holders):
            raise IntegrityError(f"{self._num_held_tokens} held item tokens differ from the sum of held items")
        if not self._num_kept_tokens == sum(self._sizes.values()) <= self.capacity:
            raise IntegrityError(f"{self._num_kept_tokens} tokens of items are kept; the capacity is {self.capacity}")


def spans_between(spans: Iterable[Span], start: int, end: int) -> Iterator[Span]:
    """Return the spans that have tokens in [start, end)."""
    return (span for span in spans if span.offset < end and start < span.end)


def key_of(request: Request, item: MultiModalItem) -> bytes:
    """Return the key under which the request's item embeddings are cached."""
    return _salted(request.cache_salt, item.content_hash) if request.cache_salt else item.content_hash


@lru_cache(maxsize=1024)
def _salted(salt: str, content_hash: bytes) -> bytes:
    named = salt.encode()
    return hashlib.sha256(len(named).to_bytes(8, "big") + named + content_hash).digest()

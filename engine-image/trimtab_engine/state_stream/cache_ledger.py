"""Prefix keys whose KV blocks are in the cache: the core's ledger from keys to block content.

A request arrives with its prefix keys and the number of tokens that each covers. Key i stands for the blocks between
the end of key i - 1 and its own end, rounded down: a prompt's leading keys are cached as far as its leading blocks are.
A key that ends in the same block as the one before it, or in text that the tokens do not show, stands for the blocks of
the next key that ends in a later one.

The block manager records lookup keys that appear and vanish. Blocks are offered to other requests when their step is
scheduled, but announced when it has completed.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from trimtab_engine.scheduling.block_manager import BlockManager
from trimtab_engine.scheduling.request import Request

MIN_MAX_KEYS = 1 << 16
KEYS_PER_BLOCK = 4
"""Keys that are kept for each block of the cache. More exist only if prompts show few of the bytes that they are made
of."""


@dataclass(slots=True)
class _Entry:
    """One key, and the blocks that it stands for."""

    blocks: tuple[bytes, ...]
    num_missing: int


@dataclass(slots=True)
class _Watched:
    """One block content that keys stand for."""

    keys: list[int]
    is_cached: bool = False


class CacheLedger:
    """Prefix keys of one core. Recording begins with the ledger and ends with close()."""

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks
        self._max_keys = max(MIN_MAX_KEYS, KEYS_PER_BLOCK * blocks.cap)
        self._entries: OrderedDict[int, _Entry] = OrderedDict()  # least recently requested first
        self._watched: dict[bytes, _Watched] = {}
        self._announced: set[int] = set()
        self._changed: dict[int, None] = {}
        """Keys whose state may differ from the announced one."""
        self._in_flight: dict[int, list[bytes]] = {}
        """Changes of scheduled steps that have not completed, by step number."""
        self._new: list[bytes] = []
        """Contents that were watched since the last change."""
        blocks.record_changes(enabled=True)

    def close(self) -> None:
        """Stop recording."""
        self._blocks.record_changes(enabled=False)

    # --- requests -------------------------------------------------------------------------------------------------

    def add(self, request: Request, keys: Sequence[int], ends: Sequence[int]) -> int:
        """Watch the blocks of a request's prompt. Return how many of its leading tokens are cached now, as far as keys
        show it.

        Args:
            request: The request; its tokens are known, its block hashes need not be.
            keys: Its prefix keys in order.
            ends: For each key, how many of the prompt's tokens it covers. Never decreasing.
        """
        block_size = self._blocks.block_size
        last = min(ends[-1], request.num_prompt_tokens) // block_size if ends else 0
        contents = self._blocks.lookup_keys(request, last)
        entries, first, begin, num_cached = self._entries, 0, 0, 0
        for place, end in enumerate(ends):
            num_blocks = min(end // block_size, last)
            if num_blocks <= begin:
                continue  # it stands for the same blocks as the next one
            span = tuple(contents[begin:num_blocks])
            for key in keys[first : place + 1]:
                entry = entries.get(key)
                if entry is None or entry.blocks[-1] != span[-1] or len(entry.blocks) != len(span):
                    self._watch(key, span)
                else:
                    entries.move_to_end(key)
                    if not entry.num_missing and num_cached == begin * block_size:
                        num_cached = num_blocks * block_size
            first, begin = place + 1, num_blocks
        while len(entries) > self._max_keys:
            self._forget(next(iter(entries)))
        return num_cached

    def _watch(self, key: int, span: tuple[bytes, ...]) -> None:
        if key in self._entries:  # its tokens are others now: an adapter was loaded again under its name
            self._forget(key)
        watched, num_missing = self._watched, len(span)
        for content in span:
            known = watched.get(content)
            if known is None:
                watched[content] = _Watched([key])
                self._new.append(content)
            else:
                known.keys.append(key)
                num_missing -= known.is_cached
        self._entries[key] = _Entry(span, num_missing)
        if not num_missing:
            self._changed[key] = None

    def _forget(self, key: int) -> None:
        for content in self._entries.pop(key).blocks:
            known = self._watched[content]
            known.keys.remove(key)
            if not known.keys:
                del self._watched[content]
        self._changed[key] = None

    # --- steps ----------------------------------------------------------------------------------------------------

    def scheduled(self, step: int) -> None:
        """Keep the changes so far until this step, which was just scheduled, has completed."""
        changes = self._take()
        if changes:
            self._in_flight[step] = changes

    def completed(self, step: int) -> None:
        """Apply the changes up to this step."""
        in_flight = self._in_flight
        for number in [number for number in in_flight if number <= step]:
            self._apply(in_flight.pop(number))

    def settle(self) -> None:
        """Apply all changes; no step is in flight."""
        for changes in self._in_flight.values():
            self._apply(changes)
        self._in_flight.clear()
        self._apply(self._take())

    def _take(self) -> list[bytes]:
        changes = self._blocks.take_changes()
        if self._new:
            changes += self._new
            self._new.clear()
        return changes

    def _apply(self, changes: Sequence[bytes], *, only_vanished: bool = False) -> None:
        watched, is_cached = self._watched, self._blocks.is_cached
        for content in changes:
            known = watched.get(content)
            if known is None or known.is_cached == (now := is_cached(content)) or (only_vanished and now):
                continue
            known.is_cached = now
            for key in known.keys:
                entry = self._entries[key]
                if now:
                    entry.num_missing -= 1
                    if not entry.num_missing:
                        self._changed[key] = None
                else:
                    entry.num_missing += 1
                    if entry.num_missing == 1:
                        self._changed[key] = None

    # --- news -----------------------------------------------------------------------------------------------------

    def take_news(self) -> tuple[list[int], list[int]]:
        """Return the keys whose blocks all are cached since the last call, and keys that have lost a block since.

        Content that a scheduled step will overwrite counts as gone already.
        """
        for changes in self._in_flight.values():
            self._apply(changes, only_vanished=True)
        if not self._changed:
            return [], []
        added, removed, announced = [], [], self._announced
        for key in self._changed:
            entry = self._entries.get(key)
            if entry is not None and not entry.num_missing:
                if key not in announced:
                    announced.add(key)
                    added.append(key)
            elif key in announced:
                announced.remove(key)
                removed.append(key)
        self._changed.clear()
        return added, removed

    @property
    def announced(self) -> frozenset[int]:
        """The keys that are announced."""
        return frozenset(self._announced)

    def __len__(self) -> int:
        """Return the number of keys that are kept, announced or not."""
        return len(self._entries)

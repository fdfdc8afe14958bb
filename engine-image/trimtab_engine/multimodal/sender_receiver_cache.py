"""Cache protocol that sends an item's patches to an engine core once: while the core keeps them, their hash is enough.
Placeholders (thousands for a large image) are not sent either.

Both ends of a connection keep the same LRU list, updated in message order: the sender's has sizes, the core's has
patches. So the sender knows the core's contents without a request.

```
sender   hash → size   ── message 1: hash, patches ──>  hash → patches   core
         hit: known    ── message 2: hash           ──>  found
         evicts oldest ── message 3: hash, patches ──>  evicts the same
```
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Generic, TypeVar

import msgspec

from trimtab_engine.errors import IntegrityError
from trimtab_engine.multimodal.items import Patches, Span
from trimtab_engine.multimodal.placeholders import fold, unfold
from trimtab_engine.multimodal.processor_cache import num_bytes

Kept = TypeVar("Kept")


class _Recent(Generic[Kept]):
    """The shared eviction rule: the newest entries stay within the byte limit; an entry larger than the limit is never
    kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[bytes, tuple[int, Kept]] = OrderedDict()
        self.num_bytes = 0

    def find(self, content_hash: bytes) -> Kept | None:
        entry = self._entries.get(content_hash)
        if entry is None:
            return None
        self._entries.move_to_end(content_hash)
        return entry[1]

    def keep(self, content_hash: bytes, size: int, what: Kept) -> None:
        if size > self._max_bytes:
            return
        self._entries[content_hash] = (size, what)
        self.num_bytes += size
        while self.num_bytes > self._max_bytes:
            _, (gone, _) = self._entries.popitem(last=False)
            self.num_bytes -= gone

    def clear(self) -> None:
        self._entries.clear()
        self.num_bytes = 0


class Sender:
    """The server's end, one for each core."""

    def __init__(self, max_bytes: int) -> None:
        self._there: _Recent[bool] = _Recent(max_bytes)

    def shortened(self, token_ids: Sequence[int], spans: Sequence[Span]) -> tuple[list[int], tuple[Span, ...]]:
        """Return the message form of a prompt and its spans, whose items are complete: one placeholder per item, and no
        patches that the core has.
        """
        return fold(token_ids, spans), tuple(self._shortened(span) for span in spans)

    def _shortened(self, span: Span) -> Span:
        item = span.item
        if self._there.find(item.content_hash):
            return Span(span.offset, msgspec.structs.replace(item, patches=None))
        self._there.keep(item.content_hash, num_bytes(item.patches), True)
        return span

    def clear(self) -> None:
        """Clear the sender's list: the next message tells the core to clear too."""
        self._there.clear()


class Receiver:
    """A core's end, one for each server."""

    def __init__(self, max_bytes: int) -> None:
        self._patches: _Recent[Patches] = _Recent(max_bytes)

    @property
    def num_bytes(self) -> int:
        """Number of bytes in the cache."""
        return self._patches.num_bytes

    def completed(self, folded: Sequence[int], spans: Sequence[Span]) -> tuple[list[int], tuple[Span, ...]]:
        """The prompt and its spans as they were before they were shortened. Raises IntegrityError when the two ends
        differ, InvalidRequest when an item is nowhere in the prompt.
        """
        completed = tuple(self._completed(span) for span in spans)
        return unfold(folded, completed), completed

    def _completed(self, span: Span) -> Span:
        item = span.item
        found = self._patches.find(item.content_hash)
        if item.patches is None:
            if found is None:
                raise IntegrityError(f"a server sent item {item.content_hash.hex()} by name, which this core lacks")
            return Span(span.offset, msgspec.structs.replace(item, patches=found))
        if found is None:
            self._patches.keep(item.content_hash, num_bytes(item.patches), item.patches)
        return span

    def clear(self) -> None:
        """Forget all, as the sender does."""
        self._patches.clear()

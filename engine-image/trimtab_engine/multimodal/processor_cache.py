"""What was made of images and videos before, by what they are: a conversation sends its pictures again at every turn.

The least recently used go when the bytes do not suffice. Two requests that bring the same picture at once have it made
once.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from trimtab_engine.multimodal.items import MultiModalItem, Patches


class ProcessorCache:
    """Items by content hash, in up to `max_bytes` of patches; 0: nothing is kept. `on_lookup` is told of each item that
    is asked for whether it was there."""

    def __init__(self, max_bytes: int, on_lookup: Callable[[bool], None] = lambda found: None) -> None:
        self._max_bytes, self._on_lookup = max_bytes, on_lookup
        self._items: OrderedDict[bytes, MultiModalItem] = OrderedDict()
        self._made: dict[bytes, asyncio.Task[MultiModalItem]] = {}
        self._epoch = 0  # how often all was forgotten
        self.num_bytes = 0

    async def get(self, content_hash: bytes, make: Callable[[], Awaitable[MultiModalItem]]) -> MultiModalItem:
        """The item of this name, which `make` makes if there is none; what that raises is for all who wait for it."""
        found = self._items.get(content_hash)
        self._on_lookup(found is not None)
        if found is not None:
            self._items.move_to_end(content_hash)
            return found
        if self._max_bytes == 0:
            return await make()
        task = self._made.get(content_hash)
        if task is None:
            task = self._made[content_hash] = asyncio.create_task(self._make(content_hash, make, self._epoch))
            task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # where nobody waits any more
        return await asyncio.shield(task)  # who leaves does not end it for the others

    async def known(self, content_hash: bytes) -> MultiModalItem | None:
        """The item of this name, also one that is being made, whose failure is raised; None: there is none."""
        made = self._made.get(content_hash)
        if made is not None or content_hash in self._items:
            return await self.get(content_hash, _nothing)
        self._on_lookup(False)
        return None

    async def _make(
        self, content_hash: bytes, make: Callable[[], Awaitable[MultiModalItem]], epoch: int
    ) -> MultiModalItem:
        try:
            item = await make()
        finally:
            del self._made[content_hash]
        if epoch == self._epoch:
            self._keep(content_hash, item)
        return item

    def _keep(self, content_hash: bytes, item: MultiModalItem) -> None:
        size = num_bytes(item.patches)
        if size > self._max_bytes:
            return
        self._items[content_hash] = item
        self.num_bytes += size
        while self.num_bytes > self._max_bytes:
            _, dropped = self._items.popitem(last=False)
            self.num_bytes -= num_bytes(dropped.patches)

    def clear(self) -> None:
        """Forget all items, and those that are being made."""
        self._epoch += 1
        self._items.clear()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._items)


async def _nothing() -> MultiModalItem:
    raise AssertionError("it is there, or is being made")


def num_bytes(patches: Patches | None) -> int:
    """What an item takes in a cache."""
    return 0 if patches is None else len(patches.values) + len(patches.meanings)

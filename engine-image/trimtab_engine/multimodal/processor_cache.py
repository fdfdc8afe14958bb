"""LRU cache of processed images and videos: a conversation resends its images with every turn. Concurrent requests with
the same image share one computation.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from trimtab_engine.multimodal.items import MultiModalItem, Patches


class ProcessorCache:
    """Items by content hash, up to `max_bytes` of patches; 0 disables caching. `on_lookup` is called for each lookup
    with True for a hit.
    """

    def __init__(self, max_bytes: int, on_lookup: Callable[[bool], None] = lambda found: None) -> None:
        self._max_bytes, self._on_lookup = max_bytes, on_lookup
        self._items: OrderedDict[bytes, MultiModalItem] = OrderedDict()
        self._made: dict[tuple[bytes, str], asyncio.Task[MultiModalItem]] = {}  # by name and source
        self._epoch = 0  # how often all was forgotten
        self.num_bytes = 0

    async def get(
        self, content_hash: bytes, make: Callable[[], Awaitable[MultiModalItem]], *, source: str = ""
    ) -> MultiModalItem:
        """Return the item of this name, computed by `make` on a miss; `source` distinguishes items if the name is not
        unique. Exceptions are raised in all callers that wait for the same source.
        """
        found = self._items.get(content_hash)
        self._on_lookup(found is not None)
        if found is not None:
            self._items.move_to_end(content_hash)
            return found
        if self._max_bytes == 0:
            return await make()
        key = content_hash, source
        task = self._made.get(key)
        if task is None:
            task = self._made[key] = asyncio.create_task(self._make(content_hash, make, self._epoch))
            task.add_done_callback(lambda ended: self._ended(key, ended))
        return await asyncio.shield(task)  # a cancelled caller does not cancel the computation for the others

    async def known(self, content_hash: bytes) -> MultiModalItem | None:
        """Return the item of this name, or the first one whose computation completes, or None if there is none. If all
        fail, raise one of their exceptions.
        """
        if content_hash in self._items:
            return await self.get(content_hash, _nothing)
        self._on_lookup(False)
        pending = {task for (name, _), task in self._made.items() if name == content_hash}
        failed: BaseException | None = None
        while pending:
            ended, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                failed = task.exception()
                if failed is None:
                    return task.result()
        if failed is not None:
            raise failed
        return None

    async def _make(
        self, content_hash: bytes, make: Callable[[], Awaitable[MultiModalItem]], epoch: int
    ) -> MultiModalItem:
        item = await make()
        if epoch == self._epoch:
            self._keep(content_hash, item)
        return item

    def _ended(self, key: tuple[bytes, str], task: asyncio.Task[MultiModalItem]) -> None:
        """It may have been forgotten meanwhile, and another be made."""
        if self._made.get(key) is task:
            del self._made[key]
        if not task.cancelled():
            task.exception()  # when no caller waits any more

    def _keep(self, content_hash: bytes, item: MultiModalItem) -> None:
        size = num_bytes(item.patches)
        if size > self._max_bytes or content_hash in self._items:
            return
        self._items[content_hash] = item
        self.num_bytes += size
        while self.num_bytes > self._max_bytes:
            _, dropped = self._items.popitem(last=False)
            self.num_bytes -= num_bytes(dropped.patches)

    def clear(self) -> None:
        """Remove all items and detach pending computations: current callers still get their items, later callers start
        new computations.
        """
        self._epoch += 1
        self._items.clear()
        self._made.clear()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._items)


async def _nothing() -> MultiModalItem:
    raise AssertionError("it is there")


def num_bytes(patches: Patches | None) -> int:
    """Return an item's size in a cache."""
    return 0 if patches is None else len(patches.values) + len(patches.meanings)

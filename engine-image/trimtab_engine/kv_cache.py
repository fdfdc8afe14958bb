"""The KV cache's memory: one reserved address range, of which the first blocks are in use. Which request owns which
block is the block manager's business.

CPU: one anonymous private mapping, reserved at the cap and never moved. A page becomes resident when it is first
written, and goes back to the kernel by madvise when its block is retired, so growing costs nothing and shrinking is
exact. CUDA: one allocation at the cap with a logical limit; mapping it page by page (cuMemMap) is not built yet.

```
range    | layer 0 keys: block 0 | 1 | 2 | … | cap | pad | layer 0 values: … | layer 1 keys: …
                       |-- num_blocks --|-- reserved --|
```
A region (one layer's keys, or values) starts on a page, so regions share none. A draft model's layers follow the
target's, under the same block ids: what happens to a block happens to both.
"""

import ctypes
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from trimtab_engine.parallel.wire_messages import CopyBlocks, KvChange, MapBlocks, UnmapAbove

MAP_NORESERVE = 0x4000  # <asm/mman.h>; the mmap module names it only in later Pythons
MADV_NOHUGEPAGE = 15  # likewise: a huge page would make blocks resident that nobody wrote


@dataclass(frozen=True, slots=True)
class KVLayers:
    """The layers of one model: how many, and one token's keys (and values) in each."""

    num_layers: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """Of one layer's keys, or values."""
        return self.num_kv_heads * self.head_size * self.dtype.itemsize


class KVTensors(Protocol):
    """What a model reads and writes: a whole KV cache, or one model's part of it."""

    @property
    def keys(self) -> list[torch.Tensor]: ...

    @property
    def values(self) -> list[torch.Tensor]: ...


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """One model's part of a KV cache, per layer [cap_blocks, block_size, num_kv_heads, head_size]."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]


class MemoryKind(Protocol):
    """Where a cache lies."""

    @property
    def kind(self) -> str:
        """cpu or cuda."""

    @property
    def torch(self) -> torch.device: ...


class _Host:
    kind = "cpu"
    torch = torch.device("cpu")


HOST: MemoryKind = _Host()
"""The machine's own memory, whatever the engine's device is."""


class KVCache:
    """Keys and values of all layers. `num_blocks` of `cap_blocks` may be used; addresses never change."""

    def __init__(
        self,
        *,
        num_layers: int,
        cap_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        device: MemoryKind,
        draft: KVLayers | None = None,
    ) -> None:
        if cap_blocks < 1:
            raise ValueError(f"cap_blocks is {cap_blocks}; a KV cache has 1 block or more")
        self.cap_blocks = cap_blocks
        self.block_size = block_size
        self.num_blocks = 0
        self.mirror: Callable[[KvChange], None] | None = None
        """Told of each change before it is made, so that other ranks make it too."""
        models = [KVLayers(num_layers, num_kv_heads, head_size, dtype), *([draft] if draft else [])]
        self._regions = _lay_out(models, cap_blocks, block_size)
        self._mapping: mmap.mmap | None = None
        total = self.reserved_bytes
        if device.kind == "cpu":
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
            self._mapping = mmap.mmap(-1, total, flags=flags)
            self._mapping.madvise(MADV_NOHUGEPAGE)
            whole = torch.frombuffer(self._mapping, dtype=torch.uint8)
        else:
            whole = torch.zeros(total, dtype=torch.uint8, device=device.torch)
        self._address = whole.data_ptr()
        tensors = [
            whole[r.start : r.start + cap_blocks * r.block_bytes]
            .view(r.layer.dtype)
            .view(cap_blocks, block_size, r.layer.num_kv_heads, r.layer.head_size)
            for r in self._regions
        ]
        self.keys = tensors[0::2]
        """Per layer, the target's and then the draft's: [cap_blocks, block_size, num_kv_heads, head_size]."""
        self.values = tensors[1::2]
        """Like keys."""
        self.draft = LayerTensors(self.keys[num_layers:], self.values[num_layers:])
        """The draft model's layers; none without one."""

    @property
    def bytes_per_block(self) -> int:
        """Of one block over all layers: keys and values."""
        return sum(region.block_bytes for region in self._regions)

    @property
    def reserved_bytes(self) -> int:
        """Size of the address range."""
        return self._regions[-1].end

    @property
    def mapped_bytes(self) -> int:
        """What the blocks that may be used take when all are written."""
        return self.num_blocks * self.bytes_per_block

    def map_blocks(self, num_blocks: int) -> None:
        """Let blocks [0, num_blocks) be used. Raises ValueError above the cap."""
        if not self.num_blocks <= num_blocks <= self.cap_blocks:
            raise ValueError(
                f"cannot map {num_blocks} blocks: {self.num_blocks} are mapped, the cap is {self.cap_blocks}"
            )
        if self.mirror is not None:
            self.mirror(MapBlocks(num_blocks))
        self.num_blocks = num_blocks

    def unmap_above(self, num_blocks: int) -> None:
        """Give blocks [num_blocks, cap) back; their content is lost. The caller has moved or retired them.

        A page that block num_blocks - 1 shares with the next stays.
        """
        if not 0 <= num_blocks <= self.num_blocks:
            raise ValueError(f"cannot unmap above block {num_blocks}: {self.num_blocks} are mapped")
        if self.mirror is not None:
            self.mirror(UnmapAbove(num_blocks))
        self.num_blocks = num_blocks
        if self._mapping is None:
            return
        for region in self._regions:
            first = region.start + _round_up(num_blocks * region.block_bytes, mmap.PAGESIZE)
            if first < region.end:
                self._mapping.madvise(mmap.MADV_DONTNEED, first, region.end - first)

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination) in every layer. No destination is also a source."""
        if not pairs:
            return
        if self.mirror is not None:
            self.mirror(CopyBlocks(pairs))
        device = self.keys[0].device
        sources = torch.tensor([source for source, _ in pairs], dtype=torch.int64, device=device)
        destinations = torch.tensor([destination for _, destination in pairs], dtype=torch.int64, device=device)
        for region in (*self.keys, *self.values):
            region.index_copy_(0, destinations, region.index_select(0, sources))

    def resident_bytes(self) -> int:
        """What is really in memory now, in whole pages. CUDA: the whole range."""
        if self._mapping is None:
            return self.reserved_bytes
        pages = (ctypes.c_ubyte * (self.reserved_bytes // mmap.PAGESIZE))()
        mincore = ctypes.CDLL(None, use_errno=True).mincore
        if mincore(ctypes.c_void_p(self._address), ctypes.c_size_t(self.reserved_bytes), pages) != 0:
            raise OSError(ctypes.get_errno(), "mincore failed on the KV cache's range")
        return int(torch.frombuffer(pages, dtype=torch.uint8).bitwise_and(1).sum().item()) * mmap.PAGESIZE


def copy_across(source: KVCache, destination: KVCache, pairs: list[tuple[int, int]]) -> None:
    """Copy whole blocks (of source, of destination) between two caches of one layout, over all layers."""
    if not pairs:
        return
    taken, given = zip(*pairs, strict=True)
    for ours, theirs in zip((*source.keys, *source.values), (*destination.keys, *destination.values), strict=True):
        blocks = ours.index_select(0, torch.tensor(taken, device=ours.device))
        theirs.index_copy_(0, torch.tensor(given, device=theirs.device), blocks.to(theirs.device))


@dataclass(frozen=True, slots=True)
class _Region:
    """One layer's keys, or values: bytes [start, end) of the range."""

    layer: KVLayers
    block_bytes: int
    start: int
    end: int


def _lay_out(models: list[KVLayers], cap_blocks: int, block_size: int) -> list[_Region]:
    """Regions in a row: keys and values of each layer of each model."""
    regions: list[_Region] = []
    end = 0
    for model in models:
        block_bytes = block_size * model.bytes_per_token
        size = _round_up(cap_blocks * block_bytes, mmap.PAGESIZE)
        for _ in range(2 * model.num_layers):
            regions.append(_Region(model, block_bytes, end, end + size))
            end += size
    return regions


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit

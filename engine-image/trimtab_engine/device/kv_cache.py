"""The KV cache's memory: one reserved address range, of which the first blocks are in use. Which request owns which
block is the block manager's business.

Addresses are reserved once and never move; memory comes and goes behind the blocks that may be used, on the CPU and,
with the driver's bindings, on CUDA (address_range.py, mapped_range.py).

```
range    | layer 0 keys: block 0 | 1 | 2 | … | reserved | pad | layer 0 values: … | layer 1 keys: …
                       |-- num_blocks --|---- cap ----|
```
Where values are part of the keys, as in latent vectors, a layer has the keys' region alone.
A region (one layer's keys, or values) starts on a page, so regions share none. A draft model's layers follow the
target's, under the same block ids: what happens to a block happens to both.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from trimtab_kernels.copy_blocks import copy_blocks
from trimtab_modelspec.kv_groups import KVGroup

from trimtab_engine.device.address_range import AddressRange, AddressSpace, HostMemory, round_up
from trimtab_engine.device.kv_commands import CopyBlocks, KvChange, MapBlocks, UnmapAbove

WORD_BYTES = 8
BUS_PROGRAMS = 64  # of a copy over the bus: 16 KiB each on their way are ten times what PCIe 5 holds in a round trip


@dataclass(frozen=True, slots=True)
class KVLayers:
    """The largest group of one model's layers, whose keys and values are equally large, or values part of the keys, and
    the dtype of both. Layers of its other groups lie in the same places: a block is one group's at a time."""

    group: KVGroup
    dtype: torch.dtype

    @property
    def regions_per_layer(self) -> int:
        """Keys and values lie apart, where there are both."""
        return 2 if self.group.each.value_size else 1

    @property
    def num_regions(self) -> int:
        """Layer by layer."""
        return self.regions_per_layer * self.group.num_layers

    @property
    def bytes_per_token(self) -> int:
        """One token in one region."""
        return self.group.num_elements * self.dtype.itemsize // self.num_regions


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


HOST: AddressSpace = HostMemory()
"""The machine's own memory, whatever the engine's device is."""


class KVCache:
    """Keys and values of as many layers as the largest group has. `num_blocks` of `cap_blocks` may be used; addresses
    never change.

    `reserved_num_blocks` is what the tensors have addresses for: the cap may be set lower once it is known (limit()).
    """

    def __init__(
        self,
        *,
        layers: KVLayers,
        cap_blocks: int,
        block_size: int,
        memory: AddressSpace,
        draft: KVLayers | None = None,
    ) -> None:
        if cap_blocks < 1:
            raise ValueError(f"cap_blocks is {cap_blocks}; a KV cache has 1 block or more")
        self.cap_blocks = cap_blocks
        self.reserved_num_blocks = cap_blocks
        self.block_size = block_size
        self.num_blocks = 0
        self.mirror: Callable[[KvChange], None] | None = None
        """Told of each change before it is made, so that other ranks make it too."""
        self.failures_elsewhere: Callable[[], list[str]] = list
        """Waits until all other ranks have mapped what they were told to, and says what kept some of them from it."""
        models = [layers, *([draft] if draft else [])]
        self._page = page = memory.page_bytes(sum(model.num_regions for model in models))
        self._regions = _lay_out(models, cap_blocks, block_size, page)
        self._range: AddressRange = memory.reserve([(r.start, r.end) for r in self._regions], page)
        whole = self._range.whole
        tensors = [
            whole[r.start : r.start + cap_blocks * r.block_bytes]
            .view(r.model.dtype)
            .view(cap_blocks, block_size, r.model.group.each.num_kv_heads, r.model.group.each.key_size)
            for r in self._regions
        ]
        layered = [
            (first, first + model.regions_per_layer - 1)
            for model, (begin, end) in zip(models, _runs(models), strict=True)
            for first in range(begin, end, model.regions_per_layer)
        ]
        self.keys = [tensors[keys] for keys, _ in layered]
        """Per layer, the target's and then the draft's: [cap_blocks, block_size, num_kv_heads, head_size]."""
        self.values = [tensors[values] for _, values in layered]
        """Like keys; the keys themselves, of which values are the first elements, where a layer has no others."""
        self.device = whole.device
        self.block_words = [_as_words(whole, self._regions[first:last]) for first, last in _runs(models)]
        """Per model: [regions, blocks, block_bytes // 8] int64, for moving blocks whatever their dtype."""
        self.draft = LayerTensors(*(part[layers.group.num_layers :] for part in (self.keys, self.values)))
        """The draft model's layers; none without one."""

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers: keys and values."""
        return sum(region.block_bytes for region in self._regions)

    @property
    def reserved_bytes(self) -> int:
        """Size of the address range."""
        return self._regions[-1].end

    @property
    def mapped_bytes(self) -> int:
        """What the blocks that may be used take when all are written."""
        return self.num_blocks * self.bytes_per_block

    @property
    def rounding_bytes(self) -> int:
        """What the last pages of all regions may take beyond mapped_bytes."""
        return self._page * len(self._regions) if self.releases_memory else 0

    @property
    def releases_memory(self) -> bool:
        """Whether memory comes and goes with the blocks; else num_blocks is a limit in the books only."""
        return self._range.is_live

    def limit(self, cap_blocks: int) -> None:
        """Lower the cap to what turned out to fit; the addresses stay reserved."""
        if not self.num_blocks <= cap_blocks <= self.reserved_num_blocks:
            raise ValueError(
                f"a cap of {cap_blocks} blocks is outside {self.num_blocks} mapped to {self.reserved_num_blocks} "
                f"reserved"
            )
        self.cap_blocks = cap_blocks

    def map_blocks(self, num_blocks: int) -> None:
        """Let blocks [0, num_blocks) be used, on every rank or on none. Raises ValueError above the cap; MemoryError,
        which names the ranks and with nothing changed on any, where a device has no such memory left."""
        if not self.num_blocks <= num_blocks <= self.cap_blocks:
            raise ValueError(
                f"cannot map {num_blocks} blocks: {self.num_blocks} are mapped, the cap is {self.cap_blocks}"
            )
        if self.mirror is not None:
            self.mirror(MapBlocks(num_blocks))
        before, failures = self.num_blocks, []
        try:
            self._keep(num_blocks)
        except MemoryError as error:
            failures.append(str(error))
        failures += self.failures_elsewhere()
        if failures:
            if self.mirror is not None:
                self.mirror(UnmapAbove(before))
            self._keep(before)
            raise MemoryError("; ".join(failures))

    def unmap_above(self, num_blocks: int) -> None:
        """Give blocks [num_blocks, cap) back; their content is lost. The caller has moved or retired them.

        A page that block num_blocks - 1 shares with the next stays.
        """
        if not 0 <= num_blocks <= self.num_blocks:
            raise ValueError(f"cannot unmap above block {num_blocks}: {self.num_blocks} are mapped")
        if self.mirror is not None:
            self.mirror(UnmapAbove(num_blocks))
        self._keep(num_blocks)

    def _keep(self, num_blocks: int) -> None:
        self._range.keep([num_blocks * region.block_bytes for region in self._regions])
        self.num_blocks = num_blocks

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination) in every layer. No destination is also a source."""
        if not pairs:
            return
        if self.mirror is not None:
            self.mirror(CopyBlocks(pairs))
        copy_across(self, self, pairs)

    def resident_bytes(self) -> int:
        """What is really in memory now, in whole pages. One allocation: all of it."""
        return self._range.resident_bytes()


def copy_across(source: KVCache, destination: KVCache, pairs: list[tuple[int, int]]) -> None:
    """Copy whole blocks (of source, of destination) between caches of one layout, over all layers. No destination is
    also a source.

    On CUDA it is ordered with the kernels of the current stream, before and after, and nobody waits here; a copy over
    the bus leaves most of the device to who computes beside it.
    """
    if not pairs:
        return
    on_cuda = [cache.device for cache in (source, destination) if cache.device.type == "cuda"]
    blocks = torch.tensor(pairs, dtype=torch.int64)
    if on_cuda:
        blocks = blocks.pin_memory().to(on_cuda[0], non_blocking=True)
    for ours, theirs in zip(source.block_words, destination.block_words, strict=True):
        copy_blocks(ours, theirs, blocks, max_ctas=None if source.device == destination.device else BUS_PROGRAMS)


@dataclass(frozen=True, slots=True)
class _Region:
    """One layer's keys, or values: bytes [start, end) of the range."""

    model: KVLayers
    block_bytes: int
    start: int
    used_end: int
    """Behind the last block; what follows is padding."""
    end: int


def _runs(models: list[KVLayers]) -> list[tuple[int, int]]:
    """Each model's regions [first, last): equally large, at equal distances."""
    ends = [sum(model.num_regions for model in models[: n + 1]) for n in range(len(models))]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _as_words(whole: torch.Tensor, regions: list[_Region]) -> torch.Tensor:
    """[regions, blocks, block_bytes // 8] int64. A block is a multiple of 8 bytes, since it has 8 tokens or more."""
    first, words = regions[0], regions[0].block_bytes // WORD_BYTES
    distance = (first.end - first.start) // WORD_BYTES
    blocks = (first.used_end - first.start) // first.block_bytes
    return whole.view(torch.int64).as_strided(
        (len(regions), blocks, words), (distance, words, 1), first.start // WORD_BYTES
    )


def _lay_out(models: list[KVLayers], cap_blocks: int, block_size: int, page: int) -> list[_Region]:
    """Regions in a row: keys and values of each layer of each model."""
    regions: list[_Region] = []
    end = 0
    for model in models:
        block_bytes = block_size * model.bytes_per_token
        used = cap_blocks * block_bytes
        size = round_up(used, page)
        for _ in range(model.num_regions):
            regions.append(_Region(model, block_bytes, end, end + used, end + size))
            end += size
    return regions

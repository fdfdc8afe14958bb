"""The KV cache's memory: one reserved address range whose first blocks are in use. The block manager assigns blocks.

Addresses are reserved once and never move; memory is mapped and unmapped for usable blocks on the CPU and,
with the driver's bindings, on CUDA (address_range.py, mapped_range.py).

```
range    | layer 0 keys: block 0 | 1 | 2 | … | reserved | pad | layer 0 values: … | layer 1 keys: …
                       |-- num_blocks --|---- cap ----|
```
If values are part of the keys, as in latent vectors, a layer has only the keys' region.
A region (one layer's keys, or values) starts on a page, so regions share none. A draft model's layers follow the
target's, under the same block ids: every block operation applies to both.
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
    """The largest KV group of one model, whose keys and values are equally large, or values are part of the keys, and
    the dtype of both. Layers of its other groups use the same memory: a block belongs to one group at a time.
    """

    group: KVGroup
    dtype: torch.dtype

    @property
    def regions_per_layer(self) -> int:
        """Number of regions per layer: 2 if keys and values are separate, else 1."""
        return 2 if self.group.each.value_size else 1

    @property
    def num_regions(self) -> int:
        """Layer by layer."""
        return self.regions_per_layer * self.group.num_layers

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in one region."""
        return self.group.num_elements * self.dtype.itemsize // self.num_regions


class KVTensors(Protocol):
    """Keys and values that a model reads and writes: a whole KV cache, or one model's part of it."""

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
"""The host's memory, independent of the engine's device."""


class KVCache:
    """Keys and values of as many layers as the largest group has. `num_blocks` of `cap_blocks` may be used; addresses
    never change. `reserved_num_blocks` is the number of blocks with addresses: the cap may be lowered later (limit()).
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
        """Waits until all other ranks have mapped their blocks, and returns their failures."""
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
        """Per model: [regions, blocks, block_bytes // 8] int64, for moving blocks of any dtype."""
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
        """Bytes of all usable blocks when written."""
        return self.num_blocks * self.bytes_per_block

    @property
    def rounding_bytes(self) -> int:
        """Bytes that the last pages of all regions may take beyond mapped_bytes."""
        return self._page * len(self._regions) if self.releases_memory else 0

    @property
    def releases_memory(self) -> bool:
        """True if memory is mapped and unmapped with the blocks. False if num_blocks is only a limit in bookkeeping."""
        return self._range.is_live

    def limit(self, cap_blocks: int) -> None:
        """Lower the cap to the available memory; the addresses stay reserved."""
        if not self.num_blocks <= cap_blocks <= self.reserved_num_blocks:
            raise ValueError(
                f"a cap of {cap_blocks} blocks is outside {self.num_blocks} mapped to {self.reserved_num_blocks} "
                f"reserved"
            )
        self.cap_blocks = cap_blocks

    def map_blocks(self, num_blocks: int) -> None:
        """Let blocks [0, num_blocks) be used, on every rank or on none. Raises ValueError above the cap; MemoryError,
        which names the ranks and with nothing changed on any, where a device has no such memory left.
        """
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
        """Return the bytes in memory now, in whole pages; all of it for a plain allocation."""
        return self._range.resident_bytes()


def copy_across(source: KVCache, destination: KVCache, pairs: list[tuple[int, int]]) -> None:
    """Copy whole blocks (of source, of destination) between caches of one layout, over all layers. No destination is
    also a source. On CUDA copies are ordered with the kernels of the current stream, without host waits; a copy over
    the bus leaves most of the device to concurrent work.
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
    """End of the last block; the rest is padding."""
    end: int


def _runs(models: list[KVLayers]) -> list[tuple[int, int]]:
    """Return each model's regions [first, last): equally large, at equal distances."""
    ends = [sum(model.num_regions for model in models[: n + 1]) for n in range(len(models))]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _as_words(whole: torch.Tensor, regions: list[_Region]) -> torch.Tensor:
    """Return [regions, blocks, block_bytes // 8] int64. A block is a multiple of 8 bytes, since it has 8 tokens or
    more.
    """
    first, words = regions[0], regions[0].block_bytes // WORD_BYTES
    distance = (first.end - first.start) // WORD_BYTES
    blocks = (first.used_end - first.start) // first.block_bytes
    return whole.view(torch.int64).as_strided(
        (len(regions), blocks, words), (distance, words, 1), first.start // WORD_BYTES
    )


def _lay_out(models: list[KVLayers], cap_blocks: int, block_size: int, page: int) -> list[_Region]:
    """Return consecutive regions: keys and values of each layer of each model."""
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

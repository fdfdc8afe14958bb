"""The KV cache's memory: one reserved address range, of which the first blocks are in use. Which request owns which
block is the block manager's business.

CPU: one anonymous private mapping, reserved at the cap and never moved. A page becomes resident when it is first
written, and goes back to the kernel by madvise when its block is retired, so growing costs nothing and shrinking is
exact. CUDA: one allocation at the cap with a logical limit; mapping it page by page (cuMemMap) is not built yet.

```
range    | layer 0 keys: block 0 | 1 | 2 | … | cap | pad | layer 0 values: … | layer 1 keys: …
                       |-- num_blocks --|-- reserved --|
```
A region (one layer's keys, or values) starts on a page, so regions share none.
"""

import ctypes
import mmap

import torch

from trimtab_engine.device import Device

MAP_NORESERVE = 0x4000  # <asm/mman.h>; the mmap module names it only in later Pythons
MADV_NOHUGEPAGE = 15  # likewise: a huge page would make blocks resident that nobody wrote


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
        device: Device,
    ) -> None:
        if cap_blocks < 1:
            raise ValueError(f"cap_blocks is {cap_blocks}; a KV cache has 1 block or more")
        self.num_layers = num_layers
        self.cap_blocks = cap_blocks
        self.block_size = block_size
        self.num_blocks = 0
        self.bytes_per_region_block = block_size * num_kv_heads * head_size * dtype.itemsize
        self._region_bytes = _round_up(cap_blocks * self.bytes_per_region_block, mmap.PAGESIZE)
        self._mapping: mmap.mmap | None = None
        shape = (cap_blocks, block_size, num_kv_heads, head_size)
        total = 2 * num_layers * self._region_bytes
        if device.kind == "cpu":
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
            self._mapping = mmap.mmap(-1, total, flags=flags)
            self._mapping.madvise(MADV_NOHUGEPAGE)
            whole = torch.frombuffer(self._mapping, dtype=torch.uint8)
        else:
            whole = torch.zeros(total, dtype=torch.uint8, device=device.torch)
        used = cap_blocks * self.bytes_per_region_block
        regions = [whole[start : start + used].view(dtype).view(shape) for start in range(0, total, self._region_bytes)]
        self._address = whole.data_ptr()
        self.keys = regions[0::2]
        """Per layer: [cap_blocks, block_size, num_kv_heads, head_size]."""
        self.values = regions[1::2]
        """Like keys."""

    @property
    def bytes_per_block(self) -> int:
        """Of one block over all layers: keys and values."""
        return 2 * self.num_layers * self.bytes_per_region_block

    @property
    def reserved_bytes(self) -> int:
        """Size of the address range."""
        return 2 * self.num_layers * self._region_bytes

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
        self.num_blocks = num_blocks

    def unmap_above(self, num_blocks: int) -> None:
        """Give blocks [num_blocks, cap) back; their content is lost. The caller has moved or retired them.

        A page that block num_blocks - 1 shares with the next stays.
        """
        if not 0 <= num_blocks <= self.num_blocks:
            raise ValueError(f"cannot unmap above block {num_blocks}: {self.num_blocks} are mapped")
        self.num_blocks = num_blocks
        if self._mapping is None:
            return
        kept = _round_up(num_blocks * self.bytes_per_region_block, mmap.PAGESIZE)
        if kept == self._region_bytes:
            return
        for region in range(0, self.reserved_bytes, self._region_bytes):
            self._mapping.madvise(mmap.MADV_DONTNEED, region + kept, self._region_bytes - kept)

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination) in every layer. No destination is also a source."""
        if not pairs:
            return
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


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit

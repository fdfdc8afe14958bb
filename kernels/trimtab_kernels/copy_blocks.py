"""Copy of whole KV blocks: within a cache (copy on write), to or from the host (swap), between caches (migration).

source, destination  [num_regions, num_blocks, block_elements]  any dtype, the same in both; blocks are contiguous,
                     regions may have any stride (one layer's keys, or its values, is a region)
pairs                [num_pairs, 2] int64: (block of the source, block of the destination)

No destination block is also a source block, so CTAs may run in any order.
On CUDA, either side may be pinned host memory, which the device accesses over the bus: `max_ctas` then keeps a copy
from occupying multiprocessors that compute meanwhile.
Memory-bound: 2 * num_pairs * num_regions * block bytes. Source: own.
"""

import torch

from trimtab_kernels.launch.jit import cdiv, kernel, next_power_of_2, tl

CHUNK_ELEMENTS = 4096
"""32-bit words that one CTA moves: 16 KiB, 8 vector loads of 16 B for each of 128 threads."""


def copy_blocks_reference(source: torch.Tensor, destination: torch.Tensor, pairs: torch.Tensor) -> None:
    """Copy one pair at a time."""
    for from_block, to_block in pairs.tolist():
        destination[:, to_block] = source[:, from_block]


def copy_blocks_cpu(source: torch.Tensor, destination: torch.Tensor, pairs: torch.Tensor) -> None:
    """Copy with one indexed copy per region, so that the temporary copy stays small."""
    for region in range(source.shape[0]):
        destination[region].index_copy_(0, pairs[:, 1], source[region].index_select(0, pairs[:, 0]))


@kernel("num_items")
def _copy_blocks(
    source: tl.tensor,
    destination: tl.tensor,
    pairs: tl.tensor,
    source_region_stride: tl.tensor,
    source_block_stride: tl.tensor,
    destination_region_stride: tl.tensor,
    destination_block_stride: tl.tensor,
    num_words: tl.tensor,
    num_regions: tl.tensor,
    num_chunks: tl.tensor,
    num_items: tl.tensor,
    CHUNK: tl.constexpr,
) -> None:
    """Each CTA processes every num_ctas-th item; an item is one chunk of one region of one pair, chunks first."""
    for item in tl.range(tl.program_id(0), num_items, tl.num_programs(0)):
        region = ((item // num_chunks) % num_regions).to(tl.int64)
        pair = (item // num_chunks // num_regions).to(tl.int64)
        from_block = tl.load(pairs + 2 * pair)
        to_block = tl.load(pairs + 2 * pair + 1)
        offsets = (item % num_chunks) * CHUNK + tl.arange(0, CHUNK)
        inside = offsets < num_words
        read = source + region * source_region_stride + from_block * source_block_stride
        write = destination + region * destination_region_stride + to_block * destination_block_stride
        tl.store(write + offsets, tl.load(read + offsets, mask=inside), mask=inside)


def copy_blocks_triton(
    source: torch.Tensor, destination: torch.Tensor, pairs: torch.Tensor, max_ctas: int | None = None
) -> None:
    """Launch the kernel. Shapes must have been checked. Blocks are moved as 32-bit words, independent of the dtype."""
    if pairs.shape[0] == 0:
        return
    source, destination = source.view(torch.int32), destination.view(torch.int32)
    num_regions, _, num_words = source.shape
    chunk = min(CHUNK_ELEMENTS, next_power_of_2(num_words))
    num_chunks = cdiv(num_words, chunk)
    num_items = pairs.shape[0] * num_regions * num_chunks
    _copy_blocks[(min(num_items, max_ctas or num_items),)](
        source,
        destination,
        pairs,
        source.stride(0),
        source.stride(1),
        destination.stride(0),
        destination.stride(1),
        num_words,
        num_regions,
        num_chunks,
        num_items,
        CHUNK=chunk,
        num_warps=4,
    )


def copy_blocks(
    source: torch.Tensor, destination: torch.Tensor, pairs: torch.Tensor, *, max_ctas: int | None = None
) -> None:
    """Copy each pair's block in every region.

    Raises:
        ValueError: shapes or dtypes do not match.
    """
    same = source.shape[0] == destination.shape[0] and source.shape[2:] == destination.shape[2:]
    if source.dim() != 3 or not same or source.dtype != destination.dtype or pairs.shape[1:] != (2,):
        raise ValueError(
            f"copy_blocks: source {list(source.shape)} {source.dtype}, destination {list(destination.shape)} "
            f"{destination.dtype}, pairs {list(pairs.shape)}; regions and blocks must be alike, pairs [num_pairs, 2]"
        )
    if pairs.is_cuda:
        copy_blocks_triton(source, destination, pairs, max_ctas)
    else:
        copy_blocks_cpu(source, destination, pairs)

"""Sort of (token, choice) slots by expert, padded to whole tiles per expert, so that each tile has one expert.

experts        [num_slots] int32: slot = token * top_k + place; -1 is left out
sorted_slots   [max_padded] int32: slots by expert, in their order; padding is num_slots
tile_experts   [max_padded // block_m] int32: the expert of each tile
num_padded     [1] int32: number of entries in use

```
sorted_slots | expert 0: 3 7 8 . | expert 2: 0 1 2 4 | expert 2: 5 . . . |      block_m = 4, "." = num_slots
```
The place of a slot is a sum of counts instead of an atomic's result: equal inputs give equal outputs. Slots are counted
in chunks of 128; one CTA adds the chunks up. Latency-bound. Source: own.
"""

from dataclasses import dataclass

import torch

from trimtab_kernels.launch.jit import cdiv, kernel, next_power_of_2, tl

CHUNK = 128
"""Slots that are ranked against one another at once: 128 x 128 comparisons."""
CHUNKS_AT_ONCE = 32
TILES_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Alignment:
    """Sorted slots; see the module. max_tiles bounds the tiles in use, whose number only the device knows."""

    sorted_slots: torch.Tensor
    tile_experts: torch.Tensor
    num_padded: torch.Tensor
    max_tiles: int


def align_reference(experts: torch.Tensor, num_experts: int, block_m: int) -> tuple[list[int], list[int]]:
    """Return (sorted_slots in use, tile_experts in use)."""
    flat = experts.flatten().tolist()
    slots: list[int] = []
    tiles: list[int] = []
    for expert in range(num_experts):
        own = [slot for slot, e in enumerate(flat) if e == expert]
        own += [len(flat)] * (-len(own) % block_m)
        slots += own
        tiles += [expert] * (len(own) // block_m)
    return slots, tiles


@kernel("num_slots")
def _count(experts: tl.tensor, counts: tl.tensor, num_slots: tl.tensor, BINS: tl.constexpr, SIZE: tl.constexpr) -> None:
    """Count [chunk, expert]. Omitted slots and those beyond the end are counted in the last bin."""
    chunk = tl.program_id(0)
    slots = chunk * SIZE + tl.arange(0, SIZE)
    expert = tl.load(experts + slots, mask=slots < num_slots, other=-1)
    expert = tl.where(expert < 0, BINS - 1, expert)
    tl.store(counts + chunk * BINS + tl.arange(0, BINS), tl.histogram(expert, BINS))


@kernel("num_chunks", "num_tiles")
def _offsets(
    counts: tl.tensor,
    starts: tl.tensor,
    tile_experts: tl.tensor,
    num_padded: tl.tensor,
    num_chunks: tl.tensor,
    num_tiles: tl.tensor,
    BINS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNKS: tl.constexpr,
    TILES: tl.constexpr,
) -> None:
    """One CTA: starts[chunk, expert] is the place of the chunk's first slot of an expert."""
    bins = tl.arange(0, BINS)
    total = tl.zeros([BINS], dtype=tl.int32)
    for first in tl.range(0, num_chunks, CHUNKS):
        chunks = first + tl.arange(0, CHUNKS)
        here = tl.load(counts + chunks[:, None] * BINS + bins[None, :], mask=(chunks < num_chunks)[:, None], other=0)
        total += tl.sum(here, 0)
    padded = tl.where(bins < BINS - 1, (total + BLOCK_M - 1) // BLOCK_M * BLOCK_M, 0)
    ends = tl.cumsum(padded, 0)
    before = ends - padded
    tl.store(num_padded, tl.sum(padded, 0))
    for first in tl.range(0, num_chunks, CHUNKS):
        chunks = first + tl.arange(0, CHUNKS)
        inside = (chunks < num_chunks)[:, None]
        here = tl.load(counts + chunks[:, None] * BINS + bins[None, :], mask=inside, other=0)
        start = before[None, :] + tl.cumsum(here, 0) - here
        tl.store(starts + chunks[:, None] * BINS + bins[None, :], start, mask=inside)
        before += tl.sum(here, 0)
    for first in tl.range(0, num_tiles, TILES):
        tiles = first + tl.arange(0, TILES)
        # A tile's expert is the number of experts that end at or before it.
        expert = tl.sum((ends[None, :] <= tiles[:, None] * BLOCK_M).to(tl.int32), 1)
        tl.store(tile_experts + tiles, tl.minimum(expert, BINS - 1), mask=tiles < num_tiles)


@kernel("num_slots")
def _place(
    experts: tl.tensor,
    starts: tl.tensor,
    sorted_slots: tl.tensor,
    num_slots: tl.tensor,
    BINS: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """Place a slot after the earlier ones of its chunk with the same expert."""
    chunk = tl.program_id(0)
    places = tl.arange(0, SIZE)
    slots = chunk * SIZE + places
    expert = tl.load(experts + slots, mask=slots < num_slots, other=-1)
    # The chunk's experts again, as columns: loading them is cheaper than a change of layout.
    others = tl.load(
        experts + chunk * SIZE + places[None, :], mask=chunk * SIZE + places[None, :] < num_slots, other=-1
    )
    is_earlier = (others == expert[:, None]) & (places[None, :] < places[:, None])
    rank = tl.sum(is_earlier.to(tl.int32), 1)
    is_kept = expert >= 0
    start = tl.load(starts + chunk * BINS + expert, mask=is_kept, other=0)
    tl.store(sorted_slots + start + rank, slots, mask=is_kept)


def align_triton(experts: torch.Tensor, num_experts: int, block_m: int) -> Alignment:
    """Launch the three small kernels, without a synchronisation with the host."""
    num_slots, device = experts.numel(), experts.device
    bins = next_power_of_2(num_experts + 1)
    chunks = cdiv(num_slots, CHUNK)
    # No expert pads more than block_m - 1 slots, and experts without slots are not padded.
    max_tiles = min(num_slots, cdiv(num_slots + num_experts * (block_m - 1), block_m))
    counts = torch.empty(chunks, bins, dtype=torch.int32, device=device)
    starts = torch.empty(chunks, bins, dtype=torch.int32, device=device)
    sorted_slots = torch.full((max_tiles * block_m,), num_slots, dtype=torch.int32, device=device)
    tile_experts = torch.empty(max_tiles, dtype=torch.int32, device=device)
    num_padded = torch.empty(1, dtype=torch.int32, device=device)
    _count[(chunks,)](experts, counts, num_slots, BINS=bins, SIZE=CHUNK, num_warps=4)
    _offsets[(1,)](
        counts,
        starts,
        tile_experts,
        num_padded,
        chunks,
        max_tiles,
        BINS=bins,
        BLOCK_M=block_m,
        CHUNKS=CHUNKS_AT_ONCE,
        TILES=TILES_AT_ONCE,
        num_warps=8,
    )
    _place[(chunks,)](experts, starts, sorted_slots, num_slots, BINS=bins, SIZE=CHUNK, num_warps=4)
    return Alignment(sorted_slots, tile_experts, num_padded, max_tiles)

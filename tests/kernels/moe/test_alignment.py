"""Slots sorted by expert into whole tiles, in a fixed order."""

import pytest
import torch
from trimtab_kernels.moe.alignment import align_reference, align_triton


@pytest.mark.parametrize(
    ("num_slots", "num_experts", "block_m"), [(1, 1, 16), (40, 6, 16), (300, 3, 64), (700, 60, 16)]
)
def test_align_matches_reference(num_slots: int, num_experts: int, block_m: int) -> None:
    generator = torch.Generator().manual_seed(num_slots)
    experts = torch.randint(-1, num_experts, (num_slots,), generator=generator, dtype=torch.int32)
    slots, tiles = align_reference(experts, num_experts, block_m)
    ours = align_triton(experts, num_experts, block_m)
    used = int(ours.num_padded)
    assert used == len(slots)
    assert ours.sorted_slots[:used].tolist() == slots
    assert ours.tile_experts[: used // block_m].tolist() == tiles
    assert used // block_m <= ours.max_tiles
    assert bool((ours.sorted_slots[used:] == num_slots).all())


def test_align_keeps_no_slot_if_all_experts_are_remote() -> None:
    assert int(align_triton(torch.full((5,), -1, dtype=torch.int32), 4, 16).num_padded) == 0

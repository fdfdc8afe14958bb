"""A step's images go to the ranks that have least to do; what a device makes of their bytes is what the host does."""

import pytest
import torch
from seeing_model import an_item
from trimtab_engine.multimodal.patches import as_float32
from trimtab_engine.runner.item_encoder import looked_up, shares


@pytest.mark.parametrize(
    ("costs", "num_ranks", "owners"),
    [
        ([], 2, []),
        ([4, 4], 2, [0, 1]),
        ([1, 9, 4, 4], 2, [1, 0, 1, 1]),  # 9 alone, the others together
        ([2, 3, 5], 4, [2, 1, 0]),  # one rank has nothing
        ([7, 7, 7], 1, [0, 0, 0]),
    ],
)
def test_the_costliest_come_first_each_to_the_rank_with_least(
    costs: list[int], num_ranks: int, owners: list[int]
) -> None:
    assert shares(costs, num_ranks) == owners


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_device_looks_up_is_what_the_host_computes(dtype: torch.dtype) -> None:
    patches = an_item((1, 4, 6)).patches
    assert patches is not None
    made = looked_up(patches, torch.device("cpu"), dtype)
    assert torch.equal(made, torch.from_numpy(as_float32(patches)).to(dtype))

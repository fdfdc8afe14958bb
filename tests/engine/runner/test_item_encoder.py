"""A step's images go to the ranks that have least to do."""

import pytest
from trimtab_engine.runner.item_encoder import shares


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

"""Expert balancing: golden cases, and invariants of placements and moves."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trimtab_engine.parallel.expert_balance import (
    Placement,
    balancedness,
    first_placement,
    moves,
    pack,
    rank_loads,
    rebalance,
    replicate,
)


def test_the_first_placement_is_in_order_and_begins_again() -> None:
    assert first_placement(6, 2) == (0, 1, 2, 3, 4, 5, 0, 1)
    assert first_placement(2, 3) == (0, 1, 0, 1, 0)


@pytest.mark.parametrize(
    ("loads", "num_slots", "copies"),
    [
        ([90, 10, 10], 5, [3, 1, 1]),  # 90, then 45, are the heaviest copies
        ([10, 10, 10], 5, [2, 2, 1]),  # equals: the first ones
        ([40, 30, 21], 6, [2, 2, 2]),  # 40, then 30, then 21
        ([0, 0], 3, [2, 1]),
    ],
)
def test_spare_slots_go_where_a_copy_has_most_to_do(loads: list[int], num_slots: int, copies: list[int]) -> None:
    assert replicate(loads, num_slots) == copies


def test_the_heaviest_copies_are_packed_first_each_onto_the_least_loaded_rank() -> None:
    assert pack([8, 7, 6, 5], [1, 1, 1, 1], 2) == [[0, 3], [1, 2]]
    assert pack([90, 10, 10, 10], [3, 1, 1, 1], 3) == [[0, 1], [0, 2], [0, 3]]


def test_hot_experts_of_one_rank_are_spread() -> None:
    loads = [60, 60, 60, 0, 0, 0]
    before = first_placement(6, 2)
    after = rebalance(loads, before, 2)
    assert rank_loads(loads, before, 2) == [120.0, 60.0]  # 0 and 1 have a second copy on rank 1 already
    assert rank_loads(loads, after, 2) == [90.0, 90.0]
    assert balancedness([rank_loads(loads, before, 2)]) == 0.75


def test_balanced_placement_is_kept() -> None:
    assert rebalance([5, 5, 5, 5], (3, 1, 0, 2), 2) == (3, 1, 0, 2)
    assert rebalance([0, 0, 0, 0], (3, 1, 0, 2), 2) == (3, 1, 0, 2)


def test_balancedness_is_mean_over_maximum_and_nothing_without_load() -> None:
    assert balancedness([[1.0, 3.0], [4.0, 4.0]]) == pytest.approx(6 / 7)
    assert balancedness([[0.0, 0.0]]) is None


def test_experts_that_stay_on_their_rank_stay_in_their_slot() -> None:
    after = rebalance([100, 100, 1, 1], (0, 1, 2, 3), 2)
    assert len(moves((0, 1, 2, 3), after, 2)) == 2, "one hot expert for a cold one"


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[int], Placement, int]:
    """(loads, a placement that an earlier balancing has led to, ranks)."""
    num_ranks = draw(st.integers(1, 8))
    each = draw(st.integers(1, 6))
    num_slots = num_ranks * each
    num_experts = draw(st.integers(1, num_slots))
    counts = st.lists(st.integers(0, 1000), min_size=num_experts, max_size=num_experts)
    present = first_placement(num_experts, num_slots - num_experts)
    if draw(st.booleans()):
        present = rebalance(draw(counts), present, num_ranks)
    return draw(counts), present, num_ranks


@given(situations())
def test_placement_is_complete_and_never_worse(
    situation: tuple[list[int], Placement, int],
) -> None:
    loads, present, num_ranks = situation
    after = rebalance(loads, present, num_ranks)
    assert len(after) == len(present)
    assert set(after) == set(range(len(loads)))
    linear = first_placement(len(loads), len(present) - len(loads))
    best = max(rank_loads(loads, after, num_ranks))
    assert best <= max(rank_loads(loads, present, num_ranks))
    assert best <= max(rank_loads(loads, linear, num_ranks))
    assert sum(rank_loads(loads, after, num_ranks)) == pytest.approx(sum(loads))
    assert after == rebalance(loads, present, num_ranks), "every rank finds the same"


@given(situations())
def test_moves_transform_old_placement_into_new(
    situation: tuple[list[int], Placement, int],
) -> None:
    loads, present, num_ranks = situation
    after = rebalance(loads, present, num_ranks)
    each = len(present) // num_ranks
    weights = list(present)
    made = moves(present, after, num_ranks)
    for move in made:
        weights[move.target] = present[move.source]
        held = present[move.target // each * each :][:each]
        assert (move.source // each == move.target // each) == (after[move.target] in held), "near by where it can"
    assert tuple(weights) == after
    assert max(Counter(move.target for move in made).values(), default=1) == 1

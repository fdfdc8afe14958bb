"""Block manager: unique owners, low ids first, and shrinking by moving top blocks to free ones below."""

import hashlib

import engine_builders
import pytest
from trimtab_engine.errors import IntegrityError
from trimtab_engine.scheduling.block_manager import BlockManager, InsufficientBlocks, ShrinkPlan
from trimtab_engine.scheduling.request import Request

BLOCK_SIZE = 4


def a_manager(blocks: int = 8, cap: int = 16) -> BlockManager:
    return BlockManager(blocks, cap, BLOCK_SIZE)


def a_request(request_id: str = "a", blocks: list[int] | None = None) -> Request:
    request = engine_builders.a_request(hashlib.sha512(request_id.encode()).digest(), request_id=request_id)
    request.block_tables[0] = blocks or []
    request.num_blocks = len(request.block_tables[0])
    return request


def hold(manager: BlockManager, request: Request, tokens: int) -> bool:
    """Allocate and count the tokens as computed, as the scheduler does."""
    allocated = manager.allocate(request, tokens)
    if allocated:
        request.num_computed_tokens = tokens
    return allocated


@pytest.mark.parametrize(
    ("tokens", "blocks"),
    [
        (1, 1),
        (4, 1),  # a full block needs no second one
        (5, 2),
        (32, 8),  # all there are
    ],
)
def test_a_table_is_as_long_as_its_tokens_need(tokens: int, blocks: int) -> None:
    manager, request = a_manager(), a_request()
    assert hold(manager, request, tokens)
    assert len(request.block_tables[0]) == blocks
    assert (manager.num_used, manager.num_free, manager.num_total) == (blocks, 8 - blocks, 8)
    manager.check_integrity([request])


def test_allocation_is_all_or_nothing() -> None:
    manager, first, second = a_manager(), a_request("first"), a_request("second")
    assert hold(manager, first, 24)
    assert not manager.can_allocate(9)
    assert not hold(manager, second, 9)
    assert second.block_tables[0] == []
    assert manager.num_free == 2
    assert manager.can_allocate(8)
    manager.check_integrity([first, second])


def test_a_table_grows_where_it_ends() -> None:
    manager, request = a_manager(), a_request()
    manager.allocate(request, 5)
    before = list(request.block_tables[0])
    manager.allocate(request, 8)
    assert request.block_tables[0] == before
    manager.allocate(request, 17)
    assert request.block_tables[0][:2] == before
    assert len(request.block_tables[0]) == 5


def test_low_ids_are_handed_out_first_and_again_after_they_were_freed() -> None:
    manager, first, second = a_manager(), a_request("first"), a_request("second")
    manager.allocate(first, 8)
    manager.allocate(second, 8)
    assert (first.block_tables[0], second.block_tables[0]) == ([0, 1], [2, 3])
    manager.free(first)
    third = a_request("third")
    manager.allocate(third, 12)
    assert third.block_tables[0] == [0, 1, 4]


def test_free_empties_the_table_and_may_be_repeated() -> None:
    manager, request = a_manager(), a_request()
    manager.allocate(request, 20)
    manager.free(request)
    manager.free(request)
    assert request.block_tables[0] == []
    assert manager.num_free == 8
    manager.check_integrity([request])


def test_grown_blocks_are_used_after_all_others() -> None:
    manager, request = a_manager(2, 4), a_request()
    manager.grow(4)
    hold(manager, request, 16)
    assert request.block_tables[0] == [0, 1, 2, 3]
    assert manager.num_total == 4
    manager.check_integrity([request])


@pytest.mark.parametrize("blocks", [1, 5])
def test_growing_stays_between_the_present_size_and_the_cap(blocks: int) -> None:
    with pytest.raises(ValueError, match="cannot grow from 2"):
        a_manager(2, 4).grow(blocks)


@pytest.mark.parametrize("blocks", [0, 9])
def test_shrinking_stays_between_one_block_and_the_present_size(blocks: int) -> None:
    with pytest.raises(ValueError, match="cannot shrink from 8"):
        a_manager(8).plan_shrink(blocks, [])


@pytest.mark.parametrize(("blocks", "cap", "block_size"), [(0, 4, 4), (5, 4, 4), (4, 4, 0)])
def test_impossible_sizes_are_refused(blocks: int, cap: int, block_size: int) -> None:
    with pytest.raises(ValueError, match="it must be"):
        BlockManager(blocks, cap, block_size)


def test_shrink_above_used_blocks_moves_nothing() -> None:
    manager, request = a_manager(), a_request()
    hold(manager, request, 8)
    plan = manager.plan_shrink(2, [request])
    assert plan == ShrinkPlan(2, ())
    manager.apply_shrink(plan, [request])
    assert request.block_tables[0] == [0, 1]
    assert (manager.num_total, manager.num_free) == (2, 0)
    manager.check_integrity([request])


def test_a_shrink_moves_used_blocks_from_the_top_to_free_places_below() -> None:
    manager, low, high = a_manager(), a_request("low"), a_request("high")
    hold(manager, low, 16)
    hold(manager, high, 12)
    assert high.block_tables[0] == [4, 5, 6]
    manager.free(low)
    low.num_computed_tokens = 0
    plan = manager.plan_shrink(5, [high])
    assert plan == ShrinkPlan(5, ((5, 0), (6, 1)))
    assert high.block_tables[0] == [4, 5, 6]  # a plan changes nothing
    manager.apply_shrink(plan, [high])
    assert high.block_tables[0] == [4, 0, 1]
    assert (manager.num_total, manager.num_free) == (5, 2)
    manager.check_integrity([low, high])
    hold(manager, low, 8)
    assert low.block_tables[0] == [2, 3]


def test_shrink_below_used_blocks_reports_missing_blocks() -> None:
    manager, request = a_manager(), a_request()
    hold(manager, request, 20)
    assert manager.plan_shrink(3, [request]) == InsufficientBlocks(2)


@pytest.mark.parametrize(
    ("tables", "computed", "message"),
    [
        ([[0], [0]], 4, "block 0 belongs to request r0 and to request r1, which do not begin alike"),
        ([[9]], 4, "block 9 of request r0 is outside the 8 blocks"),
        ([[0]], 5, "request r0 has 1 blocks, but its 5 computed tokens need 2"),
        ([[0, 1]], 4, "request r0 has 2 blocks, but its 4 computed tokens need 1"),
        ([[0]], 4, "1 of 8 blocks have no owner, first of them 1"),
    ],
)
def test_a_broken_invariant_is_named(tables: list[list[int]], computed: int, message: str) -> None:
    manager = a_manager()
    manager.allocate(a_request("hidden"), 8)  # blocks 0 and 1 leave the free list
    requests = [a_request(f"r{index}", table) for index, table in enumerate(tables)]
    for request in requests:
        request.num_computed_tokens = computed
    with pytest.raises(IntegrityError, match=message):
        manager.check_integrity(requests)


def test_a_block_that_is_free_and_used_is_named() -> None:
    with pytest.raises(IntegrityError, match="block 3 belongs to request a, and is free"):
        a_manager().check_integrity([a_request("a", [3])])

"""Block tables per KV group: freeing outside windows, and cached prefixes common to all groups."""

from trimtab_engine.scheduling.block_manager import BlockManager, ShrinkPlan
from trimtab_engine.scheduling.request import Request
from trimtab_engine.scheduling.sampling import Sampling
from trimtab_engine.scheduling.swap_space import SwapSpace
from trimtab_modelspec.attention_window import FULL_ATTENTION, AttentionWindow

BLOCK_SIZE = 4
WINDOW = AttentionWindow(6)


def a_manager(
    blocks: int = 32, *attention_windows: AttentionWindow, host_blocks: int = 0, step: int | None = None
) -> BlockManager:
    """Return a manager with a full-attention group and a group with a window of 6."""
    swap_space = SwapSpace(host_blocks, host_blocks)
    groups = attention_windows or (FULL_ATTENTION, WINDOW)
    return BlockManager(blocks, blocks, BLOCK_SIZE, swap_space, attention_windows=groups, max_num_batched_tokens=step)


def a_request(manager: BlockManager, request_id: str = "a", num_tokens: int = 24) -> Request:
    request = Request.of(request_id, list(range(num_tokens)), Sampling(), arrival_time=0.0)
    request.block_tables, request.num_out_of_window = manager.new_tables(), [0] * len(manager.attention_windows)
    return request


def compute(manager: BlockManager, request: Request, *ends: int) -> None:
    """Steps that end at these tokens, as the scheduler makes room for them."""
    for end in ends:
        manager.free_out_of_window(request, request.num_computed_tokens)
        assert manager.allocate(request, end)
        manager.cache_blocks(request, end)
        request.num_computed_tokens = end


def forget(manager: BlockManager, block: int) -> None:
    """Remove the block from the prefix cache."""
    holder = a_request(manager)
    holder.block_tables = [[block], []]
    manager.invalidate_blocks(holder)


def test_each_group_allocates_needed_block() -> None:
    manager = a_manager()
    request = a_request(manager)
    compute(manager, request, 6)
    assert request.block_tables == [[0, 1], [2, 3]]
    manager.check_integrity([request])


def test_allocation_is_all_or_nothing_over_groups() -> None:
    manager = a_manager(5)
    request = a_request(manager)
    assert not manager.allocate(request, 9)  # three blocks in each
    assert (request.block_tables, manager.num_free) == ([[], []], 5)


def test_a_window_lets_go_of_blocks_that_no_later_token_sees() -> None:
    manager = a_manager()
    request = a_request(manager)
    compute(manager, request, 12, 13)
    # The token at 12 sees from 7 on, so block 1 stays.
    assert (request.num_out_of_window, [len(table) for table in request.block_tables]) == ([0, 1], [4, 3])
    compute(manager, request, 21)
    assert request.num_out_of_window == [0, 2]
    manager.check_integrity([request])
    manager.free(request)
    assert (request.block_tables, request.num_out_of_window, manager.num_used) == ([[], []], [0, 0], 0)


def test_blocks_freed_by_window_serve_any_group() -> None:
    manager = a_manager(7)
    request = a_request(manager)
    compute(manager, request, 12)
    assert (manager.num_free, manager.blocks_for(16)) == (1, 8)
    compute(manager, request, 16)  # the window freed one block, and two are needed
    assert manager.num_free == 0


def test_window_blocks_cover_one_step() -> None:
    """40 tokens take 10 blocks with full attention; steps of 4 tokens read and write 9, which may touch 3 blocks."""
    assert a_manager(step=4).blocks_for(40) == 10 + 3
    assert a_manager(step=None).blocks_for(40) == 10 + 10
    assert a_manager(step=4).blocks_for(40, 2) == 11 + 6  # two requests: one more block may be begun
    assert a_manager(32, WINDOW, step=4).blocks_for(5) == 2


def test_cached_prefix_needs_window_blocks_of_all_groups() -> None:
    manager = a_manager()
    first, second = a_request(manager, "first"), a_request(manager, "second")
    compute(manager, first, 21)
    found = manager.find_cached(second)
    assert (found.num_blocks, found.num_out_of_window) == (5, [0, 3])
    assert [len(keys) for keys in found.keys] == [5, 2]
    manager.share(second, found)
    second.num_computed_tokens = 20
    manager.check_integrity([first, second])
    assert manager.num_shared_tokens(second) == 20


def test_a_beginning_is_cut_to_where_the_window_has_its_last_blocks() -> None:
    """Without the window's block of tokens 16 to 19 no request can continue after 20 or 24 tokens, only after 16."""
    manager = a_manager()
    first, second = a_request(manager, "first"), a_request(manager, "second", 40)
    compute(manager, first, 24)
    forget(manager, first.block_tables[1][4])
    assert manager.find_cached(second).num_blocks == 4
    forget(manager, first.block_tables[0][1])
    assert manager.find_cached(second).num_blocks == 1


def test_cached_prefix_skips_blocks_outside_window() -> None:
    manager = a_manager()
    first, second = a_request(manager, "first"), a_request(manager, "second")
    compute(manager, first, 24)
    forget(manager, first.block_tables[1][0])
    assert manager.find_cached(second).num_blocks == 5


def test_two_windows_find_common_prefix() -> None:
    manager = a_manager(64, AttentionWindow(4), FULL_ATTENTION, AttentionWindow(9))
    first, second = a_request(manager, "first", 33), a_request(manager, "second", 33)
    compute(manager, first, 32)
    forget(manager, first.block_tables[0][7])  # not after 32 tokens
    forget(manager, first.block_tables[2][5])  # nor after 24 or 28, where the wider one sees tokens 20 to 23
    assert manager.find_cached(second).num_blocks == 5


def test_a_group_finds_no_block_of_another() -> None:
    """Both see all: equal tokens, but other layers."""
    manager = a_manager(32, FULL_ATTENTION, FULL_ATTENTION)
    first, second = a_request(manager, "first"), a_request(manager, "second")
    compute(manager, first, 21)
    found = manager.find_cached(second)
    assert found.blocks == [block for table in first.block_tables for block in table[:5]]
    assert not set(found.keys[0]) & set(found.keys[1])


def test_swap_in_restores_only_window_blocks() -> None:
    """A block restored and freed in the same step could be reallocated before the copy into it."""
    manager = a_manager(host_blocks=16)
    request = a_request(manager)
    compute(manager, request, 12, 21)
    manager.reset_cache()
    out = manager.swap_out(request)
    assert out is not None
    assert len(out) == 6 + 5
    assert (manager.num_used, request.num_out_of_window) == (0, [0, 1])
    manager.check_integrity([request])
    back = manager.swap_in(request)
    assert [host for host, _ in back] == [host for _, host in (*out[:6], *out[-2:])]
    assert ([len(table) for table in request.block_tables], request.num_out_of_window) == ([6, 2], [0, 4])
    manager.check_integrity([request])


def test_rejected_drafts_give_their_blocks_back_in_every_group() -> None:
    manager = a_manager()
    request = a_request(manager)
    compute(manager, request, 12, 13)
    assert manager.allocate(request, 21)
    manager.truncate(request, 13)
    manager.check_integrity([request])


def test_a_shrink_moves_blocks_of_all_groups() -> None:
    manager = a_manager(16)
    low, high = a_request(manager, "low"), a_request(manager, "high")
    compute(manager, low, 12)
    manager.invalidate_blocks(low)
    compute(manager, high, 8)
    manager.free(low)
    low.num_computed_tokens = 0
    plan = manager.plan_shrink(6, [high])
    assert isinstance(plan, ShrinkPlan)
    manager.apply_shrink(plan, [high])
    assert sorted(block for table in high.block_tables for block in table) == [0, 1, 2, 3]
    manager.check_integrity([low, high])

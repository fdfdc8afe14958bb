"""A request has a block table in every KV group: windows let go of their first blocks, and a beginning is found again
only where every group can go on from it."""

from trimtab_engine.scheduling.block_manager import BlockManager, ShrinkPlan
from trimtab_engine.scheduling.request import Request
from trimtab_engine.scheduling.sampling import Sampling
from trimtab_engine.scheduling.swap_space import SwapSpace
from trimtab_modelspec.attention_window import FULL_ATTENTION, AttentionWindow

BLOCK_SIZE = 4
WINDOW = AttentionWindow(6)


def a_manager(blocks: int = 32, *sights: AttentionWindow, host_blocks: int = 0, step: int | None = None) -> BlockManager:
    """A group that sees all and one with a window of 6, where nothing else is asked for."""
    swap_space = SwapSpace(host_blocks, host_blocks)
    groups = sights or (FULL_ATTENTION, WINDOW)
    return BlockManager(blocks, blocks, BLOCK_SIZE, swap_space, sights=groups, max_num_batched_tokens=step)


def a_request(manager: BlockManager, request_id: str = "a", num_tokens: int = 24) -> Request:
    request = Request.of(request_id, list(range(num_tokens)), Sampling(), arrival_time=0.0)
    request.block_tables, request.num_gone = manager.new_tables(), [0] * len(manager.sights)
    return request


def compute(manager: BlockManager, request: Request, *ends: int) -> None:
    """Steps that end at these tokens, as the scheduler makes room for them."""
    for end in ends:
        manager.let_go(request, request.num_computed_tokens)
        assert manager.allocate(request, end)
        manager.offer(request, end)
        request.num_computed_tokens = end


def forget(manager: BlockManager, block: int) -> None:
    """Have nobody find this block any more."""
    holder = a_request(manager)
    holder.block_tables = [[block], []]
    manager.disown(holder)


def test_every_group_gets_a_block_where_one_is_needed() -> None:
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
    assert (request.num_gone, [len(table) for table in request.block_tables]) == ([0, 1], [4, 3])
    compute(manager, request, 21)
    assert request.num_gone == [0, 2]
    manager.check_integrity([request])
    manager.free(request)
    assert (request.block_tables, request.num_gone, manager.num_used) == ([[], []], [0, 0], 0)


def test_what_a_window_let_go_of_serves_any_group() -> None:
    manager = a_manager(7)
    request = a_request(manager)
    compute(manager, request, 12)
    assert (manager.num_free, manager.blocks_for(16)) == (1, 8)
    compute(manager, request, 16)  # one block came back from the window, and two are needed
    assert manager.num_free == 0


def test_a_window_is_counted_as_what_one_step_sees_and_writes() -> None:
    """Of 40 tokens 10 blocks where all is seen; steps of 4 tokens see and write 9, which may touch 3 blocks."""
    assert a_manager(step=4).blocks_for(40) == 10 + 3
    assert a_manager(step=None).blocks_for(40) == 10 + 10
    assert a_manager(step=4).blocks_for(40, 2) == 11 + 6  # two requests: one more block may be begun
    assert a_manager(32, WINDOW, step=4).blocks_for(5) == 2


def test_a_beginning_is_found_in_all_groups_with_what_the_window_still_sees() -> None:
    manager = a_manager()
    first, second = a_request(manager, "first"), a_request(manager, "second")
    compute(manager, first, 21)
    found = manager.find_cached(second)
    assert (found.num_blocks, found.num_gone) == (5, [0, 3])
    assert [len(keys) for keys in found.keys] == [5, 2]
    manager.share(second, found)
    second.num_computed_tokens = 20
    manager.check_integrity([first, second])
    assert manager.num_shared_tokens(second) == 20


def test_a_beginning_is_cut_to_where_the_window_has_its_last_blocks() -> None:
    """Without the window's block of tokens 16 to 19 nobody goes on after 20 or 24 tokens, but after 16."""
    manager = a_manager()
    first, second = a_request(manager, "first"), a_request(manager, "second", 40)
    compute(manager, first, 24)
    forget(manager, first.block_tables[1][4])
    assert manager.find_cached(second).num_blocks == 4
    forget(manager, first.block_tables[0][1])
    assert manager.find_cached(second).num_blocks == 1


def test_a_beginning_is_found_past_what_no_window_sees_any_more() -> None:
    manager = a_manager()
    first, second = a_request(manager, "first"), a_request(manager, "second")
    compute(manager, first, 24)
    forget(manager, first.block_tables[1][0])
    assert manager.find_cached(second).num_blocks == 5


def test_two_windows_agree_on_one_beginning() -> None:
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


def test_a_swapped_out_request_comes_back_with_what_its_next_token_sees() -> None:
    """A block that came back and was let go in the same step could be another's before the copy into it."""
    manager = a_manager(host_blocks=16)
    request = a_request(manager)
    compute(manager, request, 12, 21)
    manager.reset_cache()
    out = manager.swap_out(request)
    assert out is not None
    assert len(out) == 6 + 5
    assert (manager.num_used, request.num_gone) == (0, [0, 1])
    manager.check_integrity([request])
    back = manager.swap_in(request)
    assert [host for host, _ in back] == [host for _, host in (*out[:6], *out[-2:])]
    assert ([len(table) for table in request.block_tables], request.num_gone) == ([6, 2], [0, 4])
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
    manager.disown(low)
    compute(manager, high, 8)
    manager.free(low)
    low.num_computed_tokens = 0
    plan = manager.plan_shrink(6, [high])
    assert isinstance(plan, ShrinkPlan)
    manager.apply_shrink(plan, [high])
    assert sorted(block for table in high.block_tables for block in table) == [0, 1, 2, 3]
    manager.check_integrity([low, high])

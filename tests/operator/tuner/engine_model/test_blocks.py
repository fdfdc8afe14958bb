"""KV blocks as counts: free blocks, cached blocks and eviction order."""

from __future__ import annotations

import pytest
from trimtab_operator.tuner.engine_model import KvBlocks, Sequence


def preempted(blocks: KvBlocks, num_tokens: int) -> Sequence:
    """Return a preempted sequence that held the blocks of this many tokens."""
    sequence = Sequence(0.0, num_tokens, 1)
    blocks.allocate(-(-num_tokens // blocks.block_size))
    blocks.release(sequence, num_tokens, is_requeued=True)
    return sequence


def test_a_preempted_sequence_finds_its_full_blocks_again() -> None:
    blocks = KvBlocks(10)
    sequence = preempted(blocks, 40)
    assert blocks.free == 10
    assert blocks.find_cached(sequence) == (2, 2)
    blocks.share(sequence, 2)
    assert (blocks.free, blocks.find_cached(sequence)) == (8, (0, 0))


def test_empty_blocks_are_allocated_before_cached_blocks() -> None:
    blocks = KvBlocks(10)
    sequence = preempted(blocks, 40)
    blocks.allocate(8)
    assert blocks.find_cached(sequence) == (2, 2)
    blocks.allocate(1)  # its last one first
    assert (blocks.find_cached(sequence), blocks.free, blocks.num_evicted) == ((1, 1), 1, 1)


def test_least_recently_freed_blocks_are_evicted_first() -> None:
    blocks = KvBlocks(10)
    older, newer = preempted(blocks, 48), preempted(blocks, 48)
    blocks.allocate(4 + 4)
    assert (blocks.find_cached(older), blocks.find_cached(newer)) == ((0, 0), (2, 2))


def test_without_caching_nothing_is_found() -> None:
    blocks = KvBlocks(10, caches=False)
    assert blocks.find_cached(preempted(blocks, 40)) == (0, 0)


@pytest.mark.parametrize(("size", "left"), [(10, 3), (5, 3), (3, 3), (2, 2)])
def test_a_smaller_cache_gives_up_empty_blocks_first(size: int, left: int) -> None:
    blocks = KvBlocks(10)
    sequence = preempted(blocks, 48)
    blocks.resize(size)
    assert (blocks.free, blocks.total) == (size, size)
    assert blocks.find_cached(sequence) == (left, left)

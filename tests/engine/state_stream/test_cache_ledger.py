"""The cache ledger: announced keys are the keys whose blocks can be found, through random operations."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import engine_builders
import pytest
from trimtab_engine.scheduling.block_manager import BlockManager, ShrinkPlan
from trimtab_engine.scheduling.request import Request
from trimtab_engine.scheduling.swap_space import SwapSpace
from trimtab_engine.state_stream.cache_ledger import CacheLedger
from trimtab_modelspec.attention_window import FULL_ATTENTION, AttentionWindow

BLOCK_SIZE = 4
CUT_TOKENS = 6
"""Tokens of one key: keys end within blocks, and some share a block."""


def make_request(tokens: Sequence[int], name: str = "r") -> Request:
    return engine_builders.a_request(tokens, request_id=name)


def keys_of(tokens: Sequence[int], cut: int = CUT_TOKENS) -> tuple[list[int], list[int]]:
    """Return the keys of a prompt and their ends, as the API server computes them."""
    ends = list(range(cut, len(tokens) + 1, cut))
    return [hash(tuple(tokens[:end])) & (2**64 - 1) for end in ends], ends


@dataclass
class Cache:
    """A block manager with its ledger, and the picture that a router has of it."""

    blocks: BlockManager
    ledger: CacheLedger = field(init=False)
    picture: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.ledger = CacheLedger(self.blocks)

    def run(self, tokens: Sequence[int], name: str = "r") -> Request:
        """Compute a prompt after its cached blocks, and offer its blocks."""
        request = make_request(tokens, name)
        self.ledger.add(request, *keys_of(tokens))
        cached = self.blocks.find_cached(request)
        assert self.blocks.can_allocate(len(tokens), cached.blocks)
        self.blocks.share(request, cached)
        assert self.blocks.allocate(request, len(tokens))
        request.num_computed_tokens = len(tokens)
        self.blocks.cache_blocks(request, len(tokens))
        return request

    def read_news(self) -> tuple[list[int], list[int]]:
        self.ledger.settle()
        added, removed = self.ledger.take_news()
        assert self.picture.isdisjoint(added)
        assert self.picture.issuperset(removed)
        self.picture.difference_update(removed)
        self.picture.update(added)
        return added, removed


def make_cache(num_blocks: int = 16, num_kept: int = 0, num_swapped: int = 0) -> Cache:
    return Cache(BlockManager(num_blocks, 32, BLOCK_SIZE, SwapSpace(num_swapped, num_swapped, num_kept, 16)))


def test_keys_of_computed_prompt_are_announced_once() -> None:
    cache, tokens = make_cache(), range(24)
    cache.run(tokens)
    assert cache.read_news() == (keys_of(tokens)[0], [])
    cache.run(tokens, "again")
    assert cache.read_news() == ([], [])


def test_key_without_full_block_is_announced_with_next_block() -> None:
    cache, tokens = make_cache(), list(range(8))
    request = make_request(tokens)
    cache.ledger.add(request, [1, 2, 3, 4], [1, 3, 5, 7])
    cache.blocks.allocate(request, 8)
    cache.blocks.cache_blocks(request, 4)
    assert cache.read_news() == ([1, 2, 3], [])
    cache.blocks.cache_blocks(request, 8)
    assert cache.read_news() == ([], [])  # the last key ends before the second block does


def test_evicted_content_withdraws_its_keys() -> None:
    cache = make_cache(num_blocks=6)
    request = cache.run(range(24))
    cache.read_news()
    cache.blocks.free(request)
    cache.run(range(100, 108), "other")
    _, removed = cache.read_news()
    keys = keys_of(range(24))[0]
    assert removed == keys[-1:]  # it stands for the last two blocks, which go first
    assert cache.picture >= set(keys[:-1])


def test_keys_of_scheduled_step_are_announced_after_it_completes() -> None:
    cache, tokens = make_cache(), range(24)
    cache.run(tokens)
    cache.ledger.scheduled(1)
    assert cache.ledger.take_news() == ([], [])
    cache.ledger.completed(1)
    assert cache.ledger.take_news()[0] == keys_of(tokens)[0]


def test_content_that_scheduled_step_overwrites_is_withdrawn_at_once() -> None:
    cache = make_cache(num_blocks=6)
    request = cache.run(range(24))
    cache.read_news()
    cache.blocks.free(request)
    cache.run(range(100, 124), "other")
    cache.ledger.scheduled(2)
    added, removed = cache.ledger.take_news()
    assert (added, set(removed)) == ([], set(keys_of(range(24))[0]))


def test_key_with_other_tokens_replaces_its_blocks() -> None:
    """An adapter that is loaded again under its name has the same keys and other content."""
    cache = make_cache()
    request = make_request(range(8))
    cache.ledger.add(request, [7], [8])
    cache.blocks.allocate(request, 8)
    cache.blocks.cache_blocks(request, 8)
    cache.read_news()
    cache.ledger.add(make_request(range(50, 58)), [7], [8])
    assert cache.read_news() == ([], [7])


def test_oldest_keys_are_dropped_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trimtab_engine.state_stream.cache_ledger.MIN_MAX_KEYS", 4)
    monkeypatch.setattr("trimtab_engine.state_stream.cache_ledger.KEYS_PER_BLOCK", 0)
    cache = make_cache()
    cache.run(range(24))
    cache.read_news()
    cache.run(range(100, 124), "other")
    cache.read_news()
    assert len(cache.ledger) == 4
    assert cache.picture == set(keys_of(range(100, 124))[0])


def test_nothing_is_recorded_after_close() -> None:
    cache = make_cache()
    cache.ledger.close()
    cache.run(range(24))
    assert cache.blocks.take_changes() == []


@pytest.mark.parametrize("windows", [(FULL_ATTENTION,), (AttentionWindow(8), FULL_ATTENTION)], ids=["one", "hybrid"])
@pytest.mark.parametrize("seed", range(12))
def test_picture_equals_cache_after_each_operation(seed: int, windows: tuple[AttentionWindow, ...]) -> None:
    """Prompts from a tree of prefixes run, end, are preempted, swapped, evicted, offloaded and invalidated."""
    rng = random.Random(seed)
    num_kept, num_swapped = rng.choice([(0, 0), (6, 0), (0, 12), (6, 12)])
    swap_space = SwapSpace(num_swapped, num_swapped, num_kept, 8)
    cache = Cache(BlockManager(24, 40, BLOCK_SIZE, swap_space, attention_windows=windows, max_num_batched_tokens=64))
    blocks = cache.blocks
    running: list[Request] = []
    swapped: list[Request] = []
    chains: dict[str, list[tuple[int, list[bytes]]]] = {}
    """Per prompt: its keys, each with all blocks that must be cached for it."""

    def start() -> None:
        tokens = [rng.randrange(2) if place % 7 == 0 else place for place in range(rng.randrange(5, 40))]
        request = make_request(tokens, f"r{rng.random()}")
        request.block_tables = blocks.new_tables()
        request.num_out_of_window = [0] * len(windows)
        cached = blocks.find_cached(request)
        if not blocks.can_allocate(len(tokens), cached.blocks):
            return
        keys, ends = keys_of(tokens)
        cache.ledger.add(request, keys, ends)
        contents = blocks.lookup_keys(request, len(tokens) // BLOCK_SIZE)
        chains[str(tokens)] = [
            (key, contents[:num_blocks]) for key, num_blocks in zip(keys, blocks_of(ends), strict=True) if num_blocks
        ]
        blocks.share(request, cached)
        assert blocks.allocate(request, len(tokens))
        request.num_computed_tokens = len(tokens)
        blocks.cache_blocks(request, rng.randrange(len(tokens) + 1))
        blocks.cache_blocks(request, len(tokens))
        running.append(request)

    def end() -> None:
        blocks.free(running.pop(rng.randrange(len(running))))

    def invalidate() -> None:
        request = running.pop(rng.randrange(len(running)))
        blocks.invalidate_blocks(request)
        blocks.free(request)

    def swap_out() -> None:
        request = running[-1]
        if blocks.swap_out(request) is not None:
            swapped.append(running.pop())

    def swap_in() -> None:
        request = swapped[-1]
        if blocks.can_allocate(len(request.token_ids), blocks.find_swapped(request)):
            blocks.swap_in(request)
            running.append(swapped.pop())

    def resize() -> None:
        wanted = rng.randrange(8, 40)
        if wanted >= blocks.num_total:
            blocks.grow(wanted)
            return
        plan = blocks.plan_shrink(wanted, running)
        if isinstance(plan, ShrinkPlan):
            blocks.apply_shrink(plan, running)

    operations = [start] * 6 + [end] * 3 + [invalidate, swap_out, swap_in, resize, blocks.reset_cache]
    operations.append(lambda: swap_space.resize_kept(rng.randrange(9)))
    for step in range(300):
        operation = rng.choice(operations)
        needs = {end: running, invalidate: running, swap_out: running, swap_in: swapped}.get(operation, True)
        if needs:
            operation()
        blocks.take_offloaded()
        swap_space.settle()
        cache.read_news()
        for chain in chains.values():
            seen = list(takewhile(lambda pair: pair[0] in cache.picture, chain))
            assert seen == list(takewhile(lambda pair: all(map(blocks.is_cached, pair[1])), chain)), f"after {step}"
        assert cache.picture == cache.ledger.announced


def blocks_of(ends: Sequence[int]) -> list[int]:
    """Return for each key how many blocks it needs: a key that ends in the same block as the one before it needs those
    of the next one. 0 if there is none.
    """
    needed: list[int] = []
    for place in range(len(ends)):
        before = ends[place - 1] // BLOCK_SIZE if place else 0
        needed.append(next((later // BLOCK_SIZE for later in ends[place:] if later // BLOCK_SIZE > before), 0))
    return needed

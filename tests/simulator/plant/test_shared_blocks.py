"""Changes of prefix caches that routers follow: whole prefix ids, as computed and as evicted."""

from __future__ import annotations

from trimtab_operator.tuner.engine_model import EngineModel, EngineModelPolicy, Sequence, StepCost
from trimtab_simulator.plant.pooled_blocks import PrefixPool
from trimtab_simulator.plant.shared_blocks import CacheChange, SharedBlocks
from trimtab_simulator.trace.arrivals import KEY_TOKENS, PrefixIds

COST = StepCost(0.01, 1e-4, 1e-4, 0.0)


def serve(blocks: SharedBlocks, keys: tuple[int, ...], prompt: int) -> None:
    engine = EngineModel(COST, EngineModelPolicy(8, 4096), blocks)
    engine.add(Sequence(0.0, prompt, 4, keys))
    engine.drain()


def test_log_records_nothing_before_it_starts() -> None:
    blocks = SharedBlocks(200)
    serve(blocks, (1, 2), 1100)
    assert blocks.changes.take() == []


def test_log_records_whole_prefix_ids_only() -> None:
    blocks = SharedBlocks(200)
    blocks.changes.start()
    serve(blocks, (1, 2, 3), 2 * KEY_TOKENS + 100)
    assert blocks.changes.take() == [CacheChange(1, True), CacheChange(2, True)]
    serve(blocks, (1, 2, 4), 3 * KEY_TOKENS)
    assert blocks.changes.take() == [CacheChange(4, True)]
    assert blocks.changes.take() == []


def test_log_records_evictions_from_the_end_of_a_prefix() -> None:
    blocks = SharedBlocks(80)
    blocks.changes.start()
    serve(blocks, (1, 2), 2 * KEY_TOKENS)
    blocks.changes.take()
    serve(blocks, (7,), KEY_TOKENS)
    assert blocks.changes.take() == [CacheChange(2, False), CacheChange(7, True)]


def test_pool_finds_prefixes_of_other_replicas() -> None:
    pool = PrefixPool()
    engines = [EngineModel(COST, EngineModelPolicy(8, 4096), pool.make_blocks(400, 16)) for _ in range(2)]
    sequences = [Sequence(0.0, 1500, 4, (1, 2)) for _ in engines]
    for engine, sequence in zip(engines, sequences, strict=True):
        engine.add(sequence)
        engine.drain()
    assert [sequence.num_cached for sequence in sequences] == [0, 2 * KEY_TOKENS]


def test_pool_evicts_the_least_recently_used() -> None:
    pool = PrefixPool()
    blocks = pool.make_blocks(96, 16)  # three ids
    pool.add((1, 2))
    pool.add((3,))
    pool.add((1,))
    pool.add((4,))
    assert [pool.count_leading((key,)) for key in (1, 2, 3, 4)] == [1, 0, 1, 1]
    assert blocks.free == 96


def test_ids_of_prefixes_depend_on_all_blocks_before() -> None:
    ids = PrefixIds()
    first, second, third = ids.ids_of((1, 2, 3)), ids.ids_of((1, 9, 3)), ids.ids_of((1, 2))
    assert first[:2] == third
    assert first[0] == second[0]
    assert len({*first, *second}) == 5

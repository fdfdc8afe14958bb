"""Scheduling of requests with adapters: admission under max_loras, and sharing of cached blocks."""

from __future__ import annotations

from typing import Any

import engine_builders
import pytest
from trimtab_engine.errors import IntegrityError
from trimtab_engine.scheduling.adapter import Adapter
from trimtab_engine.scheduling.block_manager import BlockManager
from trimtab_engine.scheduling.policy import SchedulingPolicy
from trimtab_engine.scheduling.prefix_hash import chain_root, extend_block_hashes
from trimtab_engine.scheduling.request import Request
from trimtab_engine.scheduling.scheduler import Scheduler
from trimtab_engine.scheduling.step_inputs import flatten
from trimtab_engine.scheduling.swap_space import SwapSpace
from trimtab_engine.scheduling.waiting_queue import WaitingQueue

BLOCK_SIZE = 4
SQL, LAW, ART = (Adapter(name, slot, bytes([slot + 1]) * 32) for slot, name in enumerate(("sql", "law", "art")))


def a_scheduler(max_adapters: int | None = 1, *, seqs: int = 8, caching: bool = False, blocks: int = 100) -> Scheduler:
    return Scheduler(
        BlockManager(blocks, blocks, BLOCK_SIZE, SwapSpace(0, 0)),
        SchedulingPolicy(max_num_seqs=seqs, max_num_batched_tokens=64, enable_prefix_caching=caching),
        max_model_len=32,
        max_adapters=max_adapters,
    )


def a_request(name: str, adapter: Adapter | None = None, *, prompt: int = 5, **sampling: Any) -> Request:
    request = engine_builders.a_request([1] * prompt, request_id=name, temperature=0.0, **{"max_tokens": 8, **sampling})
    request.adapter = adapter
    return request


def add(scheduler: Scheduler, *requests: Request) -> None:
    for request in requests:
        scheduler.add(request)


def step(scheduler: Scheduler, now: float = 0.0) -> list[str]:
    """Run one step and return its request ids."""
    batch = scheduler.schedule(now)
    held = [s.request.request_id for s in batch.sequences]
    scheduler.update(batch, [5] * sum(s.samples for s in batch.sequences), now)
    scheduler.check_integrity()
    return held


# --- turns --------------------------------------------------------------------------------------------------------


def test_as_many_adapters_run_together_as_a_step_may_have() -> None:
    scheduler = a_scheduler(2)
    add(scheduler, a_request("a", SQL), a_request("b", LAW), a_request("c"), a_request("d", SQL), a_request("e", ART))
    assert step(scheduler) == ["a", "b", "c", "d"]
    assert scheduler.adapter_names() == (["law", "sql"], ["art"])


def test_request_without_adapter_passes_waiting_head() -> None:
    scheduler = a_scheduler(1)
    add(scheduler, a_request("a", SQL), a_request("b", LAW), a_request("c"), a_request("d"))
    assert step(scheduler) == ["a", "c", "d"]


def test_request_with_used_adapter_does_not_pass_head() -> None:
    scheduler = a_scheduler(1)
    add(scheduler, a_request("a", SQL, max_tokens=2), a_request("b", LAW), a_request("c", SQL))
    assert step(scheduler) == ["a"]
    add(scheduler, a_request("d", SQL))
    assert step(scheduler) == ["a"]
    assert step(scheduler) == ["b"], "the first other one, regardless of later arrivals before it"


def test_alternating_adapters_all_finish() -> None:
    scheduler = a_scheduler(1)
    add(scheduler, *(a_request(str(i), (SQL, LAW, ART, None)[i % 4], max_tokens=3) for i in range(24)))
    for _ in range(24 * 3):
        if scheduler.is_idle:
            break
        assert step(scheduler), "something always runs"
    assert scheduler.is_idle


def test_waiting_adapter_is_reported_as_blocked_reason() -> None:
    scheduler = a_scheduler(1)
    add(scheduler, a_request("a", SQL), a_request("b", LAW))
    step(scheduler, 1.0)
    step(scheduler, 4.0)
    assert scheduler.take_stats().blocked_seconds == {"adapters": 3.0}


def test_missing_slot_is_blocked_reason_if_adapter_fits() -> None:
    scheduler = a_scheduler(2, seqs=1)
    add(scheduler, a_request("a", SQL), a_request("b", LAW))
    step(scheduler, 1.0)
    step(scheduler, 4.0)
    assert scheduler.take_stats().blocked_seconds == {"seqs": 3.0}


def test_preempted_request_releases_and_regains_adapter() -> None:
    scheduler = a_scheduler(1)
    add(scheduler, a_request("a", SQL), a_request("b", LAW))
    assert step(scheduler) == ["a"]
    scheduler.preempt_all(0.0)
    assert step(scheduler) == ["a"], "it arrived first"


def test_has_room_requires_free_adapter() -> None:
    scheduler = a_scheduler(1)
    add(scheduler, a_request("a", SQL))
    step(scheduler)
    assert scheduler.has_room_for(4)
    assert scheduler.has_room_for(4, SQL)
    assert not scheduler.has_room_for(4, LAW)


def test_more_adapters_than_a_step_may_have_are_an_error_of_ours() -> None:
    scheduler = a_scheduler(2)
    add(scheduler, a_request("a", SQL), a_request("b", LAW))
    step(scheduler)
    scheduler._max_adapters = 1
    with pytest.raises(IntegrityError, match="2 adapters run; a step may have 1"):
        scheduler.check_integrity()


def test_passing_request_is_no_longer_late() -> None:
    queue = WaitingQueue("fcfs")
    first, second = a_request("a", SQL), a_request("b")
    first.order, second.order = 0, 1
    queue.add(first)
    queue.add(second)
    queue.take(second)
    assert list(queue) == [first]
    queue.check_integrity()
    queue.take(first)
    assert len(queue) == 0


# --- step inputs ---------------------------------------------------------------------------------------------------


def test_step_inputs_list_adapter_tokens() -> None:
    scheduler = a_scheduler(2)
    add(scheduler, a_request("a", LAW, prompt=3), a_request("b", prompt=4), a_request("c", SQL, prompt=6))
    inputs, _ = flatten(
        scheduler.schedule(0.0).sequences, block_size=BLOCK_SIZE, max_decode_tokens=99, with_adapters=True
    )
    assert inputs.adapters == [(0, 3, LAW.slot), (7, 6, SQL.slot)]


def test_decode_adapters_follow_token_order() -> None:
    scheduler = a_scheduler(2)
    add(scheduler, a_request("a", LAW, prompt=3), a_request("b", prompt=4), a_request("c", SQL, prompt=6))
    step(scheduler)
    inputs, _ = flatten(
        scheduler.schedule(0.0).sequences, block_size=BLOCK_SIZE, max_decode_tokens=99, with_adapters=True
    )
    assert inputs.positions == [6, 4, 3]
    assert inputs.adapters == [(0, 1, SQL.slot), (2, 1, LAW.slot)]


def test_step_without_adapters_has_no_adapter_inputs() -> None:
    scheduler = a_scheduler(2)
    add(scheduler, a_request("a"), a_request("b"))
    inputs, _ = flatten(
        scheduler.schedule(0.0).sequences, block_size=BLOCK_SIZE, max_decode_tokens=99, with_adapters=True
    )
    assert inputs.adapters == []


# --- sharing ------------------------------------------------------------------------------------------------------


def hashes_of(adapter: Adapter | None, salt: str = "") -> list[bytes]:
    hashes: list[bytes] = []
    extend_block_hashes(hashes, [1] * 8, BLOCK_SIZE, 8, salt, (), adapter)
    return hashes


def test_blocks_are_shared_only_within_one_adapter() -> None:
    again = Adapter("sql", 0, b"other" * 6 + b"..")
    assert hashes_of(SQL) == hashes_of(Adapter("by another name", 7, SQL.digest))
    every = [hashes_of(None)[1], hashes_of(SQL)[1], hashes_of(LAW)[1], hashes_of(again)[1], hashes_of(SQL, "tenant")[1]]
    assert len(set(every)) == len(every)


def test_no_salt_reads_like_an_adapter() -> None:
    assert chain_root("adapter" + SQL.digest.decode("latin-1")) != chain_root("", SQL)


def test_reloaded_adapter_does_not_find_old_blocks() -> None:
    scheduler = a_scheduler(1, caching=True)
    found = []
    for place, adapter in enumerate((SQL, SQL, Adapter("sql", SQL.slot, LAW.digest), None)):
        request = a_request(str(place), adapter, prompt=9, max_tokens=1)
        scheduler.add(request)
        while not scheduler.is_idle:
            step(scheduler)
        found.append(request.num_cached_tokens)
    assert found == [0, 8, 0, 0]

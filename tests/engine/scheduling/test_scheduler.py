"""Scheduler rules: batch content, preemption, finish conditions, limits and resizes.

Tokens are chosen by the test. test_scheduler_properties.py runs randomized property tests.
"""

import random
from collections import deque
from dataclasses import replace
from typing import Any

import engine_builders
import pytest
from trimtab_engine.errors import IntegrityError, InvalidRequest
from trimtab_engine.scheduling.batch import Batch
from trimtab_engine.scheduling.block_manager import BlockManager
from trimtab_engine.scheduling.policy import SchedulingPolicy
from trimtab_engine.scheduling.pooling import Pooling, PoolingMethod
from trimtab_engine.scheduling.request import Request, RequestStatus
from trimtab_engine.scheduling.sampling import Sampling
from trimtab_engine.scheduling.scheduler import Sampled, Scheduler
from trimtab_engine.scheduling.swap_space import SwapSpace
from trimtab_modelspec.attention_window import FULL_ATTENTION, AttentionWindow

EOS = 2
STOP = 7
WORD = 5
BLOCK_SIZE = 4


def a_scheduler(
    blocks: int = 100,
    *,
    cap: int | None = None,
    seqs: int = 8,
    tokens: int = 64,
    length: int = 32,
    chunked: bool = True,
    swap: int = 0,
    caching: bool = False,
    stages: int = 1,
    attention_windows: tuple[AttentionWindow, ...] = (FULL_ATTENTION,),
    **policy: Any,
) -> Scheduler:
    return Scheduler(
        BlockManager(blocks, cap or blocks, BLOCK_SIZE, SwapSpace(swap, swap), attention_windows=attention_windows),
        SchedulingPolicy(max_num_seqs=seqs, max_num_batched_tokens=tokens, enable_prefix_caching=caching, **policy),
        max_model_len=length,
        enable_chunked_prefill=chunked,
        eos_token_ids=[EOS],
        num_stages=stages,
    )


def a_request(request_id: str = "a", prompt: int = 5, *, stop: tuple[int, ...] = (), **sampling: Any) -> Request:
    asked = {"temperature": 0.0, "stop_token_ids": stop, **sampling}
    return engine_builders.a_request([1] * prompt, request_id=request_id, **asked)


def steer(scheduler: Scheduler, **changes: Any) -> None:
    scheduler.set_policy(replace(scheduler.policy, **changes))


def add(scheduler: Scheduler, *requests: Request) -> None:
    for request in requests:
        scheduler.add(request)


def finish_step(scheduler: Scheduler, batch: Batch, token: int = WORD, now: float = 0.0) -> list[Sampled]:
    """Sample `token` for every sequence that samples."""
    return scheduler.update(batch, [token] * sum(s.samples for s in batch.sequences), now)


def step(scheduler: Scheduler, token: int = WORD, now: float = 0.0) -> list[tuple[str, int]]:
    """Run one step and return its (request id, number of tokens) in order."""
    batch = scheduler.schedule(now)
    held = [(s.request.request_id, s.num_tokens) for s in batch.sequences]
    finish_step(scheduler, batch, token, now)
    scheduler.check_integrity()
    return held


# --- batch content ------------------------------------------------------------------------------------------------


def test_batch_only_decodes_flag_is_exact() -> None:
    scheduler = a_scheduler()
    add(scheduler, a_request("a", 3))
    batch = scheduler.schedule(0.0)
    assert not batch.only_decodes
    finish_step(scheduler, batch)
    assert scheduler.schedule(0.0).only_decodes
    add(scheduler, a_request("b", 1))  # one token as a decode has, and yet a prompt
    assert not scheduler.schedule(0.0).only_decodes


@pytest.mark.parametrize("caching", [False, True])
def test_quiet_decodes_are_scheduled_like_others(caching: bool) -> None:
    """Includes block boundaries, lengths, an interleaved prompt and a live change of speculation."""
    quick, slow = (a_scheduler(seqs=4, tokens=6, length=24, caching=caching) for _ in range(2))
    held: list[list[list[tuple[str, int, int, bool]]]] = [[], []]
    for number in range(40):
        for own, scheduler in zip(held, (quick, slow), strict=True):
            if number % 6 == 0:
                add(scheduler, a_request(str(number), 1 + number % 7, max_tokens=2 + number % 17))
            if number in (9, 14):
                steer(scheduler, num_speculative_tokens=2 if number == 9 else 0)
            if scheduler is slow:
                for sequence in scheduler._running:
                    sequence.quiet_until = 0
            batch = scheduler.schedule(0.0)
            own.append([(s.request.request_id, s.start, s.num_tokens, s.samples) for s in batch.sequences])
            finish_step(scheduler, batch)
            scheduler.check_integrity()
    assert held[0] == held[1]


def test_process_output_returns_only_notable_requests() -> None:
    scheduler = a_scheduler()
    requests = [a_request(name, 3, stop=(STOP,)) for name in "abcd"]
    add(scheduler, *requests)
    batch = scheduler.schedule(0.0)
    scheduler.abort(["d"])
    a, b, c, d = requests
    assert scheduler.process_output(batch, [WORD, STOP, [WORD], WORD], 0.0) == {
        1: (b, STOP, RequestStatus.FINISHED_STOPPED),
        2: (c, [WORD], None),
        3: (d, [], RequestStatus.FINISHED_ABORTED),
    }
    assert a.token_ids == [1, 1, 1, WORD]
    assert scheduler.take_stats().num_generation_tokens == 3


def test_a_prompt_is_computed_at_once_and_then_one_token_a_step() -> None:
    scheduler = a_scheduler()
    add(scheduler, a_request(prompt=5))
    batch = scheduler.schedule(0.0)
    (sequence,) = batch.sequences
    assert (sequence.start, sequence.num_tokens, sequence.samples) == (0, 5, True)
    assert (batch.step, batch.num_tokens, batch.kind) == (1, 5, "prefill")
    finish_step(scheduler, batch)
    batch = scheduler.schedule(0.0)
    (sequence,) = batch.sequences
    assert (sequence.start, sequence.num_tokens, sequence.samples) == (5, 1, True)
    assert (batch.step, batch.num_tokens, batch.kind) == (2, 1, "decode")


def test_a_long_prompt_is_computed_in_chunks_and_only_the_last_one_samples() -> None:
    scheduler = a_scheduler(tokens=8)
    request = a_request(prompt=20)
    add(scheduler, request)
    chunks = []
    for _ in range(4):
        batch = scheduler.schedule(0.0)
        (sequence,) = batch.sequences
        chunks.append((sequence.start, sequence.num_tokens, sequence.samples))
        finish_step(scheduler, batch)
    assert chunks == [(0, 8, False), (8, 8, False), (16, 4, True), (20, 1, True)]


def test_running_requests_precede_waiting_within_budget() -> None:
    scheduler = a_scheduler(tokens=8)
    add(scheduler, a_request("a", 4))
    assert step(scheduler) == [("a", 4)]
    add(scheduler, a_request("b", 10), a_request("c", 3))
    assert step(scheduler) == [("a", 1), ("b", 7)]
    assert step(scheduler) == [("a", 1), ("b", 3), ("c", 3)]
    assert step(scheduler) == [("a", 1), ("b", 1), ("c", 1)]


def test_no_prompt_before_them_in_the_queue_takes_the_tokens_of_decodes() -> None:
    scheduler = a_scheduler(tokens=16, length=200, scheduling_policy="priority")
    add(scheduler, *(a_request(name, 2) for name in "abcdefg"))
    step(scheduler)
    urgent = a_request("urgent", 50)
    urgent.priority = -1
    add(scheduler, urgent)
    assert step(scheduler) == [*((name, 1) for name in "abcdefg"), ("urgent", 9)]
    for _ in range(4):
        assert step(scheduler) == [("urgent", 9), *((name, 1) for name in "abcdefg")]


def test_a_budget_of_nothing_but_decodes_lets_a_prompt_wait_and_then_go_on() -> None:
    scheduler = a_scheduler(tokens=16, length=60, scheduling_policy="priority")
    add(scheduler, *(a_request(name, 2, max_tokens=5) for name in "abc"))
    step(scheduler)
    urgent = a_request("urgent", 50)
    urgent.priority = -1
    add(scheduler, urgent)
    step(scheduler)
    steer(scheduler, max_num_seqs=3, max_num_batched_tokens=3)
    for _ in range(3):
        assert step(scheduler) == [("a", 1), ("b", 1), ("c", 1)]
    assert step(scheduler) == [("urgent", 3)], "the others have ended"


def test_drafts_use_remaining_budget() -> None:
    scheduler = a_scheduler(tokens=12, length=60, num_speculative_tokens=4)
    add(scheduler, *(a_request(name, 2, max_tokens=30) for name in "abcd"))
    step(scheduler)
    add(scheduler, a_request("late", 5))
    for request in scheduler.running_requests():
        request.draft_token_ids = [WORD] * 4
    batch = scheduler.schedule(0.0)
    held = [(s.request.request_id, s.num_tokens, len(s.draft_token_ids)) for s in batch.sequences]
    assert held == [("a", 4, 3), ("b", 1, 0), ("c", 1, 0), ("d", 1, 0), ("late", 5, 0)]
    assert batch.num_tokens == 12


@pytest.mark.parametrize(
    "attention_window", [AttentionWindow(6), AttentionWindow(6, is_chunked=True)], ids=["window", "chunks"]
)
def test_window_frees_blocks_with_accepted_drafts(attention_window: AttentionWindow) -> None:
    """Room for known tokens then already exists, without an allocation."""
    scheduler = a_scheduler(
        200, tokens=12, length=80, num_speculative_tokens=4, attention_windows=(attention_window, FULL_ATTENTION)
    )
    request = a_request("a", 2, max_tokens=70, ignore_eos=True)
    add(scheduler, request)
    held = []
    while not scheduler.is_idle:
        request.draft_token_ids = [WORD] * 4
        batch = scheduler.schedule(0.0)
        held.append(len(request.block_tables[0]))
        tokens: list[int | list[int]] = [
            [WORD] * (1 + len(s.draft_token_ids)) if s.draft_token_ids else WORD for s in batch.sequences
        ]
        scheduler.update(batch, tokens, 0.0)
        scheduler.check_integrity()
    assert len(held) > 10
    assert max(held) <= attention_window.num_blocks(72, BLOCK_SIZE, 5)


def test_drafts_do_not_starve_other_requests() -> None:
    scheduler = a_scheduler(2000, tokens=64, seqs=64, length=80, num_speculative_tokens=4)
    requests = [a_request(str(n), 1, max_tokens=70, ignore_eos=True) for n in range(64)]
    add(scheduler, *requests)
    for _ in range(60):
        for request in scheduler.running_requests():
            request.draft_token_ids = [WORD] * 4
        batch = scheduler.schedule(0.0)
        tokens: list[int | list[int]] = [
            [WORD] * (1 + len(s.draft_token_ids)) if s.draft_token_ids else WORD for s in batch.sequences if s.samples
        ]
        scheduler.update(batch, tokens, 0.0)
    assert min(request.num_output_tokens for request in requests) == 60


def test_request_with_drafts_in_flight_is_not_scheduled() -> None:
    scheduler = a_scheduler(tokens=12, num_speculative_tokens=4)
    request = a_request("a", 2, max_tokens=30)
    add(scheduler, request)
    step(scheduler)
    request.draft_token_ids = [WORD] * 3
    flight = scheduler.schedule(0.0)
    assert [s.num_tokens for s in flight.sequences] == [4]
    assert scheduler.schedule(0.0).sequences == []
    scheduler.update(flight, [[WORD, WORD + 1]], 0.0)
    assert request.token_ids == [1, 1, WORD, WORD, WORD + 1]
    assert step(scheduler) == [("a", 1)]


@pytest.mark.parametrize("budget", [12, 1])
def test_guesses_made_before_the_depth_became_0_are_dropped(budget: int) -> None:
    """Including those of a request without budget in the first step after the change."""
    scheduler = a_scheduler(tokens=12, num_speculative_tokens=4)
    requests = [a_request(name, 2, max_tokens=12) for name in "ab"]
    add(scheduler, *requests)
    step(scheduler)
    for request in requests:
        request.draft_token_ids = [WORD] * 4
    steer(scheduler, num_speculative_tokens=0, max_num_batched_tokens=budget, max_num_seqs=min(budget, 8))
    first = scheduler.schedule(0.0)
    assert [s.num_tokens for s in first.sequences] == [1, 1][:budget]
    finish_step(scheduler, first)
    steer(scheduler, max_num_batched_tokens=12)
    while requests[1].num_tokens < 14:
        scheduler.check_integrity()
        batch = scheduler.schedule(0.0)
        assert all(s.num_tokens == 1 for s in batch.sequences)
        assert not any(s.request.draft_token_ids for s in batch.sequences)
        scheduler.check_integrity()
        finish_step(scheduler, batch)


def test_idle_scheduler_room_is_limited_by_slots_budget_blocks() -> None:
    scheduler = a_scheduler(30, seqs=6, tokens=64)
    taken = 0
    while scheduler.has_room_for(5):
        add(scheduler, a_request(str(taken), 5))
        taken += 1
    assert taken == 6, "slots"
    assert len(step(scheduler)) == 6
    scheduler = a_scheduler(30, seqs=20, tokens=20)
    for count in range(4):
        assert scheduler.has_room_for(5)
        add(scheduler, a_request(str(count), 5))
    assert not scheduler.has_room_for(5), "the budget of the next step is spent"
    scheduler = a_scheduler(8, seqs=100, tokens=100)
    add(scheduler, a_request("a", 20))
    assert scheduler.has_room_for(7)
    assert not scheduler.has_room_for(13), "blocks"


def test_without_chunked_prefill_only_whole_prompts_are_admitted() -> None:
    scheduler = a_scheduler(tokens=32, chunked=False)
    add(scheduler, a_request("a", 20), a_request("b", 20), a_request("c", 2))
    assert step(scheduler) == [("a", 20)]  # b does not fit into the rest; c does not overtake it
    assert step(scheduler) == [("a", 1), ("b", 20), ("c", 2)]


def test_no_more_run_than_max_num_seqs() -> None:
    scheduler = a_scheduler(seqs=2)
    add(scheduler, *(a_request(name, max_tokens=2) for name in "abc"))
    assert step(scheduler) == [("a", 5), ("b", 5)]
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.num_unfinished) == (2, 1, 3)
    step(scheduler)
    assert step(scheduler) == [("c", 5)]


def test_a_prompt_waits_until_all_of_it_fits_even_when_a_first_chunk_would() -> None:
    scheduler = a_scheduler(8, tokens=8)
    add(scheduler, a_request("a", 15, max_tokens=2))
    step(scheduler), step(scheduler)
    add(scheduler, a_request("b", 21), a_request("c", 1))
    assert step(scheduler) == [("a", 1)]  # 4 blocks are free, b needs 6; c does not overtake it
    assert step(scheduler) == [("b", 8)]


def test_nothing_to_do_is_an_empty_batch_that_is_no_step() -> None:
    scheduler = a_scheduler()
    batch = scheduler.schedule(0.0)
    assert (batch.sequences, batch.num_tokens, batch.kind) == ([], 0, "idle")
    assert scheduler.next_step == 1
    assert scheduler.is_idle


# --- rejections ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        (0, 1, "no tokens"),
        (32, 1, "shorten the prompt to 31 tokens"),
        (5, 0, "max_tokens is 0"),
    ],
)
def test_a_request_that_could_never_run_is_refused_alone(prompt: int, max_tokens: int, message: str) -> None:
    scheduler = a_scheduler(length=32)
    with pytest.raises(InvalidRequest, match=message):
        scheduler.add(a_request("bad", prompt, max_tokens=max_tokens))
    assert scheduler.is_idle


def test_an_id_that_is_in_use_is_refused_and_free_again_afterwards() -> None:
    scheduler = a_scheduler()
    add(scheduler, a_request("a"))
    with pytest.raises(InvalidRequest, match="'a' is in use"):
        scheduler.add(a_request("a"))
    scheduler.abort(["a"])
    add(scheduler, a_request("a"))


# --- how requests end ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "tokens", "status", "stop_token_id"),
    [
        (a_request(), [WORD, EOS], RequestStatus.FINISHED_STOPPED, None),
        (a_request(stop=(STOP,)), [WORD, STOP], RequestStatus.FINISHED_STOPPED, STOP),
        (a_request(stop=(EOS,)), [EOS], RequestStatus.FINISHED_STOPPED, None),  # end of sequence is checked first
        (a_request(stop=(EOS,), ignore_eos=True), [EOS], RequestStatus.FINISHED_STOPPED, EOS),
        (a_request(ignore_eos=True, max_tokens=2), [EOS, EOS], RequestStatus.FINISHED_LENGTH, None),
        (a_request(max_tokens=3), [WORD, WORD, WORD], RequestStatus.FINISHED_LENGTH, None),
        (a_request(max_tokens=2), [WORD, EOS], RequestStatus.FINISHED_STOPPED, None),  # stop precedes length
        (a_request(prompt=30, max_tokens=9), [WORD, WORD], RequestStatus.FINISHED_LENGTH, None),  # max_model_len 32
        (a_request(min_tokens=3), [EOS, EOS, EOS], RequestStatus.FINISHED_STOPPED, None),  # the third one counts
        (a_request(min_tokens=2, stop=(STOP,)), [STOP, WORD, STOP], RequestStatus.FINISHED_STOPPED, STOP),
        (a_request(min_tokens=2, max_tokens=2), [EOS, EOS], RequestStatus.FINISHED_STOPPED, None),
        (a_request(prompt=30, min_tokens=5), [EOS, EOS], RequestStatus.FINISHED_LENGTH, None),  # length always ends
    ],
)
def test_a_request_ends_at_its_last_token_and_not_before(
    request_: Request, tokens: list[int], status: RequestStatus, stop_token_id: int | None
) -> None:
    request = Request.of("a", request_.token_ids, request_.sampling, arrival_time=0.0)
    scheduler = a_scheduler(length=32)
    add(scheduler, request)
    ends: list[RequestStatus | None] = []
    for token in tokens:
        ((sampled, token_id, end),) = finish_step(scheduler, scheduler.schedule(0.0), token)
        assert (sampled, token_id) == (request, token)
        ends.append(end)
    assert ends == [None] * (len(tokens) - 1) + [status]
    assert request.status is status
    assert request.stop_token_id == stop_token_id
    assert request.token_ids[request.num_prompt_tokens :] == tokens
    assert scheduler.is_idle
    scheduler.check_integrity()


def test_the_number_of_sampled_tokens_must_match_the_batch() -> None:
    scheduler = a_scheduler()
    add(scheduler, a_request())
    batch = scheduler.schedule(0.0)
    with pytest.raises(ValueError, match="zip"):
        scheduler.update(batch, [WORD, WORD], 0.0)


# --- abort --------------------------------------------------------------------------------------------------------


def test_an_abort_frees_running_and_waiting_requests_and_ignores_unknown_ids() -> None:
    scheduler = a_scheduler(seqs=1)
    running, waiting = a_request("running"), a_request("waiting")
    add(scheduler, running, waiting)
    step(scheduler)
    assert scheduler.abort(["waiting", "nobody", "running", "running"]) == [waiting, running]
    assert running.status is waiting.status is RequestStatus.FINISHED_ABORTED
    assert scheduler.is_idle
    scheduler.check_integrity()


def test_an_abort_may_say_that_the_request_failed() -> None:
    scheduler = a_scheduler()
    request = a_request()
    add(scheduler, request)
    scheduler.abort(["a"], RequestStatus.FINISHED_ERROR)
    assert request.status is RequestStatus.FINISHED_ERROR


def test_abort_during_step_drops_only_its_token() -> None:
    scheduler = a_scheduler()
    requests = [a_request(name) for name in "abc"]
    add(scheduler, *requests)
    batch = scheduler.schedule(0.0)
    scheduler.abort(["b"])
    sampled = scheduler.update(batch, [11, 12, 13], 0.0)
    assert sampled == [
        (requests[0], 11, None),
        (requests[1], [], RequestStatus.FINISHED_ABORTED),
        (requests[2], 13, None),
    ]
    assert requests[1].num_output_tokens == 0
    assert scheduler.take_stats().num_generation_tokens == 2
    assert step(scheduler) == [("a", 1), ("c", 1)]


def test_reused_id_of_aborted_request_is_distinct() -> None:
    scheduler = a_scheduler()
    add(scheduler, a_request("a"))
    batch = scheduler.schedule(0.0)
    scheduler.abort(["a"])
    again = a_request("a", 3)
    add(scheduler, again)
    finish_step(scheduler, batch)
    assert again.num_output_tokens == 0
    assert step(scheduler) == [("a", 3)]


# --- preemption ---------------------------------------------------------------------------------------------------


def crowded() -> tuple[Scheduler, list[Request]]:
    """Three requests that fill 8 blocks up to the last token: the next one needs a block that is not there."""
    scheduler = a_scheduler(8, length=32)
    requests = [a_request("a", 12), a_request("b", 12), a_request("c", 8)]
    add(scheduler, *requests)
    assert step(scheduler) == [("a", 12), ("b", 12), ("c", 8)]
    return scheduler, requests


def test_the_request_admitted_last_is_preempted_and_computed_again_later() -> None:
    scheduler, (_, b, c) = crowded()
    batch = scheduler.schedule(3.0)
    assert [s.request.request_id for s in batch.sequences] == ["a", "b"]
    assert [(p.request, p.mode, p.reason) for p in batch.preempted] == [(c, "recompute", "capacity")]
    assert (c.status, c.num_computed_tokens, c.block_tables[0], c.num_preemptions) == (
        RequestStatus.PREEMPTED,
        0,
        [],
        1,
    )
    assert c.token_ids == [1] * 8 + [WORD]  # it keeps its sampled token
    finish_step(scheduler, batch)
    scheduler.check_integrity()
    scheduler.abort(["a"])
    batch = scheduler.schedule(5.0)
    assert [(s.request.request_id, s.num_tokens) for s in batch.sequences] == [("b", 1), ("c", 9)]
    stats = scheduler.take_stats()
    assert stats.preempted == {"recompute": {"capacity": 1}}
    assert stats.preempt_stall_seconds == [2.0]
    assert stats.recomputed_tokens == 8  # the ninth had not been computed before
    assert stats.num_prompt_tokens == 12 + 12 + 8  # each prompt counts once
    assert c.preempted_at is None
    assert b.num_preemptions == 0


def test_preempted_requests_return_before_newer_ones_in_their_old_order() -> None:
    scheduler = a_scheduler(24, length=32)
    add(scheduler, *(a_request(name, 20) for name in "abc"))
    step(scheduler)
    add(scheduler, a_request("d", 1))
    scheduler.resize_kv(8, 0.0)
    scheduler.resize_kv(24, 0.0)
    assert step(scheduler) == [("a", 1), ("b", 21), ("c", 21), ("d", 1)]


def test_in_a_step_that_preempted_nothing_is_admitted() -> None:
    scheduler, _ = crowded()
    add(scheduler, a_request("d", 1))
    assert [name for name, _ in step(scheduler)] == ["a", "b"]


def test_a_request_that_needs_a_block_itself_and_is_last_is_its_own_victim() -> None:
    scheduler = a_scheduler(8, length=32)
    add(scheduler, a_request("a", 19), a_request("b", 12))
    step(scheduler)
    assert step(scheduler) == [("a", 1)]  # b needs a ninth block and is the last one
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)


def test_a_request_alone_can_always_grow_to_max_model_len() -> None:
    scheduler = a_scheduler(8, length=32)
    request = a_request(prompt=1, max_tokens=31)
    add(scheduler, request, a_request("b", 1, max_tokens=31))
    while not request.status.is_finished:
        assert step(scheduler)
    assert request.num_tokens == 32
    assert request.num_preemptions == 0


def test_recomputed_tokens_count_only_computed_ones() -> None:
    scheduler = a_scheduler(16, tokens=36, length=32)
    add(scheduler, a_request("x", 28), a_request("a", 20))
    assert step(scheduler) == [("x", 28), ("a", 8)]
    scheduler.resize_kv(8, 0.0)
    scheduler.abort(["x"])
    steer(scheduler, max_num_seqs=4, max_num_batched_tokens=5)
    recomputed = []
    for _ in range(4):
        step(scheduler)
        recomputed.append(scheduler.take_stats().recomputed_tokens)
    assert recomputed == [5, 3, 0, 0]  # 8 of 20 prompt tokens had been computed


def test_second_preemption_keeps_recompute_watermark() -> None:
    scheduler = a_scheduler(16, tokens=40, length=32)
    add(scheduler, a_request("x", 28), a_request("a", 12))
    assert step(scheduler) == [("x", 28), ("a", 12)]
    scheduler.resize_kv(8, 0.0)
    scheduler.resize_kv(16, 0.0)
    steer(scheduler, max_num_seqs=4, max_num_batched_tokens=5)
    assert step(scheduler) == [("x", 1), ("a", 4)]
    assert scheduler.take_stats().recomputed_tokens == 4
    scheduler.resize_kv(8, 0.0)
    scheduler.abort(["x"])
    steer(scheduler, max_num_batched_tokens=40)
    assert step(scheduler) == [("a", 13)]
    assert scheduler.take_stats().recomputed_tokens == 12  # not only the 4 of the second time


# --- limits that move ---------------------------------------------------------------------------------------------


def test_a_lowered_max_num_seqs_drains_down() -> None:
    scheduler = a_scheduler()
    add(scheduler, *(a_request(name, max_tokens=3) for name in "abc"))
    step(scheduler)
    steer(scheduler, max_num_seqs=1)
    add(scheduler, a_request("d"))
    assert [name for name, _ in step(scheduler)] == ["a", "b", "c"]  # running requests continue
    assert [name for name, _ in step(scheduler)] == ["a", "b", "c"]
    assert [name for name, _ in step(scheduler)] == ["d"]


def test_a_raised_max_num_seqs_admits_in_the_next_step() -> None:
    scheduler = a_scheduler(seqs=1)
    add(scheduler, a_request("a"), a_request("b"))
    step(scheduler)
    steer(scheduler, max_num_seqs=2)
    assert step(scheduler) == [("a", 1), ("b", 5)]


def test_max_num_batched_tokens_takes_effect_in_the_next_step() -> None:
    scheduler = a_scheduler(tokens=8)
    add(scheduler, a_request("a", 30))
    assert step(scheduler) == [("a", 8)]
    steer(scheduler, max_num_batched_tokens=16)
    assert step(scheduler) == [("a", 16)]


@pytest.mark.parametrize(
    ("chunked", "limits", "message"),
    [
        (True, {"max_num_seqs": 0}, "at least max_num_seqs 0, and that at least 1"),
        (True, {"max_num_seqs": 65}, "max_num_batched_tokens 64 must be at least max_num_seqs 65"),
        (True, {"max_num_batched_tokens": 7}, "max_num_batched_tokens 7 must be at least max_num_seqs 8"),
        (False, {"max_num_batched_tokens": 31}, "at least max_model_len 32"),
    ],
)
def test_limits_that_could_not_work_are_refused_and_change_nothing(
    chunked: bool, limits: dict[str, int], message: str
) -> None:
    scheduler = a_scheduler(chunked=chunked)
    with pytest.raises(ValueError, match=message):
        steer(scheduler, **limits)
    add(scheduler, a_request("a", 30))
    assert step(scheduler) == [("a", 30)]


# --- a KV cache that moves ----------------------------------------------------------------------------------------


def test_growing_the_kv_cache_lets_more_run() -> None:
    scheduler = a_scheduler(8, cap=16)
    add(scheduler, a_request("a", 20), a_request("b", 20))
    assert step(scheduler) == [("a", 20)]
    result = scheduler.resize_kv(16, 0.0)
    assert (result.moves, result.preempted) == ((), [])
    assert step(scheduler) == [("a", 1), ("b", 20)]


def test_shrink_to_used_blocks_preempts_nothing() -> None:
    scheduler = a_scheduler(16)
    first, second = a_request("first", 20), a_request("second", 20)
    add(scheduler, first, second)
    step(scheduler)
    assert (first.block_tables[0], second.block_tables[0]) == ([0, 1, 2, 3, 4], [5, 6, 7, 8, 9])
    scheduler.abort(["first"])
    result = scheduler.resize_kv(8, 0.0)
    assert (result.moves, result.preempted) == (((8, 0), (9, 1)), [])
    assert second.block_tables[0] == [5, 6, 7, 0, 1]
    scheduler.check_integrity()
    assert step(scheduler) == [("second", 1)]


def test_shrink_below_used_blocks_preempts_in_victim_order() -> None:
    scheduler = a_scheduler(24, length=32)
    requests = [a_request(name, 20) for name in "abcd"]
    add(scheduler, *requests)
    step(scheduler)
    result = scheduler.resize_kv(12, 1.0)
    assert [preempted.request.request_id for preempted in result.preempted] == ["d", "c"]
    scheduler.check_integrity()
    assert scheduler.take_stats().preempted == {"recompute": {"resize": 2}}
    assert step(scheduler) == [("a", 1), ("b", 1)]
    scheduler.abort(["a", "b"])
    assert step(scheduler, now=4.0) == [("c", 21), ("d", 20)]  # in their old order
    assert scheduler.take_stats().preempt_stall_seconds == [3.0, 3.0]


def test_a_request_preempted_by_a_resize_while_its_step_runs_keeps_the_token() -> None:
    scheduler = a_scheduler(16)
    a, b = a_request("a", 20), a_request("b", 20, max_tokens=1)
    add(scheduler, a, b)
    batch = scheduler.schedule(0.0)
    scheduler.resize_kv(8, 0.0)
    assert b.status is RequestStatus.PREEMPTED
    assert scheduler.update(batch, [11, 12], 0.0) == [(a, 11, None), (b, 12, RequestStatus.FINISHED_LENGTH)]
    scheduler.check_integrity()
    assert scheduler.num_waiting == 0


def test_a_kv_cache_too_small_for_one_request_is_refused() -> None:
    with pytest.raises(ValueError, match="7 KV blocks cannot hold one request of max_model_len 32, which needs 8"):
        a_scheduler(7, length=32)
    scheduler = a_scheduler(8, length=32)
    with pytest.raises(ValueError, match="needs 8"):
        scheduler.resize_kv(7, 0.0)


# --- reports ------------------------------------------------------------------------------------------------------


def test_blocked_time_is_recorded_by_reason() -> None:
    scheduler = a_scheduler(8, seqs=2, tokens=16, length=32)
    add(scheduler, a_request("a", 12, max_tokens=9), a_request("b", 5, max_tokens=9), a_request("c", 20))
    step(scheduler, now=0.0)  # b got a chunk of 4, the budget is spent, and both slots are taken
    step(scheduler, now=1.0)
    assert scheduler.take_stats().blocked_seconds == {"seqs": 1.0}
    steer(scheduler, max_num_seqs=4)
    step(scheduler, now=3.0)
    step(scheduler, now=7.0)
    assert scheduler.take_stats().blocked_seconds == {"seqs": 2.0, "kv": 4.0}


def test_spent_budget_is_blocked_reason() -> None:
    scheduler = a_scheduler(tokens=16)
    add(scheduler, a_request("a", 30), a_request("b", 5))
    step(scheduler, now=0.0)
    step(scheduler, now=0.5)
    assert scheduler.take_stats().blocked_seconds == {"tokens": 0.5}


def test_blocked_time_is_recorded_at_step_end() -> None:
    scheduler = a_scheduler(seqs=1)
    add(scheduler, a_request("a"), a_request("b"))
    finish_step(scheduler, scheduler.schedule(1.0), now=1.5)
    assert scheduler.take_stats().blocked_seconds == {"seqs": 0.5}
    scheduler.schedule(1.75)
    assert scheduler.take_stats().blocked_seconds == {"seqs": 0.25}


def test_admitted_request_stops_blocked_time() -> None:
    scheduler = a_scheduler(seqs=1)
    add(scheduler, a_request("a", max_tokens=1), a_request("b"))
    for now in (0.0, 1.0, 5.0):
        step(scheduler, now=now)
    assert scheduler.take_stats().blocked_seconds == {"seqs": 1.0}


def test_an_empty_queue_is_not_blocked() -> None:
    scheduler = a_scheduler(seqs=1)
    add(scheduler, a_request("a"), a_request("b"))
    step(scheduler, now=0.0)
    scheduler.abort(["b"])
    step(scheduler, now=9.0)
    assert scheduler.take_stats().blocked_seconds == {}


def test_prompt_and_output_tokens_are_counted_once() -> None:
    scheduler = a_scheduler(tokens=8)
    add(scheduler, a_request("a", 9, max_tokens=3))
    counted = []
    while not scheduler.is_idle:
        step(scheduler)
        stats = scheduler.take_stats()
        counted.append((stats.num_prompt_tokens, stats.num_generation_tokens))
    assert counted == [(0, 0), (9, 1), (0, 1), (0, 1)]  # the second step computes only the prompt's last token


def test_the_time_of_the_first_step_is_kept_over_a_preemption() -> None:
    scheduler = a_scheduler(16)
    request = a_request("late")
    add(scheduler, a_request("first", 30), request)
    step(scheduler, now=2.0)
    scheduler.resize_kv(8, now=3.0)
    scheduler.resize_kv(16, now=3.0)
    assert step(scheduler, now=4.0) == [("first", 1), ("late", 6)]
    assert (request.first_scheduled_time, request.num_preemptions) == (2.0, 1)


def test_remaining_tokens_sum_output_limits() -> None:
    scheduler = a_scheduler(length=32)
    add(scheduler, a_request("a", 5, max_tokens=10), a_request("b", 30, max_tokens=10))
    assert scheduler.remaining_tokens() == 12  # b may only reach max_model_len
    step(scheduler)
    assert scheduler.remaining_tokens() == 10
    assert scheduler.unfinished_request_ids() == ["a", "b"]


# --- invariants ---------------------------------------------------------------------------------------------------


def test_a_broken_invariant_is_named() -> None:
    scheduler = a_scheduler()
    request = a_request()
    add(scheduler, request)
    request.status = RequestStatus.FINISHED_ERROR
    with pytest.raises(IntegrityError, match="request a waits, but its status is FINISHED_ERROR"):
        scheduler.check_integrity()
    request.status = RequestStatus.WAITING
    request.num_computed_tokens = 1
    with pytest.raises(IntegrityError, match="request a waits, but holds computed tokens or blocks"):
        scheduler.check_integrity()
    request.num_computed_tokens = 0
    step(scheduler)
    request.status = RequestStatus.PREEMPTED
    with pytest.raises(IntegrityError, match="request a runs, but its status is PREEMPTED"):
        scheduler.check_integrity()
    request.status = RequestStatus.RUNNING
    request.num_computed_tokens = 99
    with pytest.raises(IntegrityError, match="has 99 computed of 6 tokens"):
        scheduler.check_integrity()


# --- pipeline stages ----------------------------------------------------------------------------------------------


def test_two_steps_in_flight_share_no_request() -> None:
    scheduler = a_scheduler(stages=2)
    add(scheduler, *(a_request(name, prompt=2) for name in "abcde"))
    finish_step(scheduler, scheduler.schedule(0.0))
    first = scheduler.schedule(0.0)
    held = [s.request.request_id for s in first.sequences]
    second = scheduler.schedule(0.0)
    also_held = [s.request.request_id for s in second.sequences]
    assert (held, also_held) == (["a", "b", "c"], ["d", "e"])
    assert scheduler.schedule(0.0).sequences == [], "the tokens of all are awaited"
    scheduler.update(first, [WORD] * 3, 0.0)
    third = scheduler.schedule(0.0)
    assert [s.request.request_id for s in third.sequences] == ["a", "b", "c"]
    scheduler.update(second, [WORD] * 2, 0.0)
    scheduler.update(third, [EOS] * 3, 0.0)
    scheduler.check_integrity()
    assert scheduler.num_running == 2


def test_a_request_that_is_preempted_while_it_is_in_flight_keeps_its_token() -> None:
    scheduler = a_scheduler(blocks=8, length=32, stages=2)
    first, second = a_request("a", prompt=15, max_tokens=17), a_request("b", prompt=15, max_tokens=17)
    add(scheduler, first, second)
    finish_step(scheduler, scheduler.schedule(0.0))
    one, two = scheduler.schedule(0.0), scheduler.schedule(0.0)
    scheduler.update(one, [WORD], 0.0)
    again = scheduler.schedule(0.0)  # a's seventeenth token needs a fifth block: b gives up its four
    assert [p.request.request_id for p in again.preempted] == ["b"]
    scheduler.update(two, [WORD], 0.0)
    scheduler.update(again, [WORD], 0.0)
    scheduler.check_integrity()
    assert (first.num_output_tokens, second.num_output_tokens) == (3, 2)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_no_prompt_takes_a_decode_s_place_in_the_steps_in_flight(stages: int) -> None:
    scheduler = a_scheduler(400, stages=stages, tokens=16, length=200, scheduling_policy="priority")
    decodes = [a_request(name, 2, max_tokens=100, ignore_eos=True) for name in "abcdefg"]
    urgent = a_request("urgent", 190)
    urgent.priority = -1
    add(scheduler, *decodes)
    finish_step(scheduler, scheduler.schedule(0.0))
    add(scheduler, urgent)
    flights: deque[Batch] = deque()
    for _ in range(8 * stages):
        while len(flights) < stages:
            batch = scheduler.schedule(0.0)
            flights.append(replace(batch, sequences=list(batch.sequences)))
        in_flight = [request for batch in flights for request in batch.sampling]
        assert sorted(r.request_id for r in in_flight) == list("abcdefg"), "each is in one of them"
        batch = flights.popleft()
        scheduler.update(batch, [WORD] * len(batch.sampling), 0.0)
        scheduler.check_integrity()
    assert urgent.num_computed_tokens > 50, "it moves on in the places that are left"


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_steps_in_flight_sample_each_position_once(stages: int, mode: str) -> None:
    """Including a request preempted in flight while another one's end frees room."""
    preempted_in_flight = 0
    for seed in range(60):
        dice = random.Random(seed)
        scheduler = a_scheduler(blocks=8, stages=stages, tokens=24, swap=50, preemption_mode=mode)
        requests = [
            a_request(f"r{n}", dice.randint(1, 12), max_tokens=dice.randint(1, 12), ignore_eos=True) for n in range(8)
        ]
        add(scheduler, *requests)
        flights: deque[tuple[Batch, list[int]]] = deque()
        while not scheduler.is_idle:
            while len(flights) < stages:
                batch = scheduler.schedule(0.0)
                preempted_in_flight += sum(p.request.num_pending_tokens > 0 for p in batch.preempted)
                if not batch.sequences:
                    break
                flights.append((batch, [s.start + s.num_tokens for s in batch.sequences if s.samples]))
            batch, positions = flights.popleft()
            scheduler.update(batch, [100 + position for position in positions], 0.0)
            scheduler.check_integrity()
        for request in requests:
            known = request.num_prompt_tokens
            assert request.token_ids[known:] == [100 + position for position in range(known, request.max_num_tokens)]
    assert preempted_in_flight > 0


# --- prompts that are pooled --------------------------------------------------------------------------------------


def to_pool(request_id: str = "p", prompt: int = 10, method: PoolingMethod = "mean") -> Request:
    return Request.of(request_id, [1] * prompt, Sampling(), arrival_time=0.0, pooling=Pooling(method))


def test_pooled_prompt_ends_with_its_last_token() -> None:
    scheduler = a_scheduler(tokens=6, seqs=4)
    request = to_pool(prompt=10)
    add(scheduler, request, a_request("a", 2, max_tokens=1))
    first = scheduler.schedule(0.0)
    assert [s.num_tokens for s in first.sequences] == [6]
    assert (first.pooling, first.sampling, first.kind) == ([], [], "prefill")
    finish_step(scheduler, first)
    last = scheduler.schedule(0.0)
    assert [(s.request.request_id, s.num_tokens, s.samples) for s in last.sequences] == [
        ("p", 4, False),
        ("a", 2, True),
    ]
    assert (last.pooling, [r.request_id for r in last.sampling]) == ([request], ["a"])
    assert scheduler.remaining_tokens() == 1, "of the other one"
    finish_step(scheduler, last)
    assert (request.status, request.num_output_tokens) == (RequestStatus.FINISHED_STOPPED, 0)
    assert scheduler.is_idle
    stats = scheduler.take_stats()
    assert (stats.num_prompt_tokens, stats.num_generation_tokens) == (12, 1)


@pytest.mark.parametrize(("method", "num_cached"), [("last", 8), ("mean", 0)])
def test_only_mean_pooling_skips_prefix_cache(method: PoolingMethod, num_cached: int) -> None:
    scheduler = a_scheduler(caching=True)
    add(scheduler, a_request("a", 10, max_tokens=1))
    step(scheduler)
    request = to_pool(method=method)
    add(scheduler, request)
    assert step(scheduler) == [("p", 10 - num_cached)]
    assert request.num_cached_tokens == num_cached


def test_a_prompt_that_is_pooled_may_fill_the_context() -> None:
    scheduler = a_scheduler(length=32)
    add(scheduler, to_pool("fits", 32))
    assert step(scheduler) == [("fits", 32)]
    with pytest.raises(InvalidRequest, match="the prompt has 33 tokens, but max_model_len is 32; shorten the prompt"):
        scheduler.add(to_pool("longer", 33))


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted_pooling_in_last_step_is_not_recomputed(mode: str) -> None:
    """Its blocks are taken by a decode while that step is in flight, and room is free again soon."""
    scheduler = a_scheduler(blocks=8, tokens=8, stages=3, swap=8, preemption_mode=mode)
    decode, request = a_request("a", 15, max_tokens=17), to_pool(prompt=15)
    add(scheduler, decode)
    while decode.num_output_tokens == 0:
        finish_step(scheduler, scheduler.schedule(0.0))
    add(scheduler, request)
    first = replace(batch := scheduler.schedule(0.0), sequences=list(batch.sequences))
    last = replace(batch := scheduler.schedule(0.0), sequences=list(batch.sequences))
    assert (first.sampling, first.pooling) == ([decode], [])
    assert (last.sampling, last.pooling) == ([], [request])
    scheduler.update(first, [WORD], 0.0)
    again = scheduler.schedule(0.0)  # a fifth block for the decode
    assert [(p.request, p.mode) for p in again.preempted] == [(request, mode)]
    scheduler.abort(["a"])
    assert scheduler.schedule(0.0).sequences == [], "its pooled result is pending"
    scheduler.check_integrity()
    scheduler.update(last, [], 0.0)
    assert request.status is RequestStatus.FINISHED_STOPPED
    assert scheduler.is_idle
    assert scheduler.num_blocks_used == 0
    scheduler.check_integrity()

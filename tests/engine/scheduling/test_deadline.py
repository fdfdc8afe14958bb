"""The queue order `deadline`: lateness, the two lines, the late share, and live changes.

test_waiting_queue.py compares the lines with a reference model; test_scheduler_properties.py runs property tests.
"""

import random
from dataclasses import replace
from typing import Any

import engine_builders
import pytest
from trimtab_engine.errors import IntegrityError
from trimtab_engine.scheduling.block_manager import BlockManager
from trimtab_engine.scheduling.policy import SchedulingPolicy
from trimtab_engine.scheduling.request import Request
from trimtab_engine.scheduling.scheduler import Scheduler
from trimtab_engine.scheduling.swap_space import SwapSpace

BLOCK_SIZE = 4
WORD = 5
LATEST = 7.5  # seconds of waiting after which a request with an allowance of 10 is late


def a_scheduler(blocks: int = 100, *, seqs: int = 1, tokens: int = 64, length: int = 32, **policy: Any) -> Scheduler:
    """Return a scheduler with one sequence slot and a TTFT allowance of 10 s by default."""
    values = {"scheduling_policy": "deadline", "ttft_target": 10.0, "enable_prefix_caching": False, **policy}
    return Scheduler(
        BlockManager(blocks, blocks, BLOCK_SIZE, SwapSpace(0, 0)),
        SchedulingPolicy(max_num_seqs=seqs, max_num_batched_tokens=tokens, **values),
        max_model_len=length,
    )


def add(scheduler: Scheduler, request_id: str, arrival: float = 0.0, *, prompt: int = 4, output: int = 1) -> Request:
    request = engine_builders.a_request(
        [1] * prompt, request_id=request_id, arrival_time=arrival, max_tokens=output, temperature=0.0
    )
    scheduler.add(request)
    return request


def step(scheduler: Scheduler, now: float) -> list[str]:
    """Run one step and return its request ids in order."""
    batch = scheduler.schedule(now)
    scheduler.update(batch, [WORD] * len(batch.sampling), now)
    scheduler.check_integrity()
    return [sequence.request.request_id for sequence in batch.sequences]


def served(scheduler: Scheduler, now: float) -> list[str]:
    """Return request ids in service order until the queue is empty, all at the same time."""
    held: list[str] = []
    while not scheduler.is_idle:
        held += step(scheduler, now)
    return held


def steer(scheduler: Scheduler, **changes: Any) -> None:
    scheduler.set_policy(replace(scheduler.policy, **changes))


# --- lateness -----------------------------------------------------------------------------------------------------


def timed_step(scheduler: Scheduler, begin: float, seconds: float) -> None:
    batch = scheduler.schedule(begin)
    scheduler.update(batch, [WORD] * len(batch.sampling), begin + seconds)


@pytest.mark.parametrize(
    ("prompt", "seconds", "latest"), [(4, 1.0, 9.0), (24, 1.0, 8.0), (24, 3.0, 5.0), (4, 0.01, 9.99)]
)
def test_measured_prompt_time_reduces_allowance(prompt: int, seconds: float, latest: float) -> None:
    scheduler = a_scheduler(tokens=16)  # 24 tokens take two steps
    add(scheduler, "running", output=9)
    timed_step(scheduler, 0.0, seconds)
    waiting = add(scheduler, "waiting", 1.0, prompt=prompt)
    timed_step(scheduler, 1.0 + latest, 0.05)  # decodes do not measure prompts
    assert not waiting.is_late
    timed_step(scheduler, 1.0 + latest + 0.001, 0.05)
    assert waiting.is_late


def test_overlapped_step_time_starts_after_previous_step() -> None:
    scheduler = a_scheduler(seqs=2, tokens=16)
    add(scheduler, "first", prompt=14, output=9)
    add(scheduler, "second", prompt=14, output=9)
    first = scheduler.schedule(0.0)
    second = scheduler.schedule(0.1)  # while the first computes
    assert (first.computes_prompts, second.computes_prompts) == (True, True)
    for batch, end in ((first, 1.0), (second, 2.0)):
        scheduler.update(batch, [WORD] * len(batch.sampling), end)
    waiting = add(scheduler, "waiting", 2.0)
    timed_step(scheduler, 2.0 + 9.0, 0.05)
    assert not waiting.is_late
    timed_step(scheduler, 2.0 + 9.001, 0.05)
    assert waiting.is_late


def test_a_backlog_that_is_late_at_once_keeps_its_order() -> None:
    scheduler = a_scheduler()
    running = add(scheduler, "running", output=9)
    step(scheduler, 0.0)
    requests = [add(scheduler, str(number), number / 100) for number in range(500)]
    requests.append(add(scheduler, "in time", 90.0))
    step(scheduler, 90.0)
    assert [request.is_late for request in requests] == [True] * 500 + [False]
    assert scheduler.num_waiting_late == 500
    scheduler.abort([running.request_id])
    assert served(scheduler, 90.0) == ["in time", *(str(number) for number in range(500))]


def test_single_slow_step_is_forgotten() -> None:
    scheduler = a_scheduler()
    for number, seconds in enumerate([60.0, *[0.1] * 80]):
        add(scheduler, str(number), 100.0 * number)
        timed_step(scheduler, 100.0 * number, seconds)
    add(scheduler, "running", 9000.0, output=9)
    timed_step(scheduler, 9000.0, 0.1)
    waiting = add(scheduler, "waiting", 9000.0)
    timed_step(scheduler, 9009.8, 0.1)
    assert not waiting.is_late
    timed_step(scheduler, 9009.95, 0.1)
    assert waiting.is_late


def test_unmeasured_request_is_late_after_75_percent_of_allowance() -> None:
    scheduler = a_scheduler()
    add(scheduler, "running", output=9)
    step(scheduler, 0.0)
    waiting = add(scheduler, "waiting", 1.0)
    step(scheduler, 1.0 + LATEST)
    assert not waiting.is_late
    step(scheduler, 1.0 + LATEST + 0.001)
    assert waiting.is_late
    assert scheduler.num_waiting_late == 1


def test_each_token_of_the_prompt_adds_to_the_allowance() -> None:
    scheduler = a_scheduler(ttft_target=2.0, ttft_target_per_prompt_token=0.5)
    add(scheduler, "running", output=9)
    step(scheduler, 0.0)
    long, short = add(scheduler, "long", prompt=20), add(scheduler, "short", prompt=4)
    step(scheduler, 0.75 * (2.0 + 0.5 * 20))
    assert (long.is_late, short.is_late) == (False, False)  # the next one is not checked
    step(scheduler, 0.75 * (2.0 + 0.5 * 20) + 0.001)
    assert (long.is_late, short.is_late) == (True, True)


def test_only_the_head_is_looked_at_and_again_while_the_new_head_is_late_too() -> None:
    scheduler = a_scheduler()
    running = add(scheduler, "running", output=2)
    step(scheduler, 0.0)
    requests = [add(scheduler, str(number), float(number)) for number in range(5)]
    step(scheduler, 2.5 + LATEST)
    assert [request.is_late for request in requests] == [True, True, True, False, False]
    assert running.status.is_finished
    assert scheduler.take_stats().num_late == 3
    assert step(scheduler, 2.5 + LATEST) == ["3"]
    assert scheduler.take_stats().num_late == 0  # each is counted once


def test_higher_target_resets_late_requests() -> None:
    scheduler = a_scheduler()
    add(scheduler, "running", output=9)
    step(scheduler, 0.0)
    late = add(scheduler, "late", output=4)
    step(scheduler, 8.0)
    assert late.is_late
    steer(scheduler, ttft_target=1000.0)
    assert not late.is_late
    add(scheduler, "in time", 8.0)
    scheduler.abort(["running"])
    assert served(scheduler, 8.0) == [*["late"] * 4, "in time"]


def test_larger_token_budget_resets_late_requests() -> None:
    scheduler = a_scheduler(tokens=4, length=64)
    add(scheduler, "running", output=20)
    timed_step(scheduler, 0.0, 1.0)
    late = add(scheduler, "late", 1.0, prompt=20)
    timed_step(scheduler, 1.0 + 5.5, 0.05)  # five steps of a second
    assert late.is_late
    steer(scheduler, max_num_batched_tokens=20)
    timed_step(scheduler, 1.0 + 5.6, 0.05)
    assert not late.is_late


def test_unchanged_policy_keeps_late_requests() -> None:
    scheduler = a_scheduler()
    backlog(scheduler, 3, 1)
    steer(scheduler)
    assert scheduler.num_waiting_late == 3


def test_request_late_twice_is_counted_once() -> None:
    scheduler = a_scheduler()
    add(scheduler, "running", output=30)
    step(scheduler, 0.0)
    requests = [add(scheduler, str(number)) for number in range(3)]
    counts = []
    changes: list[dict[str, Any]] = [
        {},
        {"ttft_target": 5.0},
        {"ttft_target": 1000.0},
        {"scheduling_policy": "fcfs"},
        {"scheduling_policy": "deadline", "ttft_target": 1.0},
    ]
    for change in changes:
        steer(scheduler, **change)
        step(scheduler, 8.0)
        counts.append((scheduler.num_waiting_late, scheduler.take_stats().num_late))
    assert counts == [(3, 3), (3, 0), (0, 0), (0, 0), (3, 0)]
    assert all(request.is_late for request in requests)


def test_frequent_policy_changes_do_not_starve_late_requests() -> None:
    scheduler = a_scheduler()
    backlog(scheduler, 2, 30)
    order = []
    for number in range(20):
        steer(scheduler, ttft_target=10.0 + number % 2 / 100)
        order += step(scheduler, 100.0)
    assert [order.index("late-0"), order.index("late-1")] == [9, 19]


def test_targets_that_change_live_count_from_the_next_step() -> None:
    scheduler = a_scheduler()
    add(scheduler, "running", output=9)
    step(scheduler, 0.0)
    waiting = add(scheduler, "waiting")
    step(scheduler, 4.0)
    assert not waiting.is_late
    steer(scheduler, ttft_target=4.0)
    assert not waiting.is_late
    step(scheduler, 4.0)
    assert waiting.is_late


def test_request_with_output_or_pending_token_is_never_late() -> None:
    scheduler = a_scheduler(seqs=3)
    answered = add(scheduler, "answered", output=9)
    step(scheduler, 0.0)
    fresh = add(scheduler, "fresh", output=9)
    batch = scheduler.schedule(0.0)
    steer(scheduler, max_num_seqs=1)
    scheduler.preempt_all(1.0)
    blocker = add(scheduler, "blocker", 100.0, output=9)
    assert not scheduler.schedule(100.0).sequences  # the tokens of both are in flight
    assert (answered.is_late, fresh.is_late, blocker.is_late) == (False, False, False)
    scheduler.update(batch, [WORD, WORD], 100.0)
    assert step(scheduler, 100.0) == ["answered"]
    step(scheduler, 200.0)
    assert (answered.is_late, fresh.is_late) == (False, False)
    assert not blocker.is_late  # it is not at the head
    scheduler.check_integrity()


def test_pending_first_token_counts_as_output() -> None:
    scheduler = a_scheduler()
    request = add(scheduler, "a", output=9)
    batch = scheduler.schedule(0.0)
    scheduler.preempt_all(1.0)
    assert not scheduler.schedule(100.0).sequences
    assert not request.is_late
    scheduler.update(batch, [WORD], 100.0)
    assert step(scheduler, 100.0) == ["a"]
    assert not request.is_late


def test_preempted_prefill_does_not_become_late() -> None:
    scheduler = a_scheduler(tokens=4, length=24)
    request = add(scheduler, "long", prompt=20)
    step(scheduler, 0.0)
    scheduler.preempt_all(1.0)
    assert request.num_output_tokens == 0
    add(scheduler, "in time", 20.0)
    assert step(scheduler, 20.0) == ["long"]
    assert not request.is_late


# --- how many steps a prompt takes --------------------------------------------------------------------------------


def late_after(scheduler: Scheduler, token_ids: list[int]) -> float:
    """Return the first tenth of a second at which a request with this prompt is late, waiting for a request in the only
    slot, if a prompt step takes a second.
    """
    add(scheduler, "running", 100.0, output=200)
    timed_step(scheduler, 100.0, 1.0)
    request = engine_builders.a_request(token_ids, request_id="waiting", arrival_time=200.0, max_tokens=1)
    scheduler.add(request)
    for tenth in range(101):
        timed_step(scheduler, 200.0 + tenth / 10, 0.0)
        if request.is_late:
            return tenth / 10
    raise AssertionError("it is not late at all")


def test_cached_prefix_reduces_prompt_steps() -> None:
    prompt = list(range(2, 42))
    for known, latest in ((0, 5.0), (20, 7.0), (36, 9.0), (40, 9.0)):  # five steps, three, one
        scheduler = a_scheduler(200, tokens=8, length=256, enable_prefix_caching=True)
        if known:
            request = engine_builders.a_request([*prompt[:known], 99], request_id="before", max_tokens=1)
            scheduler.add(request)
            for _ in range(8):
                timed_step(scheduler, 0.0, 1.0)
            assert request.status.is_finished
        assert late_after(scheduler, prompt) == pytest.approx(latest + 0.1), known


def test_lateness_queries_prefix_cache_only_if_decisive(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = a_scheduler(200, tokens=8, length=256, enable_prefix_caching=True)
    asked: list[Request] = []
    find_cached = BlockManager.find_cached

    def noted(blocks: BlockManager, request: Request) -> Any:
        asked.append(request)
        return find_cached(blocks, request)

    add(scheduler, "running", 100.0, output=200)
    timed_step(scheduler, 100.0, 1.0)
    monkeypatch.setattr(BlockManager, "find_cached", noted)
    requests = [add(scheduler, name, 200.0, prompt=40) for name in ("a", "b")]
    add(scheduler, "short", 200.0, prompt=8)
    timed_step(scheduler, 205.0, 0.0)
    assert not asked  # it can be in time with all of its steps
    timed_step(scheduler, 209.5, 0.0)
    assert not asked  # it cannot with one
    assert [request.is_late for request in requests] == [True, True]
    assert scheduler.num_waiting_late == 3


def test_a_prompt_that_is_cut_by_a_threshold_takes_more_steps() -> None:
    scheduler = a_scheduler(200, tokens=64, length=256, long_prefill_token_threshold=8)
    assert late_after(scheduler, [2] * 40) == pytest.approx(5.1)


def test_clock_before_arrival_is_not_late() -> None:
    scheduler = a_scheduler()
    request = add(scheduler, "early", 50.0)
    assert step(scheduler, 0.0) == ["early"]
    assert not request.is_late


# --- the two lines ------------------------------------------------------------------------------------------------


def backlog(scheduler: Scheduler, num_late: int, num_in_time: int, now: float = 100.0) -> None:
    """Queue late and on-time requests after a request that holds the only slot."""
    add(scheduler, "blocker", now, output=9)
    step(scheduler, now)
    for number in range(num_late):
        add(scheduler, f"late-{number}", now - 50)
    for number in range(num_in_time):
        add(scheduler, f"in-time-{number}", now)
    step(scheduler, now)
    scheduler.abort(["blocker"])


def test_on_time_requests_first_and_every_tenth_late() -> None:
    scheduler = a_scheduler()
    backlog(scheduler, 4, 25)
    assert scheduler.num_waiting_late == 4
    order = served(scheduler, 100.0)
    assert order[:9] == [f"in-time-{number}" for number in range(9)]
    assert [order.index(f"late-{number}") for number in range(4)] == [9, 19, 27, 28]


def test_only_late_requests_are_served_by_arrival() -> None:
    scheduler = a_scheduler()
    backlog(scheduler, 12, 0)
    assert served(scheduler, 100.0) == [f"late-{number}" for number in range(12)]


def test_blocked_late_head_is_not_passed() -> None:
    scheduler = a_scheduler(16, length=64)
    add(scheduler, "holder", 100.0, prompt=24, output=20)
    step(scheduler, 100.0)
    add(scheduler, "large and late", 50.0, prompt=47)
    for number in range(12):
        add(scheduler, f"in-time-{number}", 100.0)
    step(scheduler, 100.0)
    steer(scheduler, max_num_seqs=2)
    for number in range(9):
        assert step(scheduler, 100.0) == ["holder", f"in-time-{number}"]
    assert step(scheduler, 100.0) == ["holder"]
    scheduler.abort(["holder"])
    assert step(scheduler, 100.0) == ["large and late", "in-time-9"]


def test_admitted_late_request_is_no_longer_late() -> None:
    """It arrived first, so it precedes two later requests, which are preempted for it."""
    scheduler = a_scheduler(8, seqs=3, length=32)
    late = add(scheduler, "late", 0.0, prompt=7, output=20)
    for request_id in ("b", "c"):
        add(scheduler, request_id, 100.0, prompt=7, output=20)
    assert step(scheduler, 100.0) == ["b", "c", "late"]
    assert [request.request_id for request in scheduler.running_requests()] == ["late", "b", "c"]
    assert (late.is_late, late.was_late) == (False, True)
    served(scheduler, 100.0)
    assert late.num_preemptions == 0


def test_preempted_late_request_precedes_later_arrivals() -> None:
    scheduler = a_scheduler(8, length=32)
    backlog(scheduler, 2, 20)
    order = [step(scheduler, 100.0)[0] for _ in range(9)]
    assert scheduler.num_waiting_late == 2
    late = next(request for request in scheduler.unfinished() if request.request_id == "late-0")
    late.max_num_tokens += 5
    assert step(scheduler, 100.0) == ["late-0"]
    for now in (200.0, 300.0, 400.0):
        scheduler.preempt_all(now)
        assert step(scheduler, now) == ["late-0"]  # it precedes the late line's next admission
    assert order == [f"in-time-{number}" for number in range(9)]


def test_waiting_counts_cover_both_lines() -> None:
    scheduler = a_scheduler()
    backlog(scheduler, 2, 3)
    assert (scheduler.num_waiting, scheduler.num_waiting_late) == (5, 2)
    assert scheduler.num_waiting_tokens == 5 * 4
    assert scheduler.oldest_arrival() == 50.0
    scheduler.abort(["late-0", "in-time-1"])
    assert (scheduler.num_waiting, scheduler.num_waiting_late) == (3, 1)
    scheduler.check_integrity()
    scheduler.abort(["late-1"])
    assert (scheduler.num_waiting_late, scheduler.oldest_arrival()) == (0, 100.0)
    assert not scheduler.has_room_for(4)  # two wait for the only slot


# --- live changes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["fcfs", "priority"])
def test_policy_switch_resets_late_requests(order: str) -> None:
    scheduler = a_scheduler(seqs=2)
    add(scheduler, "late and running", 0.0, output=9)
    add(scheduler, "blocker", 100.0, output=9)
    step(scheduler, 100.0)
    waiting = add(scheduler, "late and waiting", 50.0)
    add(scheduler, "in time", 100.0)
    step(scheduler, 100.0)
    assert waiting.is_late
    steer(scheduler, scheduling_policy=order)
    assert not waiting.is_late
    assert scheduler.num_waiting_late == 0
    scheduler.check_integrity()
    assert step(scheduler, 100.0) == ["late and running", "blocker"]
    scheduler.abort(["blocker"])
    assert step(scheduler, 100.0) == ["late and running", "late and waiting"]
    steer(scheduler, scheduling_policy="deadline")
    scheduler.check_integrity()


def test_another_order_becomes_deadline_from_the_next_step() -> None:
    scheduler = a_scheduler(scheduling_policy="fcfs")
    backlog(scheduler, 2, 2)
    assert scheduler.num_waiting_late == 0
    steer(scheduler, scheduling_policy="deadline")
    assert scheduler.num_waiting_late == 0
    assert served(scheduler, 100.0) == ["in-time-0", "in-time-1", "late-0", "late-1"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ttft_target": 0.0}, "scheduling_policy is deadline, but ttft_target is 0; set ttft_target as well"),
        ({"ttft_target": -1.0}, "must be 0 or more"),
        ({"ttft_target_per_prompt_token": -1.0}, "must be 0 or more"),
    ],
)
def test_targets_that_could_not_work_are_refused_and_change_nothing(changes: dict[str, float], message: str) -> None:
    scheduler = a_scheduler()
    before = scheduler.policy
    with pytest.raises(ValueError, match=message):
        steer(scheduler, **changes)
    assert scheduler.policy is before


def test_targets_have_no_effect_without_deadline_policy() -> None:
    scheduler = a_scheduler(scheduling_policy="fcfs", ttft_target=0.001)
    backlog(scheduler, 2, 2)
    assert served(scheduler, 100.0) == ["late-0", "late-1", "in-time-0", "in-time-1"]
    assert scheduler.take_stats().num_late == 0


def test_a_late_request_that_runs_is_a_broken_invariant() -> None:
    scheduler = a_scheduler()
    add(scheduler, "a", output=9)
    step(scheduler, 0.0)
    scheduler.running_requests()[0].is_late = True
    with pytest.raises(IntegrityError, match=r"\['a'\] run and are late"):
        scheduler.check_integrity()


# --- overload -----------------------------------------------------------------------------------------------------


def share_in_time(order: str, *, load: float, target: float, seed: int) -> tuple[float, float]:
    """Return the on-time share of Poisson arrivals at `load` times the capacity of four slots with four seconds per
    request, and the longest wait for a first token.
    """
    scheduler = a_scheduler(seqs=4, scheduling_policy=order, ttft_target=target)
    dice, arrivals, at = random.Random(seed), list[float](), 0.0
    for _ in range(400):
        at += dice.expovariate(load)
        arrivals.append(at)
    pending, now, waits = list(enumerate(arrivals)), 0.0, dict[str, float]()
    came: dict[str, float] = {}
    while pending or not scheduler.is_idle:
        while pending and pending[0][1] <= now:
            number, arrival = pending.pop(0)
            came[str(number)] = arrival
            add(scheduler, str(number), arrival, output=4)
        batch = scheduler.schedule(now)
        now += 1.0
        scheduler.update(batch, [WORD] * len(batch.sampling), now)
        for request in batch.sampling:
            waits.setdefault(request.request_id, now - came[request.request_id])
    return sum(wait <= target for wait in waits.values()) / len(waits), max(waits.values())


@pytest.mark.parametrize("seed", range(3))
def test_deadline_serves_more_on_time_than_fcfs_in_overload(seed: int) -> None:
    """Capacity is one request per second. At 1.5 times that two thirds can be on time, of which one in ten is late;
    fcfs is on time only until its queue is as long as the target.
    """
    fcfs, _ = share_in_time("fcfs", load=1.5, target=12.0, seed=seed)
    deadline, longest = share_in_time("deadline", load=1.5, target=12.0, seed=seed)
    assert fcfs < 0.25
    assert deadline > 0.9 * 0.9 / 1.5
    assert longest < 400  # no request starves


@pytest.mark.parametrize("seed", range(3))
def test_deadline_equals_fcfs_below_capacity(seed: int) -> None:
    assert share_in_time("fcfs", load=0.5, target=40.0, seed=seed) == (
        share_in_time("deadline", load=0.5, target=40.0, seed=seed)
    )

"""The queue of waiting requests: its order, and the counts that it keeps instead of summing them every step."""

import random
from collections.abc import Callable
from typing import get_args

import engine_builders
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trimtab_engine.errors import IntegrityError
from trimtab_engine.scheduling.policy import QueueOrder, SchedulingPolicy
from trimtab_engine.scheduling.request import Request
from trimtab_engine.scheduling.waiting_queue import LATE_SHARE, MAX_STALE_ARRIVALS, WaitingQueue

ARRIVALS = st.floats(0, 1000)
ACTIONS = st.lists(st.tuples(st.integers(0, 8), st.integers(0, 3), ARRIVALS), max_size=80)
ORDERS = st.sampled_from(get_args(QueueOrder))
POLICY = SchedulingPolicy(
    max_num_seqs=1,
    max_num_batched_tokens=1,
    scheduling_policy="deadline",
    ttft_target=100.0,
    ttft_target_per_prompt_token=50.0,
)


def a_request(order: int, tokens: int = 3, arrival: float = 0.0, priority: int = 0) -> Request:
    request = engine_builders.a_request([1] * tokens, request_id=f"r{order}", arrival_time=arrival, priority=priority)
    request.order = order
    return request


def late_by(now: float) -> Callable[[Request], bool]:
    """Return a predicate for requests without a token that have waited too long at this time."""

    def is_too_late(request: Request) -> bool:
        waited = now - request.arrival_time
        return not request.num_output_tokens and POLICY.is_too_late(waited, request.num_prompt_tokens, 0.0)

    return is_too_late


@settings(max_examples=200, deadline=None)
@given(actions=ACTIONS, order=ORDERS, other=ORDERS)
def test_incremental_counts_match_requests(
    actions: list[tuple[int, int, float]], order: QueueOrder, other: QueueOrder
) -> None:
    queue, taken, number = WaitingQueue(order), list[Request](), 0
    for action, amount, arrival in actions:
        match action:
            case 0 | 1:
                queue.add(a_request(number, amount + 1, arrival, priority=amount))
                number += 1
            case 2 if queue:
                taken.append(queue.pop_head())
            case 3 if taken:  # preempted, with blocks in the swap space
                request = taken.pop()
                request.num_computed_tokens = min(amount, request.num_tokens)
                queue.add(request)
            case 4 if queue:
                changed = queue.head
                changed.token_ids += [1] * amount
                changed.num_computed_tokens = 0
                queue.update_token_count(changed)
            case 5 if queue:
                for request in list(queue)[::2][:amount]:
                    queue.remove(request)
            case 6 if queue.order == "deadline":
                queue.move_late_from_head(late_by(arrival))
            case 7:
                queue.reorder(other if amount else order)
            case 8:
                queue.reset_late()
        queue.check_integrity()


@settings(max_examples=300, deadline=None)
@given(actions=st.lists(st.tuples(st.sampled_from("aattttprxc"), st.integers(0, 40)), max_size=150))
def test_the_two_lines_are_as_written_down_without_a_sorted_list(actions: list[tuple[str, int]]) -> None:
    """Arrivals, admissions, preemptions, changes, and aborts of requests with allowances of 150 to 300 seconds."""
    queue, in_time, late, taken = WaitingQueue("deadline"), list[Request](), list[Request](), list[Request]()
    admitted, were_late = set[Request](), set[Request]()
    now, number, num_overtaking = 0.0, 0, 0
    for action, amount in actions:
        if action == "a":
            request = a_request(number, 1 + amount % 4, arrival=now)
            number += 1
            queue.add(request)
            in_time.append(request)
        elif action == "t":
            now += amount
            while in_time and in_time[0] not in admitted:
                allowance = 100 + 50 * in_time[0].num_prompt_tokens
                if now - in_time[0].arrival_time <= 0.75 * allowance:
                    break
                late.append(in_time.pop(0))
            late.sort(key=lambda request: request.order)
            is_too_late = late_by(now)
            num_new = queue.move_late_from_head(lambda request: request not in admitted and is_too_late(request))  # noqa: B023
            assert num_new == len(set(late) - were_late)
            were_late |= set(late)
        elif action == "p" and (in_time or late):
            is_turn = bool(late) and num_overtaking == 9
            request = late.pop(0) if is_turn or not in_time else in_time.pop(0)
            num_overtaking = 0 if request.is_late else num_overtaking + bool(late)
            assert queue.head is queue.pop_head() is request
            assert not request.is_late
            taken.append(request)
            admitted.add(request)
        elif action == "r" and taken:
            request = taken.pop(amount % len(taken))
            request.token_ids += [7] * (amount % 2)
            queue.add(request)
            in_time.append(request)
            in_time.sort(key=lambda request: request.order)
        elif action == "x":
            for request in [*in_time, *late][amount::11]:
                queue.remove(request)
                (late if request.is_late else in_time).remove(request)
        elif action == "c":
            queue.reset_late()
            in_time = sorted(in_time + late, key=lambda request: request.order)
            late = []
        assert list(queue) == [*in_time, *late]
        assert [request.is_late for request in queue] == [False] * len(in_time) + [True] * len(late)
        queue.check_integrity()


def test_every_tenth_admission_is_late() -> None:
    queue = WaitingQueue("deadline")
    for number in range(3):
        queue.add(a_request(number, arrival=0.0))
    assert queue.move_late_from_head(late_by(1000.0)) == 3
    for number in range(3, 40):
        queue.add(a_request(number, arrival=1000.0))
    taken = [queue.pop_head().order for _ in range(40)]
    assert [place for place, order in enumerate(taken) if order < 3] == [9, 19, 29]
    assert taken[9::LATE_SHARE][:3] == [0, 1, 2]
    assert [order for order in taken if order >= 3] == list(range(3, 40))


def test_late_admission_count_restarts_after_late_request() -> None:
    queue = WaitingQueue("deadline")
    for number in range(20):
        queue.add(a_request(number, arrival=1000.0))
    assert [queue.pop_head().order for _ in range(12)] == list(range(12))  # no late request waited
    late = a_request(100, arrival=0.0)
    late.is_late = True
    queue.add(late)
    assert [queue.pop_head().order for _ in range(8)] == list(range(12, 20))
    assert queue.pop_head() is late  # without on-time requests any admission may be late
    for number in range(20, 40):
        queue.add(a_request(number, arrival=1000.0))
    late.is_late = True
    queue.add(late)
    assert [queue.pop_head().order for _ in range(10)] == [*range(20, 29), 100]


def test_removal_from_large_queue_reads_few_requests() -> None:
    queue = WaitingQueue("fcfs")
    requests = [a_request(number, arrival=float(number)) for number in range(10_000)]
    for request in requests:
        queue.add(request)
    looked_at: list[Request] = []
    by_arrival = queue.key

    def noting(request: Request) -> tuple[float, ...]:
        looked_at.append(request)
        return by_arrival(request)

    queue.key = noting
    for request in requests[100:9_000:100]:
        queue.remove(request)
    assert len(looked_at) < 89 * 20
    queue.key = by_arrival
    queue.check_integrity()
    assert len(queue) == 10_000 - 89


def test_a_request_that_does_not_wait_is_not_counted() -> None:
    queue = WaitingQueue("fcfs")
    queue.add(a_request(0))
    request = queue.pop_head()
    request.token_ids.append(1)
    queue.update_token_count(request)
    assert (queue.num_tokens, queue.oldest_arrival) == (0, None)


def test_stale_arrivals_are_compacted() -> None:
    queue = WaitingQueue("priority")
    queue.add(a_request(0, arrival=0.0, priority=9))
    for number in range(1, 1000):
        queue.add(a_request(number, arrival=float(number)))
        queue.pop_head()
    assert queue.oldest_arrival == 0.0
    assert len(queue._arrivals) <= 2 * 2 + MAX_STALE_ARRIVALS + 1


def test_reorder_resets_late_state() -> None:
    queue = WaitingQueue("deadline")
    for number in range(2):
        queue.add(a_request(number, arrival=0.0))
    assert queue.move_late_from_head(late_by(1000.0)) == 2
    for number in range(2, 30):
        queue.add(a_request(number, arrival=1000.0))
    assert [queue.pop_head().order for _ in range(8)] == list(range(2, 10))
    queue.reorder("fcfs")
    assert queue.num_late == 0
    assert queue.head.order == 0
    queue.reorder("deadline")
    assert queue.move_late_from_head(late_by(1000.0)) == 0  # they have been counted
    assert queue.num_late == 2
    assert [queue.pop_head().order for _ in range(10)] == [*range(10, 19), 0]


def test_uncounted_late_request_violates_integrity() -> None:
    queue = WaitingQueue("deadline")
    for number in range(2):
        queue.add(a_request(number))
    first, last = queue
    first.is_late = True
    with pytest.raises(IntegrityError, match="not in the order"):
        queue.check_integrity()
    last.is_late = True
    with pytest.raises(IntegrityError, match="2 waiting requests are late; the queue reports 0"):
        queue.check_integrity()


def test_a_count_that_is_off_is_a_broken_invariant() -> None:
    queue = WaitingQueue("fcfs")
    queue.add(a_request(0))
    queue.head.token_ids.append(1)
    with pytest.raises(IntegrityError, match="4 tokens left"):
        queue.check_integrity()


@pytest.mark.parametrize("seed", range(20))
def test_late_share_holds_over_gaps_in_late_line(seed: int) -> None:
    """Late requests arrive, are admitted, and are aborted near their turn. While on-time requests wait, at least nine
    of them are admitted between two late ones, and the first late one waits for at most nine.
    """
    dice, queue, number = random.Random(seed), WaitingQueue("deadline"), 0
    since_late = waited = LATE_SHARE - 1
    for _ in range(2000):
        while len(queue) - queue.num_late < 3:
            queue.add(a_request(number, arrival=1000.0))
            number += 1
        if dice.random() < 0.1 and queue.num_late < 3:
            late = a_request(number, arrival=0.0)
            late.is_late = True
            number += 1
            waited = waited if queue.num_late else 0
            queue.add(late)
        if dice.random() < 0.1 and queue.num_late:
            queue.remove(next(request for request in queue if request.is_late))
            waited = 0
        was_late, had_late = queue.head.is_late, bool(queue.num_late)
        queue.pop_head()
        if was_late:
            assert since_late >= LATE_SHARE - 1
            since_late = waited = 0
        else:
            since_late += 1
            waited += had_late
            assert not queue.num_late or waited <= LATE_SHARE - 1

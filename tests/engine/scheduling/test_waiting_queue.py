"""The queue of waiting requests: its order, and the counts that it keeps instead of summing them every step."""

from typing import Literal

import engine_builders
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trimtab_engine.errors import IntegrityError
from trimtab_engine.scheduling.request import Request, RequestStatus
from trimtab_engine.scheduling.waiting_queue import MAX_STALE_ARRIVALS, WaitingQueue

ARRIVALS = st.floats(0, 1000)
ACTIONS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), ARRIVALS), max_size=80)


def a_request(order: int, tokens: int = 3, arrival: float = 0.0, priority: int = 0) -> Request:
    request = engine_builders.a_request([1] * tokens, request_id=f"r{order}", arrival_time=arrival, priority=priority)
    request.order = order
    return request


@settings(max_examples=200, deadline=None)
@given(actions=ACTIONS, order=st.sampled_from(["fcfs", "priority"]))
def test_the_kept_counts_are_those_of_the_requests(
    actions: list[tuple[int, int, float]], order: Literal["fcfs", "priority"]
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
                queue.recount(changed)
            case 5 if queue:
                for request in list(queue)[:amount]:
                    request.status = RequestStatus.FINISHED_ABORTED
                queue.drop_finished()
        queue.check_integrity()


def test_a_request_that_does_not_wait_is_not_counted() -> None:
    queue = WaitingQueue("fcfs")
    queue.add(a_request(0))
    request = queue.pop_head()
    request.token_ids.append(1)
    queue.recount(request)
    assert (queue.num_tokens, queue.oldest_arrival) == (0, None)


def test_arrivals_of_requests_that_left_are_forgotten_behind_one_that_stays() -> None:
    queue = WaitingQueue("priority")
    queue.add(a_request(0, arrival=0.0, priority=9))
    for number in range(1, 1000):
        queue.add(a_request(number, arrival=float(number)))
        queue.pop_head()
    assert queue.oldest_arrival == 0.0
    assert len(queue._arrivals) <= 2 * 2 + MAX_STALE_ARRIVALS + 1


def test_a_count_that_is_off_is_a_broken_invariant() -> None:
    queue = WaitingQueue("fcfs")
    queue.add(a_request(0))
    queue.head.token_ids.append(1)
    with pytest.raises(IntegrityError, match="4 tokens to go"):
        queue.check_integrity()

"""Which requests the queue takes: limits count what waits, and an empty queue takes any one request."""

import pytest
from msgspec.structs import replace
from trimtab_engine.api.openai.admission import Admission, QueueFull
from trimtab_engine.messages import EngineState


class Queue:
    """An Admission with a state and a clock that tests set."""

    def __init__(self, *, reqs: int = 0, tokens: int = 0, seats: int = 4, servers: int = 1) -> None:
        self.now = 10.0
        self.state = EngineState(max_num_queued_reqs=reqs, max_num_queued_tokens=tokens, max_num_seqs=seats)
        self.admission = Admission(lambda: self.state, servers, now=lambda: self.now)

    def report(self, *, running: int, waiting: int, late: int = 0) -> None:
        """The core says what it has, having read everything until now."""
        self.state = replace(self.state, num_running=running, num_waiting=waiting, num_waiting_late=late, time=self.now)
        self.now += 1.0

    def is_full(self, num_sequences: int = 1, num_tokens: int = 10) -> bool:
        try:
            self.admission.admit([num_tokens] * num_sequences).close()
        except QueueFull:
            return True
        return False


def test_without_limits_everything_is_admitted() -> None:
    queue = Queue()
    queue.report(running=4, waiting=10_000)
    for _ in range(100):
        queue.admission.admit([1_000_000] * 8)


@pytest.mark.parametrize(("waiting", "full"), [(0, False), (1, False), (2, True), (3, True)])
def test_as_many_requests_wait_as_the_limit_says(waiting: int, full: bool) -> None:
    queue = Queue(reqs=2)
    queue.report(running=4, waiting=waiting)
    assert queue.is_full() is full


@pytest.mark.parametrize(("in_time", "full"), [(0, False), (1, False), (2, True)])
def test_late_requests_refuse_nobody_who_would_be_served_before_them(in_time: int, full: bool) -> None:
    queue = Queue(reqs=2)
    queue.report(running=4, waiting=50 + in_time, late=50)
    assert queue.is_full() is full


def test_the_tokens_of_late_requests_count() -> None:
    queue = Queue(tokens=100)
    ticket = queue.admission.admit([60])
    queue.report(running=4, waiting=1, late=1)
    assert queue.is_full(num_tokens=50)
    ticket.close()


def test_each_choice_of_a_request_counts() -> None:
    queue = Queue(reqs=2)
    queue.report(running=4, waiting=1)
    assert queue.is_full(num_sequences=2)
    assert not queue.is_full(num_sequences=1)


def test_a_request_larger_than_the_limit_is_taken_when_nothing_waits() -> None:
    queue = Queue(reqs=2, tokens=50)
    queue.report(running=4, waiting=0)
    assert not queue.is_full(num_sequences=16, num_tokens=100)


def test_a_burst_that_the_core_has_not_seen_yet_counts_beyond_the_free_seats() -> None:
    queue = Queue(reqs=2, seats=4)
    queue.report(running=1, waiting=0)
    tickets = [queue.admission.admit([10]) for _ in range(5)]  # three find a seat, two will wait
    assert queue.is_full()
    queue.report(running=4, waiting=2)
    assert queue.is_full()
    queue.report(running=4, waiting=1)
    assert not queue.is_full()
    assert len(tickets) == 5


def test_with_requests_waiting_a_free_seat_is_none() -> None:
    queue = Queue(reqs=3, seats=4)
    queue.report(running=1, waiting=2)  # for KV blocks
    queue.admission.admit([10])
    assert queue.is_full()


def test_tokens_wait_until_the_first_output() -> None:
    queue = Queue(tokens=100)
    first, second = queue.admission.admit([60]), queue.admission.admit([30, 10])
    assert queue.admission.num_tokens == 100
    assert queue.is_full(num_tokens=1)
    second.started(0)
    second.started(0)
    assert queue.admission.num_tokens == 70
    assert not queue.is_full(num_tokens=30)
    first.close()
    second.close()
    second.close()
    assert queue.admission.num_tokens == 0


def test_a_request_that_has_output_is_not_in_the_queue_whatever_the_core_has_not_said() -> None:
    queue = Queue(reqs=1, seats=1)
    queue.report(running=1, waiting=0)
    ticket = queue.admission.admit([10])
    assert queue.is_full()
    ticket.started(0)
    assert not queue.is_full()


def test_several_servers_share_the_token_limit() -> None:
    queue = Queue(tokens=100, servers=4)
    queue.admission.admit([20])
    assert not queue.is_full(num_tokens=5)
    assert queue.is_full(num_tokens=6)


def test_the_refusal_says_which_limit_and_when_to_come_again() -> None:
    queue = Queue(reqs=2)
    queue.report(running=4, waiting=2)
    with pytest.raises(QueueFull) as full:
        queue.admission.admit([10])
    assert (full.value.status, full.value.reason) == (503, "max_num_queued_reqs")
    assert full.value.response().headers["retry-after"] == "1"
    assert "2 requests wait, and max_num_queued_reqs is 2" in full.value.message

"""Admission control: limits count waiting work, and an empty queue accepts any single request."""

import pytest
from msgspec.structs import replace
from trimtab_engine.api.openai.admission import Admission, QueueFull
from trimtab_engine.messages.admin import EngineState


class Queue:
    """An Admission with a state and a clock controlled by tests."""

    def __init__(self, *, reqs: int = 0, tokens: int = 0, seats: int = 4, servers: int = 1) -> None:
        self.now = 10.0
        self.state = EngineState(max_num_queued_reqs=reqs, max_num_queued_tokens=tokens, max_num_seqs=seats)
        self.admission = Admission(lambda: self.state, servers, now=lambda: self.now)

    def report(self, *, running: int, waiting: int, late: int = 0) -> None:
        """Report the core's counts, after it has received everything so far."""
        self.state = replace(self.state, num_running=running, num_waiting=waiting, num_waiting_late=late, time=self.now)
        self.now += 1.0

    def is_full(self, num_sequences: int = 1, num_tokens: int = 10) -> bool:
        try:
            self.admission.admit([num_tokens] * num_sequences).close()
        except QueueFull:
            return True
        return False


def test_no_limits_admit_everything() -> None:
    queue = Queue()
    queue.report(running=4, waiting=10_000)
    for _ in range(100):
        queue.admission.admit([1_000_000] * 8)


@pytest.mark.parametrize(("waiting", "full"), [(0, False), (1, False), (2, True), (3, True)])
def test_waiting_requests_are_limited(waiting: int, full: bool) -> None:
    queue = Queue(reqs=2)
    queue.report(running=4, waiting=waiting)
    assert queue.is_full() is full


@pytest.mark.parametrize(("in_time", "full"), [(0, False), (1, False), (2, True)])
def test_late_requests_do_not_block_requests_ahead_of_them(in_time: int, full: bool) -> None:
    queue = Queue(reqs=2)
    queue.report(running=4, waiting=50 + in_time, late=50)
    assert queue.is_full() is full


def test_tokens_of_late_requests_count() -> None:
    queue = Queue(tokens=100)
    ticket = queue.admission.admit([60])
    queue.report(running=4, waiting=1, late=1)
    assert queue.is_full(num_tokens=50)
    ticket.close()


def test_each_choice_counts() -> None:
    queue = Queue(reqs=2)
    queue.report(running=4, waiting=1)
    assert queue.is_full(num_sequences=2)
    assert not queue.is_full(num_sequences=1)


def test_empty_queue_accepts_request_above_limit() -> None:
    queue = Queue(reqs=2, tokens=50)
    queue.report(running=4, waiting=0)
    assert not queue.is_full(num_sequences=16, num_tokens=100)


def test_burst_unknown_to_core_counts_beyond_free_slots() -> None:
    queue = Queue(reqs=2, seats=4)
    queue.report(running=1, waiting=0)
    tickets = [queue.admission.admit([10]) for _ in range(5)]  # three get a slot, two will wait
    assert queue.is_full()
    queue.report(running=4, waiting=2)
    assert queue.is_full()
    queue.report(running=4, waiting=1)
    assert not queue.is_full()
    assert len(tickets) == 5


def test_free_slot_does_not_count_while_requests_wait() -> None:
    queue = Queue(reqs=3, seats=4)
    queue.report(running=1, waiting=2)  # for KV blocks
    queue.admission.admit([10])
    assert queue.is_full()


def test_tokens_count_until_first_output() -> None:
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


def test_request_with_output_is_not_queued_despite_stale_core_state() -> None:
    queue = Queue(reqs=1, seats=1)
    queue.report(running=1, waiting=0)
    ticket = queue.admission.admit([10])
    assert queue.is_full()
    ticket.started(0)
    assert not queue.is_full()


def test_servers_share_the_token_limit() -> None:
    queue = Queue(tokens=100, servers=4)
    queue.admission.admit([20])
    assert not queue.is_full(num_tokens=5)
    assert queue.is_full(num_tokens=6)


def test_rejection_names_limit_and_retry_after() -> None:
    queue = Queue(reqs=2)
    queue.report(running=4, waiting=2)
    with pytest.raises(QueueFull) as full:
        queue.admission.admit([10])
    assert (full.value.status, full.value.reason) == (503, "max_num_queued_reqs")
    assert full.value.response().headers["retry-after"] == "1"
    assert "2 requests are waiting and max_num_queued_reqs is 2" in full.value.message

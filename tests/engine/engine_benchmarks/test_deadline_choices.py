"""The table of other choices for the order `deadline`: deterministic, as its time is virtual."""

from engine_benchmarks.deadline_choices import (
    CHOICES,
    ENGINE,
    NEVER,
    Choice,
    late_share,
    requests_of,
    serve,
    served_at_most,
)
from trimtab_engine.scheduling import waiting_queue


def test_the_late_ones_share_is_the_engine_s_again_afterwards() -> None:
    assert ENGINE.late_share == waiting_queue.LATE_SHARE
    with late_share(3):
        assert waiting_queue.LATE_SHARE == 3
    assert ENGINE.late_share == waiting_queue.LATE_SHARE


def test_what_was_chosen_is_seen_in_one_load() -> None:
    """Who is admitted last needs time for its prompt, and the late ones' share bounds their wait."""
    rate = 1.5 * served_at_most(0)
    own, again, fcfs, all_of_it, none = (
        serve(requests_of(0, rate), choice, 2.0)
        for choice in (ENGINE, ENGINE, CHOICES[0], Choice("all", share=1.0), Choice("none", late_share=NEVER))
    )
    assert own == again
    assert fcfs.in_time < 0.2
    assert own.in_time > 0.5
    assert all_of_it.in_time < own.in_time
    assert none.longest_wait > own.longest_wait


def test_a_rate_changes_when_requests_come_and_not_what_they_are() -> None:
    slow, quick = requests_of(3, 1.0, 20), requests_of(3, 10.0, 20)
    assert [request.token_ids for request in slow] == [request.token_ids for request in quick]
    assert [request.sampling for request in slow] == [request.sampling for request in quick]
    assert slow[-1].arrival_time > 5 * quick[-1].arrival_time

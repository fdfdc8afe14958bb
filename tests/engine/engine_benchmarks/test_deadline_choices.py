"""Alternatives for the policy `deadline`: deterministic, because time is virtual."""

from engine_benchmarks.deadline_choices import (
    CHOICES,
    ENGINE,
    NEVER,
    Choice,
    late_share,
    requests_of,
    scheduler_capacity,
    serve,
)
from trimtab_engine.scheduling import waiting_queue


def test_late_share_is_restored_afterwards() -> None:
    assert ENGINE.late_share == waiting_queue.LATE_SHARE
    with late_share(3):
        assert waiting_queue.LATE_SHARE == 3
    assert ENGINE.late_share == waiting_queue.LATE_SHARE


def test_choices_change_results_of_one_load() -> None:
    """The request admitted last needs time for its prompt, and the late requests' share limits their wait."""
    rate = 1.5 * scheduler_capacity(0)
    own, again, fcfs, all_of_it, none = (
        serve(requests_of(0, rate), choice, 2.0)
        for choice in (ENGINE, ENGINE, CHOICES[0], Choice("all", share=1.0), Choice("none", late_share=NEVER))
    )
    assert own == again
    assert fcfs.in_time < 0.2
    assert own.in_time > 0.5
    assert all_of_it.in_time < own.in_time
    assert none.longest_wait > own.longest_wait


def test_rate_changes_arrival_times_but_not_lengths() -> None:
    slow, quick = requests_of(3, 1.0, 20), requests_of(3, 10.0, 20)
    assert [request.token_ids for request in slow] == [request.token_ids for request in quick]
    assert [request.sampling for request in slow] == [request.sampling for request in quick]
    assert slow[-1].arrival_time > 5 * quick[-1].arrival_time

"""Liveness: a loop that stops ticking, a resource that has no loop, an event loop that is blocked."""

from __future__ import annotations

from trimtab_operator.reconcile.health import Heartbeats


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_loop_that_ticks_is_healthy_and_one_that_stopped_is_not() -> None:
    clock = Clock()
    beats = Heartbeats(max_age_seconds=100.0, clock=clock)
    beats.beat("a/b")
    clock.now = 99.0
    assert beats.problems() == []
    clock.now = 101.0
    assert "a/b has not ticked for 101 s" in beats.problems()


def test_a_loop_that_ended_is_forgotten() -> None:
    clock = Clock()
    beats = Heartbeats(max_age_seconds=100.0, clock=clock)
    beats.beat("a/b")
    beats.forget("a/b")
    clock.now = 1000.0
    assert beats.problems() == []


def test_a_long_line_is_no_hang_and_a_tick_that_hangs_is_one() -> None:
    clock = Clock()
    beats = Heartbeats(max_age_seconds=100.0, clock=clock)
    beats.wait_in_line("a/b")
    clock.now = 1000.0
    assert beats.problems() == []
    beats.beat("a/b")
    clock.now += 101.0
    assert beats.problems() == ["a/b has not ticked for 101 s"]


def test_whether_the_event_loop_has_run_of_late_is_known_once_it_began() -> None:
    clock = Clock()
    beats = Heartbeats(max_age_seconds=1.0, clock=clock)
    assert beats.ran_within(10.0)
    beats.ran()
    clock.now = 10.0
    assert beats.ran_within(10.0)
    clock.now = 11.0
    assert not beats.ran_within(10.0)


def test_an_event_loop_that_is_blocked_now_is_a_problem_and_one_that_was_is_none() -> None:
    clock = Clock()
    beats = Heartbeats(max_age_seconds=1.0, clock=clock)
    assert beats.problems() == []
    beats.ran()
    clock.now = 60.0
    assert beats.problems() == []
    clock.now = 90.0
    assert "blocked for 90 s" in beats.problems()[0]
    beats.ran()
    assert beats.problems() == []

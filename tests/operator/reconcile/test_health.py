"""Liveness: stopped loops, ended loops, blocked event loop."""

from __future__ import annotations

from trimtab_operator.reconcile.health import Heartbeats


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_heartbeats_report_stopped_loop() -> None:
    clock = Clock()
    beats = Heartbeats(max_age_seconds=100.0, clock=clock)
    beats.beat("a/b")
    clock.now = 99.0
    assert beats.problems() == []
    clock.now = 101.0
    assert "a/b has not ticked for 101 s" in beats.problems()


def test_heartbeats_ended_loop_is_forgotten() -> None:
    clock = Clock()
    beats = Heartbeats(max_age_seconds=100.0, clock=clock)
    beats.beat("a/b")
    beats.forget("a/b")
    clock.now = 1000.0
    assert beats.problems() == []


def test_heartbeats_waiting_loop_is_healthy() -> None:
    clock = Clock()
    beats = Heartbeats(max_age_seconds=100.0, clock=clock)
    beats.mark_waiting("a/b")
    clock.now = 1000.0
    assert beats.problems() == []
    beats.beat("a/b")
    clock.now += 101.0
    assert beats.problems() == ["a/b has not ticked for 101 s"]


def test_has_run_within_after_first_measurement() -> None:
    clock = Clock()
    beats = Heartbeats(max_age_seconds=1.0, clock=clock)
    assert beats.has_run_within(10.0)
    beats.mark_loop_ran()
    clock.now = 10.0
    assert beats.has_run_within(10.0)
    clock.now = 11.0
    assert not beats.has_run_within(10.0)


def test_blocked_event_loop_is_reported_until_it_recovers() -> None:
    clock = Clock()
    beats = Heartbeats(max_age_seconds=1.0, clock=clock)
    assert beats.problems() == []
    beats.mark_loop_ran()
    clock.now = 60.0
    assert beats.problems() == []
    clock.now = 90.0
    assert "blocked for 90 s" in beats.problems()[0]
    beats.mark_loop_ran()
    assert beats.problems() == []

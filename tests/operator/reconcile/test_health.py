"""Liveness: stopped loops, ended loops, blocked event loop."""

from __future__ import annotations

from operator_cluster import FakeCluster, a_loop, a_reconciler
from prometheus_client import generate_latest
from trimtab_operator.kube.informer_cache import Cache, Store
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


async def test_metrics_cover_conditions_events_and_process() -> None:
    cluster = FakeCluster(replicas=1)
    reconciler, loop = a_reconciler(cluster), a_loop(cluster)
    for _ in range(4):
        await reconciler.tick(loop)
        cluster.controllers()
    metrics = reconciler.executor.metrics
    text = generate_latest(metrics.registry).decode()
    ready = 'trimtab_condition{name="m",namespace="n",reason="ReplicasReady",status="True",type="Ready"} 1.0'
    assert ready in text
    assert 'trimtab_operator_events_total{reason="ReplicaCreated"} 1.0' in text
    assert 'trimtab_operator_build_info{version="' in text
    assert "process_resident_memory_bytes " in text
    metrics.forget("n", "m")
    assert "trimtab_condition{" not in generate_latest(metrics.registry).decode()


def test_watch_age_is_that_of_the_oldest_synced_watch() -> None:
    clock = Clock()
    stores = [Store("Pod", "a"), Store("Pod", "b"), Store("Service", "a")]
    cache = Cache(stores, clock=clock)
    assert cache.age_of("Pod") == 0.0
    cache.replace_all(stores[0], (), 1)
    clock.now = 50.0
    cache.replace_all(stores[1], (), 1)
    clock.now = 60.0
    assert cache.age_of("Pod") == 60.0

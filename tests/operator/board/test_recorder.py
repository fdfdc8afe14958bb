"""The board's recorder: content, memory bound, and failures."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from operator_cluster import FakeCluster, a_loop, a_reconciler
from trimtab_operator.board import recorder as recorder_module
from trimtab_operator.board.recorder import MAX_DECISIONS, Record, Recorder, keep_decisions
from trimtab_operator.board.timeline import Series
from trimtab_operator.observed.engines import EngineObservation
from trimtab_operator.planning.plan import ReconcilePlan
from trimtab_operator.planning.snapshot import ClusterSnapshot
from trimtab_operator.tuner.moves import Decision, Move, Reason
from trimtab_operator.tuner.parameters import Parameter
from tuner_snapshots import make_sample

KEY = ("n", "m")
MAX_BYTES_PER_DEPLOYMENT = 90_000  # docs/guides/board.md


def make_decision(number: int, *, outcome: str = "") -> Decision:
    evidence = {f"measure_{n}": 1.5 * n + number for n in range(8)}
    move = Move(Reason.SATURATED, Parameter.MAX_NUM_SEQS, 1, 2, evidence)
    return Decision(f"d-{number}", 1_790_000_000.0 + number, move, f"{number}: " + "evidence " * 30, outcome)


def with_engine(snapshot: ClusterSnapshot, at: float) -> ClusterSnapshot:
    """Return the snapshot at a time, with an engine that has done work since 0."""
    return replace(snapshot, at=at, engines={"m-g0": EngineObservation(True, sample=make_sample(at - 1e9))})


@cache
def make_iteration() -> tuple[ClusterSnapshot, ReconcilePlan, dict[str, Any]]:
    """Return snapshot, plan and status of a deployment that serves."""
    cluster = FakeCluster(tuning={"mode": "Auto"})
    cluster.settle()
    return cluster.look(), cluster.decide(), cluster.status | {"engine": {"effective": {"maxNumSeqs": "64"}}}


def record_ticks(recorder: Recorder, *, times: int = 3, name: str = "m") -> float:
    """Record iterations, 15 s apart, and return the time of the last one."""
    snapshot, plan, status = make_iteration()
    snapshot = replace(snapshot, deployment=replace(snapshot.deployment, name=name))
    at = 2e9
    for number in range(times):
        at = 2e9 + 15 * number
        recorder.record(with_engine(snapshot, at), plan, status)
    return at


def test_record_has_load_replicas_and_parameters() -> None:
    recorder = Recorder()
    at = record_ticks(recorder)
    record = recorder.read(KEY)
    assert record is not None
    found = {name: values[-1] for name, values in record.timeline.fine.read(at)[1].items()}
    assert found[Series.TOKENS_PER_SECOND] == pytest.approx(40.0)
    assert found[Series.REQUESTS_PER_SECOND] == pytest.approx(1.0)
    assert (found[Series.REPLICAS_DESIRED], found[Series.REPLICAS_READY]) == (1.0, 1.0)
    assert found[Series.MAX_NUM_SEQS] == 64.0
    assert record.timeline.since == 2e9
    assert record.mode == "Auto"


async def test_reconcile_is_recorded_until_deletion() -> None:
    cluster = FakeCluster()
    reconciler, loop = a_reconciler(cluster), a_loop(cluster)
    await reconciler.tick(loop)
    record = reconciler.recorder.read(KEY)
    assert record is not None
    assert record.status["desiredReplicas"] == 1
    reconciler._forget(loop.key, is_gone=False)
    assert reconciler.recorder.read(KEY) is record
    reconciler._forget(loop.key, is_gone=True)
    assert reconciler.recorder.read(KEY) is None


async def test_failure_of_the_recorder_breaks_no_reconcile(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = FakeCluster()
    reconciler, loop = a_reconciler(cluster), a_loop(cluster)
    monkeypatch.setattr(recorder_module, "limits_of", None)
    await reconciler.tick(loop)
    assert cluster.status["desiredReplicas"] == 1


def test_new_outcome_replaces_a_decision() -> None:
    record = Record("u")
    keep_decisions(record, [make_decision(1), make_decision(2)])
    keep_decisions(record, [make_decision(1, outcome="kept"), make_decision(3)])
    assert [(decision.id, decision.outcome) for decision in record.decisions.values()] == [
        ("d-1", "kept"),
        ("d-2", ""),
        ("d-3", ""),
    ]


def test_latest_decisions_are_kept() -> None:
    record = Record("u")
    for number in range(2 * MAX_DECISIONS):
        keep_decisions(record, [make_decision(number)])
    assert list(record.decisions) == [f"d-{number}" for number in range(MAX_DECISIONS, 2 * MAX_DECISIONS)]


def test_resource_created_again_starts_empty() -> None:
    recorder = Recorder()
    first = recorder.find_or_add(KEY, "u-1")
    assert recorder.find_or_add(KEY, "u-1") is first
    assert recorder.find_or_add(KEY, "u-2") is not first


def test_number_of_deployments_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "MAX_DEPLOYMENTS", 2)
    recorder = Recorder()
    for name in ("a", "b", "c", "a"):
        record_ticks(recorder, times=1, name=name)
    assert [key[1] for key, _ in recorder.records()] == ["a", "b"]
    assert recorder.num_without_room == 1


def test_memory_of_1000_deployments_is_bounded() -> None:
    """100 full records are measured: 32 decisions each, an hour of records, and the last sample of an engine."""
    recorder, count = Recorder(), 100
    record_ticks(recorder, name="warm-up")
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(count):
            record_ticks(recorder, times=8, name=f"m-{number}")
            record = recorder.read(("n", f"m-{number}"))
            assert record is not None
            keep_decisions(record, [make_decision(n, outcome="kept: faster") for n in range(MAX_DECISIONS)])
        used = (tracemalloc.get_traced_memory()[0] - before) / count
    finally:
        tracemalloc.stop()
    assert used < MAX_BYTES_PER_DEPLOYMENT, f"{used:,.0f} bytes per deployment"

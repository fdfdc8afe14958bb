"""A paused resource is observed and reported, but not changed until it is resumed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from operator_cluster import FakeCluster
from trimtab_operator.resource.spec import PAUSED
from trimtab_operator.tuner.parameters import Parameter

CHANGES: tuple[dict[str, Any], ...] = (
    {"replicas": 3},
    {"replicas": 0},
    {"engine": {"maxNumSeqs": 16}},
    {"model": {"uri": "file:///models/n"}},
    {"parallelism": {"tensor": 2}},  # refused: 9 heads
    {"model": {"uri": "oci://a/b"}},  # refused by name
)


def a_settled_cluster(**spec: Any) -> FakeCluster:
    cluster = FakeCluster(**{"replicas": 2, **spec})
    cluster.settle()
    return cluster


def pause(cluster: FakeCluster, text: str | None = "true") -> None:
    assert cluster.body is not None
    cluster.body["metadata"]["annotations"] = {} if text is None else {PAUSED: text}


def without_status(cluster: FakeCluster) -> int:
    """Return the writes of the next ticks except status writes."""
    cluster.settle()
    before = cluster.writes
    statuses = 0
    for _ in range(5):
        said = dict(cluster.status)
        cluster.tick()
        statuses += said != cluster.status
    return cluster.writes - before - statuses


@pytest.mark.parametrize("change", CHANGES)
def test_paused_resource_ignores_edits(change: dict[str, Any]) -> None:
    cluster = a_settled_cluster()
    children, pods = copy.deepcopy(cluster.objects), copy.deepcopy(cluster.pods)
    pause(cluster)
    cluster.edit(**change)
    assert cluster.decide().is_idle
    assert without_status(cluster) == 0
    assert (cluster.objects, cluster.pods) == (children, pods)


def test_status_reports_pause_and_replicas() -> None:
    cluster = a_settled_cluster()
    pause(cluster)
    cluster.settle()
    assert cluster.condition("Progressing")["reason"] == "Paused"
    assert PAUSED in cluster.condition("Progressing")["message"]
    assert cluster.condition("TuningActive")["reason"] == "Paused"
    assert cluster.condition("Ready")["status"] == "True"
    assert cluster.condition("Stalled")["status"] == "False"


def test_an_edit_that_is_held_up_is_stalled_for_gitops() -> None:
    cluster = a_settled_cluster()
    pause(cluster)
    cluster.edit(replicas=3)
    cluster.settle()
    assert cluster.condition("Ready")["status"] == "False"
    assert (cluster.condition("Stalled")["status"], cluster.condition("Stalled")["reason"]) == ("True", "Paused")
    assert cluster.condition("Reconciling")["status"] == "False"


def test_paused_resource_patches_no_engine() -> None:
    cluster = a_settled_cluster(tuning={"mode": "Auto"})
    pause(cluster)
    for engine in cluster.engines.values():
        engine.values[Parameter.MAX_NUM_SEQS] = 3
    assert cluster.decide().patches == ()


@pytest.mark.parametrize("text", [None, "false"])
def test_removed_annotation_resumes(text: str | None) -> None:
    cluster = a_settled_cluster()
    pause(cluster)
    cluster.edit(replicas=3)
    cluster.settle()
    assert len(cluster.groups) == 2
    pause(cluster, text)
    cluster.settle()
    assert len(cluster.groups) == 3
    assert cluster.condition("Progressing")["reason"] == "UpToDate"


def test_pause_does_not_time_out_a_change() -> None:
    cluster = a_settled_cluster(start_seconds=8.0, rollout={"startTimeout": "20s", "drainTimeout": "1s"})
    cluster.edit(engine={"blockSize": 16})
    cluster.plan_reconcile()
    pause(cluster)
    cluster.settle()
    cluster.now += 3600
    cluster.tick()
    pause(cluster, None)
    cluster.settle()
    assert cluster.condition("Degraded")["status"] == "False"
    assert cluster.condition("Ready")["status"] == "True"

"""A paused resource is looked at and told of, and nothing of it is changed until it goes on."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from operator_cluster import FakeCluster
from trimtab_operator.resource.spec import PAUSED
from trimtab_operator.tuner.knobs import Knob

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
    """Writes of the next ticks, but for those of the status."""
    cluster.settle()
    before = cluster.writes
    statuses = 0
    for _ in range(5):
        said = dict(cluster.status)
        cluster.tick()
        statuses += said != cluster.status
    return cluster.writes - before - statuses


@pytest.mark.parametrize("change", CHANGES)
def test_while_it_is_paused_no_edit_reaches_the_children(change: dict[str, Any]) -> None:
    cluster = a_settled_cluster()
    children, pods = copy.deepcopy(cluster.objects), copy.deepcopy(cluster.pods)
    pause(cluster)
    cluster.edit(**change)
    assert cluster.decide().is_idle
    assert without_status(cluster) == 0
    assert (cluster.objects, cluster.pods) == (children, pods)


def test_a_status_tells_that_it_is_paused_and_what_runs() -> None:
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


def test_no_live_knob_is_set_while_it_is_paused() -> None:
    cluster = a_settled_cluster(tuning={"mode": "Auto"})
    pause(cluster)
    for engine in cluster.engines.values():
        engine.values[Knob.MAX_NUM_SEQS] = 3
    assert cluster.decide().patches == ()


@pytest.mark.parametrize("text", [None, "false"])
def test_it_goes_on_when_the_annotation_is_gone(text: str | None) -> None:
    cluster = a_settled_cluster()
    pause(cluster)
    cluster.edit(replicas=3)
    cluster.settle()
    assert len(cluster.groups) == 2
    pause(cluster, text)
    cluster.settle()
    assert len(cluster.groups) == 3
    assert cluster.condition("Progressing")["reason"] == "Settled"


def test_a_change_that_is_paused_for_long_is_not_taken_back_for_it() -> None:
    cluster = a_settled_cluster(start_seconds=8.0, rollout={"startTimeout": "20s", "drainTimeout": "1s"})
    cluster.edit(engine={"maxNumSeqs": 16})
    cluster.turn()
    pause(cluster)
    cluster.settle()
    cluster.now += 3600
    cluster.tick()
    pause(cluster, None)
    cluster.settle()
    assert cluster.condition("Degraded")["status"] == "False"
    assert cluster.condition("Ready")["status"] == "True"

"""Scenario: a node is lost, and a multi-pod replica with a pod on it is restored on the remaining nodes."""

from __future__ import annotations

import time

import pytest
from conftest import Apply
from harness.deployment import Deployment
from harness.install import Installation
from harness.kube import Kube
from harness.layouts import READY_SECONDS, answer_of, layout, nodes_of, require_workers
from harness.nodes import all_ready, node_of, not_ready, pause_node, worker_nodes
from harness.report import report_measurement
from harness.target import Target
from harness.wait import NotYet

NODE_SECONDS = 420.0  # about 40 s until NotReady, 60 s until the operator acts, and a start


@pytest.fixture
def three(target: Target, kube: Kube, apply: Apply) -> Deployment:
    """Return one replica of three pods, on a cluster where one of the nodes can be paused."""
    if not target.is_own:
        pytest.skip("only a node of the cluster of e2e/cluster can be paused")
    require_workers(kube)
    deployment = apply("three", **layout(tensor=3, gpusPerNode=1))
    deployment.ready(deadline_seconds=READY_SECONDS)
    return deployment


def test_lost_node_moves_group(three: Deployment, kube: Kube, installation: Installation) -> None:
    expected = answer_of(three)
    leader = node_of(installation.leader())  # losing the leader adds a 20 s failover, which test_operator.py covers
    node = next(name for name in worker_nodes(kube) if name != leader)
    assert node in nodes_of(three), f"no pod of the group on {node}"
    with pause_node(kube, node):
        began = time.monotonic()
        waiter = three.waiter
        waiter.until("the node is NotReady", lambda: not_ready(kube, node), deadline_seconds=120.0)
        noticed = time.monotonic() - began
        waiter.until("no pod of the group is on it", lambda: _none_on(three, node), deadline_seconds=180.0)
        replaced = time.monotonic() - began
        three.ready(deadline_seconds=NODE_SECONDS)
        total = time.monotonic() - began
        report_measurement(
            f"node paused: NotReady after {noticed:.0f} s, replaced after {replaced:.0f} s, Ready after {total:.0f} s"
        )
        assert node not in nodes_of(three)
        assert any(event["reason"] == "NodeLost" for event in kube.events(three.namespace, three.name))
        assert answer_of(three) == expected
    three.waiter.until("all nodes are Ready again", lambda: all_ready(kube), deadline_seconds=180.0)
    three.ready(deadline_seconds=READY_SECONDS)
    assert answer_of(three) == expected


def _none_on(deployment: Deployment, node: str) -> None:
    pods = deployment.group_pods()
    there = [pod["metadata"]["name"] for pod in pods if pod["spec"].get("nodeName") == node]
    if there:
        raise NotYet(f"still on it: {', '.join(there)}")

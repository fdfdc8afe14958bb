"""Replicas with several ranks: requests, small resource requests, and the nodes of their pods."""

from __future__ import annotations

import time
from typing import Any

import pytest

from harness.answer import ask
from harness.deployment import Deployment
from harness.kube import Kube
from harness.nodes import node_of, worker_nodes
from harness.report import report_measurement

QUESTION = "Name the planets of the solar system."
NUM_TOKENS = 12  # three ranks in three pods on two cores need most of a second per token
READY_SECONDS = 300.0  # three engines load at once on two cores
NEVER = {"mode": "Off", "bounds": None}
# Small enough that all pods of a replica fit on one node after the other is lost.
ROOM = {"requests": {"cpu": "150m", "memory": "700Mi"}, "limits": {"memory": "1500Mi"}}


def layout(**parallelism: Any) -> dict[str, Any]:
    """Return changes to the sample's spec."""
    containers = [{"name": "main", "resources": ROOM}]
    return {"parallelism": parallelism, "tuning": NEVER, "template": {"spec": {"containers": containers}}}


def await_ready(deployment: Deployment, what: str, since: float, deadline_seconds: float = READY_SECONDS) -> None:
    deployment.ready(deadline_seconds=deadline_seconds)
    report_measurement(f"{what}: Ready after {time.monotonic() - since:.0f} s")


def answer_of(deployment: Deployment) -> str:
    """Return the answer to QUESTION, which must not depend on the layout."""
    return ask(deployment, QUESTION, max_tokens=NUM_TOKENS).text


def nodes_of(deployment: Deployment) -> list[str]:
    return [node_of(pod) for pod in deployment.group_pods()]


def require_workers(kube: Kube) -> None:
    """Skip the scenario unless the cluster has two schedulable worker nodes."""
    if len(worker_nodes(kube)) < 2:
        pytest.skip("this scenario needs two worker nodes: python3 e2e/cluster up --workers 2")

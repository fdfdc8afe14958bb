"""Pods are deleted from a node that is lost for a minute, but not from one that is briefly NotReady."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from trimtab_operator.builders.labels import GROUP_LABEL
from trimtab_operator.resource.time import timestamp
from trimtab_operator.rollout.pod_lifecycle import NODE_LOSS_TIMEOUT_SECONDS, lost_pod_deletions, may_be_on_lost_node

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)


def a_node(name: str, status: str, seconds: float) -> dict[str, Any]:
    since = timestamp(NOW - timedelta(seconds=seconds))
    return {
        "metadata": {"name": name},
        "status": {"conditions": [{"type": "Ready", "status": status, "lastTransitionTime": since}]},
    }


def a_pod(name: str, node: str | None, *, ready: bool = True) -> dict[str, Any]:
    conditions = [{"type": "Ready", "status": "True" if ready else "False"}]
    return {
        "metadata": {"name": name, "uid": f"u-{name}", "labels": {GROUP_LABEL: "0"}},
        "spec": {"nodeName": node} if node else {},
        "status": {"conditions": conditions},
    }


@pytest.mark.parametrize(
    ("status", "seconds", "expected"),
    [
        ("Unknown", NODE_LOSS_TIMEOUT_SECONDS + 1, ["m-g0-w-0"]),
        ("False", NODE_LOSS_TIMEOUT_SECONDS + 1, ["m-g0-w-0"]),
        ("Unknown", NODE_LOSS_TIMEOUT_SECONDS - 1, []),  # it may recover
        ("True", 3600, []),
    ],
)
def test_pods_on_lost_node_are_force_deleted(status: str, seconds: float, expected: list[str]) -> None:
    nodes = [a_node("one", "True", 9999), a_node("two", status, seconds)]
    pods = [a_pod("m-g0-0", "one"), a_pod("m-g0-w-0", "two"), a_pod("m-g0-w-1", None)]
    given_up = lost_pod_deletions(pods, nodes, NOW)
    assert [deletion.name for deletion in given_up] == expected
    assert all(deletion.grace_seconds == 0 and "node two" in deletion.reason for deletion in given_up)


def test_mostly_unready_nodes_lose_no_pods() -> None:
    nodes = [a_node("one", "True", 9999), a_node("two", "Unknown", 999), a_node("three", "Unknown", 999)]
    assert lost_pod_deletions([a_pod("m-g0-0", "two")], nodes, NOW) == ()
    assert lost_pod_deletions([a_pod("m-g0-0", "two")], [*nodes, a_node("four", "True", 9999)], NOW) != ()


def test_pod_with_finalizer_is_deleted_once() -> None:
    pod = a_pod("m-g0-0", "two")
    pod["metadata"] |= {"deletionTimestamp": timestamp(NOW), "deletionGracePeriodSeconds": 30}
    nodes = [a_node("one", "True", 9999), a_node("two", "Unknown", 999)]
    assert len(lost_pod_deletions([pod], nodes, NOW)) == 1, "its kubelet will not end it"
    pod["metadata"]["deletionGracePeriodSeconds"] = 0
    assert lost_pod_deletions([pod], nodes, NOW) == ()


def test_foreign_pods_are_not_deleted() -> None:
    pod = a_pod("m-facts-x", "two")
    del pod["metadata"]["labels"][GROUP_LABEL]
    assert lost_pod_deletions([pod], [a_node("two", "Unknown", 999)], NOW) == ()


def test_nodes_are_looked_at_only_when_a_placed_pod_is_not_ready() -> None:
    assert not may_be_on_lost_node([a_pod("a", "one"), a_pod("b", None, ready=False)])
    assert may_be_on_lost_node([a_pod("a", "one", ready=False)])

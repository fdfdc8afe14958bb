"""Pods of one group restart together, if they shared the engine."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from trimtab_operator.builders.labels import GROUP_LABEL, LEADER, REVISION_LABEL, ROLE_LABEL, WORKER
from trimtab_operator.observed.groups import ObservedChildren, groups_of
from trimtab_operator.resource.time import timestamp
from trimtab_operator.rollout.pod_lifecycle import group_restart_deletions

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
GRACE_SECONDS = 75


def at(seconds: float) -> str:
    return timestamp(NOW + timedelta(seconds=seconds))


def a_pod(
    name: str, role: str, created: float, deleted: float | None = None, *, revision: str = "r1"
) -> dict[str, Any]:
    metadata: dict[str, Any] = {
        "name": name,
        "uid": f"u-{name}",
        "labels": {GROUP_LABEL: "0", ROLE_LABEL: role, REVISION_LABEL: revision},
        "creationTimestamp": at(created),
    }
    if deleted is not None:
        metadata |= {"deletionTimestamp": at(deleted + GRACE_SECONDS), "deletionGracePeriodSeconds": GRACE_SECONDS}
    return {"metadata": metadata}


def restarted(*pods: dict[str, Any], workers: int = 2) -> list[str]:
    def a_set(name: str, role: str, replicas: int) -> dict[str, Any]:
        labels = {GROUP_LABEL: "0", ROLE_LABEL: role}
        return {"metadata": {"name": name, "labels": labels}, "spec": {"replicas": replicas}}

    sets = [a_set("m-g0", LEADER, 1), *([a_set("m-g0-w", WORKER, workers)] if workers else [])]
    return [
        deletion.name
        for deletion in group_restart_deletions(groups_of(ObservedChildren(stateful_sets=tuple(sets), pods=pods)))
    ]


def test_deleted_pod_restarts_the_group() -> None:
    leader, first = a_pod("m-g0-0", LEADER, 0), a_pod("m-g0-w-0", WORKER, 0)
    assert restarted(leader, first, a_pod("m-g0-w-1", WORKER, 0, deleted=60)) == ["m-g0-0", "m-g0-w-0"]


def test_complete_group_is_not_restarted() -> None:
    assert restarted(a_pod("m-g0-0", LEADER, 0), a_pod("m-g0-w-0", WORKER, 0), a_pod("m-g0-w-1", WORKER, 0)) == []


def test_pods_of_next_engine_are_not_restarted() -> None:
    """A worker may drain for long; the other pods have restarted and wait for its successor."""
    new_leader, draining = a_pod("m-g0-0", LEADER, 70), a_pod("m-g0-w-1", WORKER, 0, deleted=60)
    assert restarted(new_leader, a_pod("m-g0-w-0", WORKER, 65), draining) == []


def test_single_pod_replica_restarts_no_other_pod() -> None:
    assert restarted(a_pod("m-g0-0", LEADER, 0, deleted=60), workers=0) == []


def test_new_revision_pods_wait_for_their_leader() -> None:
    """The workers' StatefulSet may be faster than the leader's; its new pods do not belong to the old engine."""
    leader = a_pod("m-g0-0", LEADER, 0, deleted=70)
    old, new = a_pod("m-g0-w-0", WORKER, 0), a_pod("m-g0-w-1", WORKER, 65, revision="r2")
    assert restarted(leader, old, new) == ["m-g0-w-0"]
    assert restarted(leader, a_pod("m-g0-w-0", WORKER, 0, deleted=60), new) == []


def test_deleted_pod_restarts_pods_of_its_revision() -> None:
    waiting, going = a_pod("m-g0-w-0", WORKER, 60, revision="r2"), a_pod("m-g0-w-1", WORKER, 60, 70, revision="r2")
    assert restarted(a_pod("m-g0-0", LEADER, 0, deleted=50), waiting, going) == ["m-g0-w-0"]


def test_next_engine_restarts_while_previous_drains() -> None:
    draining = a_pod("m-g0-w-1", WORKER, 0, deleted=60)
    assert restarted(a_pod("m-g0-0", LEADER, 70, deleted=80), a_pod("m-g0-w-0", WORKER, 65), draining) == ["m-g0-w-0"]

"""Observed replica groups: which pods belong together, and when a group is ready."""

from __future__ import annotations

from typing import Any

from trimtab_operator.builders.labels import GROUP_LABEL, LEADER, REVISION_LABEL, ROLE_LABEL, WORKER
from trimtab_operator.observed.groups import Group, ObservedChildren, groups_of

READY = {"conditions": [{"type": "Ready", "status": "True"}]}


def labels(role: str, revision: str = "r1", ordinal: int = 0) -> dict[str, str]:
    return {GROUP_LABEL: str(ordinal), ROLE_LABEL: role, REVISION_LABEL: revision}


def a_set(name: str, role: str, revision: str = "r1", replicas: int = 1) -> dict[str, Any]:
    return {"metadata": {"name": name, "labels": labels(role, revision)}, "spec": {"replicas": replicas}}


def a_pod(name: str, role: str, revision: str = "r1", *, status: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"metadata": {"name": name, "labels": labels(role, revision)}, "status": READY if status is None else status}


def the_group(*pods: dict[str, Any], worker_revision: str = "r1") -> Group:
    sets = (a_set("m-g0-w", WORKER, worker_revision, 2), a_set("m-g0", LEADER))
    (group,) = groups_of(ObservedChildren(stateful_sets=sets, pods=pods))
    return group


LEADING = a_pod("m-g0-0", LEADER)
WORKING = (a_pod("m-g0-w-0", WORKER), a_pod("m-g0-w-1", WORKER))


def test_pods_are_sorted_leader_first() -> None:
    ten = a_pod("m-g0-w-10", WORKER)
    group = the_group(ten, WORKING[1], LEADING, WORKING[0])
    assert [pod["metadata"]["name"] for pod in group.pods] == ["m-g0-0", "m-g0-w-0", "m-g0-w-1", "m-g0-w-10"]
    assert group.leader == LEADING
    assert group.num_pods == 3


def test_a_group_is_ready_when_all_its_pods_are() -> None:
    assert the_group(LEADING, *WORKING).is_ready
    assert not the_group(LEADING, WORKING[0]).is_ready
    assert not the_group(*WORKING).is_ready
    assert not the_group(LEADING, WORKING[0], a_pod("m-g0-w-1", WORKER, status={})).is_ready


def test_group_of_mixed_revisions_is_not_ready() -> None:
    group = the_group(LEADING, WORKING[0], a_pod("m-g0-w-1", WORKER, "r0"))
    assert group.is_outdated
    assert not group.is_ready


def test_stateful_sets_of_two_revisions_have_no_revision() -> None:
    assert the_group(LEADING, *WORKING, worker_revision="r0").revision == ""


def test_workers_without_a_leaders_stateful_set_are_no_group() -> None:
    assert groups_of(ObservedChildren(stateful_sets=(a_set("m-g0-w", WORKER),), pods=WORKING)) == ()

"""A group with a replaced worker is not ready until its leader has started a new engine."""

from __future__ import annotations

from typing import Any

from trimtab_operator.builders.labels import GROUP_LABEL, LEADER, ROLE_LABEL, WORKER
from trimtab_operator.observed.groups import Group, ObservedChildren, groups_of
from trimtab_operator.observed.shared_engine import (
    MISMATCH_TIMEOUT_SECONDS,
    Incarnation,
    split_groups,
    update_incarnations,
)


def a_pod(role: str, uid: str, restarts: int = 0, *, ready: bool = True, mesh: int = 0) -> dict[str, Any]:
    status = {
        "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
        "containerStatuses": [{"name": "main", "restartCount": restarts}, {"name": "mesh", "restartCount": mesh}],
    }
    name = "m-g0-0" if role == LEADER else "m-g0-w-0"
    return {"metadata": {"name": name, "uid": uid, "labels": {GROUP_LABEL: "0", ROLE_LABEL: role}}, "status": status}


def observed(*pods: dict[str, Any], one_pod: bool = False) -> ObservedChildren:
    def a_set(name: str, role: str) -> dict[str, Any]:
        return {"metadata": {"name": name, "labels": {GROUP_LABEL: "0", ROLE_LABEL: role}}, "spec": {"replicas": 1}}

    sets = (a_set("m-g0", LEADER),) if one_pod else (a_set("m-g0", LEADER), a_set("m-g0-w", WORKER))
    return ObservedChildren(stateful_sets=sets, pods=pods)


class Watching:
    """Observe repeatedly, like a loop; return True if the group counts as ready."""

    def __init__(self) -> None:
        self.known: dict[str, Incarnation] = {}
        self.now = 1_000_000.0

    def sees(self, *pods: dict[str, Any], one_pod: bool = False, after: float = 0.0) -> bool:
        self.now += after
        seen = observed(*pods, one_pod=one_pod)
        groups = groups_of(seen)
        self.known = update_incarnations(groups, self.known, now=self.now)
        marked = ObservedChildren(
            stateful_sets=seen.stateful_sets, pods=seen.pods, split_groups=split_groups(groups, self.known)
        )
        group: Group = groups_of(marked)[0]
        return group.is_ready


def test_replaced_worker_needs_restarted_leader() -> None:
    watching = Watching()
    assert watching.sees(a_pod(LEADER, "l"), a_pod(WORKER, "w1"))
    assert not watching.sees(a_pod(LEADER, "l"), a_pod(WORKER, "w2")), "Ready pods, of two engines"
    assert not watching.sees(a_pod(LEADER, "l"), a_pod(WORKER, "w2")), "and it stays so"
    assert not watching.sees(a_pod(LEADER, "l", 1, ready=False), a_pod(WORKER, "w2"))
    assert watching.sees(a_pod(LEADER, "l", 1), a_pod(WORKER, "w2"))


def test_restarted_worker_counts_as_replaced() -> None:
    watching = Watching()
    assert watching.sees(a_pod(LEADER, "l"), a_pod(WORKER, "w"))
    assert not watching.sees(a_pod(LEADER, "l"), a_pod(WORKER, "w", 1))
    assert watching.sees(a_pod(LEADER, "l", 1), a_pod(WORKER, "w", 1))


def test_late_restart_report_expires() -> None:
    """The worker restarted before the leader became Ready, and its kubelet reports it late. An engine that lost a rank
    would have ended long ago.
    """
    watching, leader, reported = Watching(), a_pod(LEADER, "l", 1), a_pod(WORKER, "w", 1)
    assert watching.sees(leader, a_pod(WORKER, "w"))
    assert not watching.sees(leader, reported, after=2)
    assert not watching.sees(leader, reported, after=MISMATCH_TIMEOUT_SECONDS - 1)
    assert watching.sees(leader, reported, after=1)
    assert watching.sees(leader, reported)
    assert not watching.sees(leader, a_pod(WORKER, "w", 2)), "a rank that is lost later is noticed"


def test_mismatch_timeout_starts_when_all_are_ready() -> None:
    watching, leader = Watching(), a_pod(LEADER, "l")
    assert watching.sees(leader, a_pod(WORKER, "w1"))
    assert not watching.sees(leader, a_pod(WORKER, "w2"))
    assert not watching.sees(leader, a_pod(WORKER, "w3", ready=False), after=MISMATCH_TIMEOUT_SECONDS)
    assert not watching.sees(leader, a_pod(WORKER, "w3"), after=MISMATCH_TIMEOUT_SECONDS)
    assert not watching.sees(leader, after=MISMATCH_TIMEOUT_SECONDS)


def test_workers_that_are_as_before_after_all_leave_no_doubt() -> None:
    watching, leader = Watching(), a_pod(LEADER, "l")
    assert watching.sees(leader, a_pod(WORKER, "w"))
    assert not watching.sees(leader, a_pod(WORKER, "w", 1))
    assert watching.sees(leader, a_pod(WORKER, "w"), after=1)
    assert not watching.sees(leader, a_pod(WORKER, "w", 1), after=MISMATCH_TIMEOUT_SECONDS)


def test_injected_sidecar_restart_is_ignored() -> None:
    watching = Watching()
    assert watching.sees(a_pod(LEADER, "l"), a_pod(WORKER, "w"))
    assert watching.sees(a_pod(LEADER, "l"), a_pod(WORKER, "w", mesh=1))


def test_restarted_leader_accepts_restarted_workers() -> None:
    watching = Watching()
    assert watching.sees(a_pod(LEADER, "l"), a_pod(WORKER, "w"))
    assert not watching.sees(a_pod(LEADER, "l", 1, ready=False), a_pod(WORKER, "w"))
    assert watching.sees(a_pod(LEADER, "l", 1), a_pod(WORKER, "w", 1))


def test_unseen_group_is_trusted() -> None:
    """For example after an operator restart."""
    watching = Watching()
    assert not watching.sees(a_pod(LEADER, "l"), a_pod(WORKER, "w1", ready=False))
    assert watching.sees(a_pod(LEADER, "l"), a_pod(WORKER, "w1", 1))


def test_single_pod_replica_is_never_split() -> None:
    watching = Watching()
    assert watching.sees(a_pod(LEADER, "l"), one_pod=True)
    assert watching.sees(a_pod(LEADER, "l", 1), one_pod=True)
    assert watching.known == {}

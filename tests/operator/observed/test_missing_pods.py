"""Missing pods are detected and reported with the API server's error."""

from __future__ import annotations

from typing import Any

from trimtab_operator.builders.labels import GROUP_LABEL, LEADER, ROLE_LABEL, WORKER
from trimtab_operator.observed.groups import Group, MissingPods, ObservedChildren, groups_of
from trimtab_operator.observed.missing_pods import (
    FIRST_READ_SECONDS,
    REREAD_SECONDS,
    find_missing_pods,
    missing_pods_message,
    needs_creation_error,
    with_creation_errors,
)
from trimtab_operator.observed.phases import EngineView, phase_of

QUOTA = 'pods "m-g0-w-0" is forbidden: exceeded quota: few, requested: pods=1, used: pods=1, limited: pods=1'
NOW = 1000.0


def a_group(*pods: str, workers: int = 2, leaving: tuple[str, ...] = (), missing: MissingPods | None = None) -> Group:
    def labels(role: str) -> dict[str, str]:
        return {GROUP_LABEL: "0", ROLE_LABEL: role}

    def a_set(name: str, role: str, replicas: int) -> dict[str, Any]:
        return {"metadata": {"name": name, "labels": labels(role)}, "spec": {"replicas": replicas}}

    def a_pod(name: str) -> dict[str, Any]:
        metadata: dict[str, Any] = {"name": name, "labels": labels(WORKER if "-w-" in name else LEADER)}
        return {"metadata": metadata | ({"deletionTimestamp": "soon"} if name in leaving else {})}

    sets = (a_set("m-g0", LEADER, 1), *([a_set("m-g0-w", WORKER, workers)] if workers else []))
    known = {} if missing is None else {"m-g0": missing}
    (group,) = groups_of(ObservedChildren(stateful_sets=sets, pods=tuple(map(a_pod, pods)), missing=known))
    return group


def an_event(said: str, *, of: str = "m-g0-w", at: str = "2026-01-01T00:00:00Z") -> dict[str, Any]:
    message = f"create Pod {of}-0 in StatefulSet {of} failed error: {said}"
    return {"involvedObject": {"name": of}, "reason": "FailedCreate", "message": message, "lastTimestamp": at}


def test_a_group_that_is_whole_or_restarts_misses_nothing() -> None:
    whole = ("m-g0-0", "m-g0-w-0", "m-g0-w-1")
    assert find_missing_pods([a_group(*whole)], {}, now=NOW) == {}
    assert find_missing_pods([a_group(*whole[:2], leaving=("m-g0-0",))], {}, now=NOW) == {}


def test_missing_since_is_kept_until_pod_count_changes() -> None:
    known = find_missing_pods([a_group("m-g0-0")], {}, now=NOW)
    assert known == {"m-g0": MissingPods(NOW, 1)}
    assert find_missing_pods([a_group("m-g0-0")], known, now=NOW + 9) == known
    assert find_missing_pods([a_group("m-g0-0", "m-g0-w-0")], known, now=NOW + 9) == {"m-g0": MissingPods(NOW + 9, 2)}
    assert find_missing_pods([], known, now=NOW + 9) == {}


def test_creation_errors_are_read_late_and_periodically() -> None:
    missing = MissingPods(NOW, 1)
    assert not needs_creation_error(missing, now=NOW + FIRST_READ_SECONDS - 1)
    assert needs_creation_error(missing, now=NOW + FIRST_READ_SECONDS)
    read = with_creation_errors([a_group("m-g0-0")], {"m-g0": missing}, [], now=NOW + FIRST_READ_SECONDS)["m-g0"]
    assert not needs_creation_error(read, now=NOW + FIRST_READ_SECONDS + REREAD_SECONDS - 1)
    assert needs_creation_error(read, now=NOW + FIRST_READ_SECONDS + REREAD_SECONDS)


def test_latest_creation_error_of_own_pods_is_used() -> None:
    events = [
        an_event("an older reason", at="2025-12-31T23:59:59Z"),
        an_event(QUOTA),
        an_event("another set's", of="other-g0", at="2026-01-01T01:00:00Z"),
    ]
    found = with_creation_errors([a_group("m-g0-0")], {"m-g0": MissingPods(NOW, 1)}, events, now=NOW)
    assert found["m-g0"].error == QUOTA
    assert with_creation_errors([], {"m-g0": MissingPods(NOW, 1)}, events, now=NOW) == {}


def test_the_status_of_the_replica_names_the_quota() -> None:
    missing = MissingPods(NOW, 1, QUOTA, NOW)
    several, alone = a_group("m-g0-0", missing=missing), a_group(workers=0, missing=missing)
    assert phase_of(several, EngineView()) == ("Pending", f"2 of 3 pods are not created yet: {QUOTA}")
    assert phase_of(alone, EngineView()) == ("Pending", f"the pod is not created yet: {QUOTA}")
    assert missing_pods_message(a_group("m-g0-0")) == "2 of 3 pods are not created yet"

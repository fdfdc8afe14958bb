"""Operators of two versions in sequence: the later one keeps replicas running and restores lost ones.

The other version is represented by what it leaves behind: unknown fields of a spec, a status with more or fewer fields,
and stored state in another format.
"""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from operator_cluster import FakeCluster

SPEC: dict[str, Any] = {"replicas": 2, "runtime": {"device": "cpu"}, "tuning": {"mode": "Auto"}}
NEWER_SPECS: list[dict[str, Any]] = [
    {"fromTheFuture": {"mode": "Fast"}},
    {"runtime": {"device": "cpu", "fromTheFuture": 1}},
    {"tuning": {"mode": "Auto", "fromTheFuture": ["a"]}},
    {"tuning": {"mode": "FromTheFuture"}},
]
MEMORIES = ("m-rollout", "m-tuning")


def a_settled_cluster() -> FakeCluster:
    cluster = FakeCluster(**SPEC)
    cluster.settle()
    return cluster


def running_state(cluster: FakeCluster) -> dict[str, Any]:
    """Return the pods with their engines' arguments, and the other children."""
    return {
        "pods": {name: pod["metadata"]["uid"] for name, pod in cluster.pods.items()},
        "values": {uid: dict(engine.values) for uid, engine in cluster.engines.items()},
        "children": {key: made.get("spec") for key, made in cluster.objects.items()},
    }


def as_before(newer: dict[str, Any]) -> dict[str, Any]:
    """Return the edit that removes a newer spec's fields."""
    return {name: SPEC.get(name) for name in newer}


@pytest.mark.parametrize("newer", NEWER_SPECS)
def test_newer_spec_is_reported_and_keeps_replicas(newer: dict[str, Any]) -> None:
    """The operator was rolled back and the CRD was not, as Helm does."""
    cluster = a_settled_cluster()
    before = running_state(cluster)
    cluster.edit(**newer)
    cluster.restart_operator()
    for _ in range(12):
        cluster.tick()
    assert running_state(cluster) == before
    assert cluster.status["readyReplicas"] == 2
    ready = cluster.condition("Ready")
    assert ready["status"] == "False"
    assert "fromTheFuture" in ready["message"] or "spec.tuning.mode" in ready["message"]
    assert cluster.condition("Serving")["status"] == "True"


@pytest.mark.parametrize("newer", NEWER_SPECS)
def test_the_newer_version_is_back_and_no_engine_was_restarted(newer: dict[str, Any]) -> None:
    cluster = a_settled_cluster()
    before = running_state(cluster)["pods"]
    cluster.edit(**newer)
    cluster.restart_operator()
    for _ in range(5):
        cluster.tick()
    cluster.edit(**as_before(newer))
    cluster.restart_operator()
    cluster.settle()
    assert running_state(cluster)["pods"] == before
    assert cluster.condition("Ready")["status"] == "True"


@pytest.mark.parametrize("newer", NEWER_SPECS)
def test_newer_spec_adds_equal_replicas_or_none(
    newer: dict[str, Any],
) -> None:
    """The field's effect on pods is unknown, so none is rendered from part of a spec."""
    cluster = a_settled_cluster()
    cluster.edit(**newer)
    cluster.restart_operator()
    cluster.edit(replicas=3)
    for _ in range(20):
        cluster.tick()
    templates = {
        json.dumps(made["spec"]["template"]["spec"]["containers"][0]["args"])
        for (kind, _), made in cluster.objects.items()
        if kind == "StatefulSet"
    }
    assert len(templates) == 1
    cluster.edit(**as_before(newer))
    cluster.settle()
    assert cluster.status["readyReplicas"] == 3


def paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return every path in a status that a version may or may not know."""
    found: list[tuple[Any, ...]] = []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in items:
        found += [(*at, key), *paths(part, (*at, key))]
    return found


def without(status: dict[str, Any], path: tuple[Any, ...]) -> dict[str, Any]:
    found = copy.deepcopy(status)
    place: Any = found
    for key in path[:-1]:
        place = place[key]
    del place[path[-1]]
    return found


def test_older_status_is_completed_without_restart() -> None:
    cluster = a_settled_cluster()
    whole, before = copy.deepcopy(cluster.status), running_state(cluster)
    lacking = [path for path in paths(whole) if not _is_of_a_map_that_must_be_whole(path)]
    assert len(lacking) > 20
    for path in lacking:
        assert cluster.body is not None
        cluster.body["status"] = without(whole, path)
        cluster.restart_operator()
        cluster.settle()
        assert running_state(cluster) == before, path
        assert cluster.status.keys() == whole.keys(), path


def _is_of_a_map_that_must_be_whole(path: tuple[Any, ...]) -> bool:
    """The API server rejects conditions without type and status."""
    return path[0] == "conditions" and len(path) > 2


def test_newer_status_fields_cause_one_write_and_no_restart() -> None:
    cluster = a_settled_cluster()
    before = running_state(cluster)
    assert cluster.body is not None
    now = cluster.condition("Ready")["lastTransitionTime"]
    cluster.body["status"] |= {"fromTheFuture": {"a": 1}}
    cluster.body["status"]["conditions"].append(
        {"type": "FromTheFuture", "status": "True", "reason": "Later", "message": "", "lastTransitionTime": now}
    )
    cluster.body["status"]["tuning"] |= {"fromTheFuture": 1}
    cluster.restart_operator()
    cluster.settle()
    assert running_state(cluster) == before
    written = cluster.writes
    for _ in range(20):
        cluster.tick()
    assert cluster.writes == written


@pytest.mark.parametrize("name", MEMORIES)
def test_state_of_other_version_restarts_nothing(name: str) -> None:
    """State that cannot be parsed or has unknown fields is treated as missing."""
    cluster = a_settled_cluster()
    before = running_state(cluster)["pods"]
    kept = cluster.objects.get(("ConfigMap", name))
    if kept is None:
        pytest.fail(f"{name} is not there")
    for value in list(kept["data"].values()):
        for other in (value + " ", "{}", '{"version": 99}', value.replace("{", '{"fromTheFuture": 1, ', 1)):
            kept = cluster.objects["ConfigMap", name]
            kept["data"] = dict.fromkeys(kept["data"], other)
            cluster.restart_operator()
            cluster.settle()
            assert running_state(cluster)["pods"] == before
            assert cluster.condition("Ready")["status"] == "True"

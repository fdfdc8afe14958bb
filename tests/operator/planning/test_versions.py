"""Operators of two versions, one after the other: whichever takes over, what runs goes on, and comes back as it was.

The other version is what it leaves behind: fields of a spec that this one does not know, a status with more or less in
it, notes in another form.
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


def what_runs(cluster: FakeCluster) -> dict[str, Any]:
    """Pods and what their engines were told, and what the children are."""
    return {
        "pods": {name: pod["metadata"]["uid"] for name, pod in cluster.pods.items()},
        "values": {uid: dict(engine.values) for uid, engine in cluster.engines.items()},
        "children": {key: made.get("spec") for key, made in cluster.objects.items()},
    }


def as_before(newer: dict[str, Any]) -> dict[str, Any]:
    """The edit that takes a newer spec's fields back."""
    return {name: SPEC.get(name) for name in newer}


@pytest.mark.parametrize("newer", NEWER_SPECS)
def test_a_spec_of_a_newer_version_stops_nothing_that_runs_and_the_field_is_named(newer: dict[str, Any]) -> None:
    """The operator was rolled back and the CRD was not, as Helm leaves it."""
    cluster = a_settled_cluster()
    before = what_runs(cluster)
    cluster.edit(**newer)
    cluster.restart_operator()
    for _ in range(12):
        cluster.tick()
    assert what_runs(cluster) == before
    assert cluster.status["readyReplicas"] == 2
    ready = cluster.condition("Ready")
    assert ready["status"] == "False"
    assert "fromTheFuture" in ready["message"] or "spec.tuning.mode" in ready["message"]
    assert cluster.condition("Serving")["status"] == "True"


@pytest.mark.parametrize("newer", NEWER_SPECS)
def test_the_newer_version_is_back_and_no_engine_was_restarted(newer: dict[str, Any]) -> None:
    cluster = a_settled_cluster()
    before = what_runs(cluster)["pods"]
    cluster.edit(**newer)
    cluster.restart_operator()
    for _ in range(5):
        cluster.tick()
    cluster.edit(**as_before(newer))
    cluster.restart_operator()
    cluster.settle()
    assert what_runs(cluster)["pods"] == before
    assert cluster.condition("Ready")["status"] == "True"


@pytest.mark.parametrize("newer", NEWER_SPECS)
def test_replicas_that_are_added_to_a_spec_of_a_newer_version_are_like_the_others_or_wait(
    newer: dict[str, Any],
) -> None:
    """Nobody can know what the field means for a pod: none is made by half of a spec."""
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
    """Every place in a status that a version may know or not."""
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


def test_a_status_of_an_older_version_that_lacks_anything_is_made_whole_and_restarts_nothing() -> None:
    cluster = a_settled_cluster()
    whole, before = copy.deepcopy(cluster.status), what_runs(cluster)
    lacking = [path for path in paths(whole) if not _is_of_a_map_that_must_be_whole(path)]
    assert len(lacking) > 20
    for path in lacking:
        assert cluster.body is not None
        cluster.body["status"] = without(whole, path)
        cluster.restart_operator()
        cluster.settle()
        assert what_runs(cluster) == before, path
        assert cluster.status.keys() == whole.keys(), path


def _is_of_a_map_that_must_be_whole(path: tuple[Any, ...]) -> bool:
    """The API server admits no condition without its type and status, whoever writes it."""
    return path[0] == "conditions" and len(path) > 2


def test_what_a_newer_version_says_beside_what_we_know_restarts_nothing_and_is_written_once() -> None:
    cluster = a_settled_cluster()
    before = what_runs(cluster)
    assert cluster.body is not None
    now = cluster.condition("Ready")["lastTransitionTime"]
    cluster.body["status"] |= {"fromTheFuture": {"a": 1}}
    cluster.body["status"]["conditions"].append(
        {"type": "FromTheFuture", "status": "True", "reason": "Later", "message": "", "lastTransitionTime": now}
    )
    cluster.body["status"]["tuning"] |= {"fromTheFuture": 1}
    cluster.restart_operator()
    cluster.settle()
    assert what_runs(cluster) == before
    written = cluster.writes
    for _ in range(20):
        cluster.tick()
    assert cluster.writes == written


@pytest.mark.parametrize("name", MEMORIES)
def test_notes_in_a_form_of_another_version_restart_nothing(name: str) -> None:
    """What cannot be read, or is signed over more than is known here, is as if it were not there."""
    cluster = a_settled_cluster()
    before = what_runs(cluster)["pods"]
    kept = cluster.objects.get(("ConfigMap", name))
    if kept is None:
        pytest.fail(f"{name} is not there")
    for value in list(kept["data"].values()):
        for other in (value + " ", "{}", '{"version": 99}', value.replace("{", '{"fromTheFuture": 1, ', 1)):
            kept = cluster.objects["ConfigMap", name]
            kept["data"] = dict.fromkeys(kept["data"], other)
            cluster.restart_operator()
            cluster.settle()
            assert what_runs(cluster)["pods"] == before
            assert cluster.condition("Ready")["status"] == "True"

"""Downloaded models: pinned commit, download by replicas, and Events."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from operator_builders import MODEL_FACTS
from operator_cluster import FakeCluster
from trimtab_operator.observed.actions import Event
from trimtab_operator.observed.engines import EngineObservation
from trimtab_operator.observed.phases import EngineView
from trimtab_operator.planning.download_events import download_events
from trimtab_operator.planning.plan import plan_reconcile
from trimtab_operator.report.status import build_status
from trimtab_operator.resource.spec import InferenceDeployment

FIRST, SECOND = "a" * 40, "b" * 40
SENTENCE = "Downloading 43 %, 12.0 GB of 28.0 GB, 2 min left"


def facts(commit: str) -> str:
    return json.dumps({**MODEL_FACTS, "revision": commit})


def a_cluster(**spec: Any) -> FakeCluster:
    cluster = FakeCluster(knows_the_model=False, **{"model": {"uri": "hf://org/name"}, **spec})
    cluster.model_words = (0, facts(FIRST))
    return cluster


def served(cluster: FakeCluster) -> set[str]:
    """Return the model arguments of all engines."""
    sets = [m for (kind, _), m in cluster.objects.items() if kind == "StatefulSet"]
    return {one["spec"]["template"]["spec"]["containers"][0]["args"][1] for one in sets}


def test_replicas_serve_the_commit_of_the_facts_job() -> None:
    cluster = a_cluster(replicas=2)
    cluster.settle()
    assert served(cluster) == {f"hf://org/name@{FIRST}"}
    assert cluster.status["modelRevision"] == FIRST
    assert cluster.status["model"] == "name"


def test_pinned_commit_does_not_restart_pods() -> None:
    cluster = a_cluster()
    cluster.settle()
    assert cluster.condition("Progressing")["message"] == "the present state is the wanted state"


@pytest.mark.parametrize(
    ("uri", "pin", "expected"),
    [
        ("s3://models/llms/name", "c" * 64, "s3://models/llms/name@" + "c" * 64),
        (
            "oci://registry.example.com/llms/name:v1",
            f"sha256:{'d' * 64}",
            f"oci://registry.example.com/llms/name@sha256:{'d' * 64}",
        ),
    ],
)
def test_a_bucket_and_a_tag_are_pinned_as_a_branch_is(uri: str, pin: str, expected: str) -> None:
    cluster = a_cluster(model={"uri": uri})
    cluster.model_words = (0, facts(pin))
    cluster.settle()
    assert served(cluster) == {expected}
    assert cluster.status["modelRevision"] == pin
    assert cluster.status["model"] == "name"


def test_moved_branch_changes_neither_running_nor_new_pods() -> None:
    cluster = a_cluster()
    cluster.settle()
    cluster.model_words = (0, facts(SECOND))
    cluster.edit(replicas=3)
    cluster.restart_operator()
    cluster.settle()
    assert served(cluster) == {f"hf://org/name@{FIRST}"}
    del cluster.objects["ConfigMap", "m-facts"]  # read again without changing running replicas
    cluster.settle()
    assert served(cluster) == {f"hf://org/name@{FIRST}"}
    assert cluster.status["modelRevision"] == FIRST


def test_new_image_serves_the_same_commit() -> None:
    cluster = a_cluster()
    cluster.settle()
    cluster.edit(runtime={"device": "cpu", "image": "engine:2"})
    cluster.model_words = (0, facts(SECOND))
    cluster.settle()
    assert served(cluster) == {f"hf://org/name@{FIRST}"}


def test_new_revision_is_a_new_model() -> None:
    cluster = a_cluster()
    cluster.settle()
    cluster.model_words = (0, facts(SECOND))
    cluster.edit(model={"uri": "hf://org/name@v2"})
    cluster.settle()
    assert served(cluster) == {f"hf://org/name@{SECOND}"}
    assert cluster.status["modelRevision"] == SECOND


def test_models_of_no_hub_have_no_revision() -> None:
    cluster = FakeCluster()
    cluster.settle()
    assert "modelRevision" not in cluster.status


# --- Events -----------------------------------------------------------------------------------------------------------

DOWNLOADING = EngineView(load=("download", 43), load_message=SENTENCE, instance="uid")


def a_deployment(stage: str | None) -> InferenceDeployment:
    load = {} if stage is None else {"load": {"stage": stage, "percent": 1}}
    body = {
        "metadata": {"name": "m", "namespace": "n", "uid": "u"},
        "spec": {"model": {"uri": "hf://org/name"}},
        "status": {"groups": [{"name": "m-0", **load}]},
    }
    return replace(InferenceDeployment.parse(body), commit=FIRST)


@pytest.mark.parametrize(
    ("before", "now", "download_messages"),
    [
        (None, DOWNLOADING, ["DownloadStarted"]),
        ("download", DOWNLOADING, []),
        ("download", EngineView(), []),  # unknown: the engine does not answer
        ("download", EngineView(load=("weights", 3)), ["Downloaded"]),
        ("download", EngineView(applied={}), ["Downloaded"]),  # it serves already
        ("weights", EngineView(load=("ready", 100)), []),
        (None, EngineView(load=("weights", 3)), []),  # it was in the cache
        (None, EngineView(load=("weights", 3), downloaded_bytes=9), ["Downloaded"]),  # quicker than two looks
        ("ready", EngineView(load=("weights", 3), downloaded_bytes=9), ["Downloaded"]),  # its next container's
        ("download", EngineView(load=("weights", 3), downloaded_bytes=9), ["Downloaded"]),
    ],
)
def test_download_start_and_end_emit_events(before: str | None, now: EngineView, download_messages: list[str]) -> None:
    events = download_events(a_deployment(before), {"m-0": now})
    assert [note.reason for note in events] == download_messages
    assert all(f"hf://org/name, pinned to {FIRST}" in note.message for note in events)


def test_reported_download_is_not_reported_again() -> None:
    deployment = a_deployment("weights")
    deployment.status["groups"][0]["load"]["downloadedBytes"] = 9
    assert download_events(deployment, {"m-0": EngineView(load=("profile", 3), downloaded_bytes=9)}) == ()


def told_while_loading(seen: EngineObservation) -> tuple[dict[str, Any], list[Event]]:
    """Return the status and the download Events of a plan with these engine reports."""
    cluster = a_cluster()
    cluster.start_seconds = 600.0
    while not cluster.pods:
        cluster.tick()
    cluster.tick()
    snapshot = cluster.look()
    plan = plan_reconcile(replace(snapshot, engines={group.name: seen for group in cluster.groups}), cluster.state)
    status = build_status(snapshot.deployment, plan.status_inputs, now=datetime.fromtimestamp(cluster.now, UTC))
    return status, [note for note in plan.events if note.reason.startswith("Download")]


def test_unobserved_download_is_reported_with_its_size() -> None:
    sentence = "Downloaded 3 MB in 0 s"
    status, events = told_while_loading(
        EngineObservation(False, "not ready", load=("weights", 3), load_message=sentence, downloaded_bytes=9)
    )
    assert status["groups"][0]["load"]["downloadedBytes"] == 9
    (download_messages,) = {note.message for note in events if note.reason == "Downloaded"}
    assert download_messages.endswith(f": {sentence}")


def test_status_has_download_progress() -> None:
    status, events = told_while_loading(
        EngineObservation(False, "not ready", load=("download", 43), load_message=SENTENCE)
    )
    assert status["groups"][0]["load"] == {"stage": "download", "percent": 43, "message": SENTENCE}
    assert status["phase"] == "Downloading"
    assert [note.reason for note in events] == ["DownloadStarted"]

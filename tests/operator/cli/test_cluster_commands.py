"""`trimtab status`, `set`, `export`, `pause` and `resume`: API requests, output and errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from replying_api_server import ReceivedRequest, ReplyingApiServer
from trimtab_operator.cli.cluster_commands import exported
from trimtab_operator.cli.trimtab_command import app
from trimtab_operator.planning.admission import validation_messages
from typer.testing import CliRunner, Result

PATH = "/apis/trimtab.dev/v1alpha1/namespaces/team-a/inferencedeployments"
RESOURCE: dict[str, Any] = {
    "apiVersion": "trimtab.dev/v1alpha1",
    "kind": "InferenceDeployment",
    "metadata": {
        "name": "m",
        "namespace": "team-a",
        "uid": "u",
        "resourceVersion": "7",
        "generation": 2,
        "annotations": {"kubectl.kubernetes.io/last-applied-configuration": "{}", "team": "a"},
    },
    "spec": {
        "model": {"uri": "hf://a/b"},
        "runtime": {"device": "cuda"},
        "engine": {"gpuMemoryUtilization": "0.80"},
        "tuning": {"mode": "Auto"},
    },
    "status": {
        "ready": "1/2",
        "phase": "Loading",
        "url": "http://m.team-a:8000/v1",
        "model": "b",
        "groups": [
            {"name": "m-g0", "ordinal": 0, "revision": "abc", "phase": "Ready", "ready": True},
            {
                "name": "m-g1",
                "ordinal": 1,
                "revision": "abc",
                "phase": "Loading",
                "ready": False,
                "load": {"stage": "weights", "percent": 40},
                "message": "loading",
            },
        ],
        "engine": {
            "configured": {"gpuMemoryUtilization": "0.8", "maxNumSeqs": "256"},
            "effective": {"gpuMemoryUtilization": 0.87, "maxNumSeqs": 256},
        },
        "tuning": {
            "mode": "Auto",
            "applied": {"gpuMemoryUtilization": "0.87", "maxNumSeqs": "128"},
            "recommendation": {"knob": "maxNumSeqs", "to": "300"},
            "history": [{"message": "Raised it."}],
        },
        "conditions": [{"type": "Ready", "status": "False", "reason": "Loading", "message": "1 of 2 replicas"}],
    },
}


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ReplyingApiServer]:
    server = ReplyingApiServer(tmp_path / "kubeconfig")
    server.replies = {
        f"GET {PATH}": (200, {"items": [RESOURCE]}),
        f"GET {PATH}/m": (200, RESOURCE),
        f"PATCH {PATH}/m": (200, RESOURCE),
    }
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
    with server.served():
        yield server


def patches(api: ReplyingApiServer) -> list[ReceivedRequest]:
    return [sent for sent in api.requests if sent.method == "PATCH"]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_status_lists_deployments_with_their_last_decision(api: ReplyingApiServer) -> None:
    done = run("status")
    assert done.exit_code == 0, done.output
    for part in ("m", "1/2", "Loading", "Auto", "hf://a/b", "Raised it."):
        assert part in done.stdout


def test_status_of_one_shows_replicas_parameters_and_conditions(api: ReplyingApiServer) -> None:
    text = run("status", "m").stdout
    for part in ("m-g1", "weights 40 %", "gpuMemoryUtilization", "0.87", "300", "1 of 2 replicas"):
        assert part in text


def test_status_as_json_is_the_resource(api: ReplyingApiServer) -> None:
    assert json.loads(run("status", "m", "-o", "json").stdout) == RESOURCE
    assert json.loads(run("status", "-o", "json").stdout) == [RESOURCE]


def test_set_patches_typed_values_and_names_the_effect(api: ReplyingApiServer) -> None:
    done = run("set", "m", "gpuMemoryUtilization=0.85", "maxNumSeqs=128", "spec.replicas=3", "--dry-run")
    assert done.exit_code == 0, done.output
    (sent,) = patches(api)
    assert sent.body == {"spec": {"engine": {"gpuMemoryUtilization": "0.85", "maxNumSeqs": 128}, "replicas": 3}}
    assert sent.query["dryRun"] == ["All"]
    assert "spec.replicas = 3" in done.stdout


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("maxNumSeqs", "is not FIELD=VALUE"),
        ("maxNumSeq=1", "there is no field maxNumSeq"),
        ("maxNumSeqs=x", "is not of type integer"),
    ],
)
def test_wrong_change_is_rejected_before_the_request(api: ReplyingApiServer, change: str, message: str) -> None:
    done = run("set", "m", change)
    assert (done.exit_code, patches(api)) == (2, [])
    assert message in done.stderr


def test_rejection_by_the_webhook_is_one_line(api: ReplyingApiServer) -> None:
    rejected = {"kind": "Status", "code": 422, "message": "spec.engine.maxNumSeqs: is too large"}
    api.replies[f"PATCH {PATH}/m"] = (422, rejected)
    done = run("set", "m", "maxNumSeqs=128")
    assert done.exit_code == 2
    assert done.stderr.strip() == "set: rejected: spec.engine.maxNumSeqs: is too large"


def test_pause_and_resume_set_the_annotation(api: ReplyingApiServer) -> None:
    assert run("pause", "m").exit_code == run("resume", "m").exit_code == 0
    values = [sent.body["metadata"]["annotations"]["trimtab.dev/paused"] for sent in patches(api)]
    assert values == ["true", None]


def test_export_has_the_tuned_values_and_is_valid(api: ReplyingApiServer) -> None:
    manifest = yaml.safe_load(run("export", "m").stdout)
    assert manifest["metadata"] == {"name": "m", "namespace": "team-a", "annotations": {"team": "a"}}
    assert manifest["spec"]["engine"] == {"gpuMemoryUtilization": "0.87", "maxNumSeqs": 128}
    assert "status" not in manifest
    assert validation_messages(manifest, default_image="e") == []


def test_export_keeps_a_resource_without_tuning() -> None:
    plain = {**RESOURCE, "status": {}}
    assert exported(plain)["spec"] == RESOURCE["spec"]


def test_missing_deployment_is_named(api: ReplyingApiServer) -> None:
    done = run("status", "other")
    assert done.exit_code == 2
    assert "status: InferenceDeployment other not found in namespace team-a" in done.stderr

"""`trimtab status`, `set`, `export`, `pause` and `resume`: API requests, output and errors."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
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


class ApiServer:
    """An API server that has one resource and records patches, and the kubeconfig of a user of it."""

    def __init__(self, folder: Path) -> None:
        self.patches: list[tuple[str, Any]] = []
        self.status = 200
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = {f"{PATH}/m": RESOURCE, PATH: {"items": [RESOURCE]}}.get(self.path)
                self.answer(200 if found else 404, found or {})

            def do_PATCH(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.patches.append((self.path, body))
                rejected = {"kind": "Status", "code": outer.status, "message": "spec.engine.maxNumSeqs: is too large"}
                self.answer(outer.status, RESOURCE if outer.status == 200 else rejected)

            def answer(self, status: int, found: Any) -> None:
                body = json.dumps(found).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                """Keep the output of tests clean."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.kubeconfig = folder / "kubeconfig"
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "c",
            "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{self.server.server_port}"}}],
            "users": [{"name": "u", "user": {}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u", "namespace": "team-a"}}],
        }
        self.kubeconfig.write_text(yaml.safe_dump(config))


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    server = ApiServer(tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
    yield server
    server.server.shutdown()
    server.server.server_close()


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_status_lists_deployments_with_their_last_decision(api: ApiServer) -> None:
    done = run("status")
    assert done.exit_code == 0, done.output
    for part in ("m", "1/2", "Loading", "Auto", "hf://a/b", "Raised it."):
        assert part in done.stdout


def test_status_of_one_shows_replicas_parameters_and_conditions(api: ApiServer) -> None:
    text = run("status", "m").stdout
    for part in ("m-g1", "weights 40 %", "gpuMemoryUtilization", "0.87", "300", "1 of 2 replicas"):
        assert part in text


def test_status_as_json_is_the_resource(api: ApiServer) -> None:
    assert json.loads(run("status", "m", "-o", "json").stdout) == RESOURCE
    assert json.loads(run("status", "-o", "json").stdout) == [RESOURCE]


def test_set_patches_typed_values_and_names_the_effect(api: ApiServer) -> None:
    done = run("set", "m", "gpuMemoryUtilization=0.85", "maxNumSeqs=128", "spec.replicas=3", "--dry-run")
    assert done.exit_code == 0, done.output
    ((path, body),) = api.patches
    assert body == {"spec": {"engine": {"gpuMemoryUtilization": "0.85", "maxNumSeqs": 128}, "replicas": 3}}
    assert "dryRun=All" in path
    assert "spec.replicas = 3" in done.stdout


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("maxNumSeqs", "is not FIELD=VALUE"),
        ("maxNumSeq=1", "there is no field maxNumSeq"),
        ("maxNumSeqs=x", "is not of type integer"),
    ],
)
def test_wrong_change_is_rejected_before_the_request(api: ApiServer, change: str, message: str) -> None:
    done = run("set", "m", change)
    assert (done.exit_code, api.patches) == (2, [])
    assert message in done.stderr


def test_rejection_by_the_webhook_is_one_line(api: ApiServer) -> None:
    api.status = 422
    done = run("set", "m", "maxNumSeqs=128")
    assert done.exit_code == 2
    assert done.stderr.strip() == "set: rejected: spec.engine.maxNumSeqs: is too large"


def test_pause_and_resume_set_the_annotation(api: ApiServer) -> None:
    assert run("pause", "m").exit_code == run("resume", "m").exit_code == 0
    values = [body["metadata"]["annotations"]["trimtab.dev/paused"] for _, body in api.patches]
    assert values == ["true", None]


def test_export_has_the_tuned_values_and_is_valid(api: ApiServer) -> None:
    manifest = yaml.safe_load(run("export", "m").stdout)
    assert manifest["metadata"] == {"name": "m", "namespace": "team-a", "annotations": {"team": "a"}}
    assert manifest["spec"]["engine"] == {"gpuMemoryUtilization": "0.87", "maxNumSeqs": 128}
    assert "status" not in manifest
    assert validation_messages(manifest, default_image="e") == []


def test_export_keeps_a_resource_without_tuning() -> None:
    plain = {**RESOURCE, "status": {}}
    assert exported(plain)["spec"] == RESOURCE["spec"]


def test_missing_deployment_is_named(api: ApiServer) -> None:
    done = run("status", "other")
    assert done.exit_code == 2
    assert "status: InferenceDeployment other not found in namespace team-a" in done.stderr

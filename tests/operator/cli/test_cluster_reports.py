"""`trimtab top`, `history`, `logs`, `chat`, `drain`, `doctor` and `report`: API requests, output and errors."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from replying_api_server import ReplyingApiServer
from trimtab_operator.cli import names
from trimtab_operator.cli.cluster_commands import complete_field
from trimtab_operator.cli.doctor_command import Facts, Verdict, check_cluster, check_machine
from trimtab_operator.cli.report_command import mask, mask_text
from trimtab_operator.cli.trimtab_command import app
from trimtab_operator.resource.crd import structural
from trimtab_operator.resource.signed_text import sign
from trimtab_operator.resource.spec import Spec
from trimtab_operator.tuner.moves import Decision, Move, Reason
from trimtab_operator.tuner.parameters import Parameter
from trimtab_operator.tuner.state import TunerState
from trimtab_operator.tuner.stored import to_json
from typer.testing import CliRunner, Result

NAMESPACE = "/api/v1/namespaces/team-a"
RESOURCE = "/apis/trimtab.dev/v1alpha1/namespaces/team-a/inferencedeployments/m"
ENGINE = {"app.kubernetes.io/component": "engine", "trimtab.dev/role": "leader", "trimtab.dev/group": "0"}
PAGE = """vllm:num_requests_running 32
vllm:num_requests_waiting 4
vllm:kv_cache_usage_perc 0.97
vllm:generation_tokens_total {tokens}
vllm:time_to_first_token_seconds_bucket{{le="0.1"}} {tokens}
vllm:time_to_first_token_seconds_bucket{{le="+Inf"}} {tokens}
vllm:time_to_first_token_seconds_sum 1
"""
ROUTER_PAGE = "# HELP trimtab_router_held_requests x\ntrimtab_router_held_requests 7.0\n"
DECISION = Decision(
    "d-1", 1_790_000_000.0, Move(Reason.SATURATED, Parameter.MAX_NUM_SEQS, 1, 2, {}), "Raised it.", "kept: faster"
)


def make_pod(name: str, **labels: str) -> dict[str, Any]:
    return {
        "metadata": {
            "name": name,
            "namespace": "team-a",
            "uid": f"uid-{name}",
            "labels": {"trimtab.dev/deployment": "m", **labels},
        },
        "status": {"phase": "Running", "containerStatuses": [{"name": "main", "restartCount": 0}]},
    }


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ReplyingApiServer]:
    server = ReplyingApiServer(tmp_path / "kubeconfig")
    tokens = iter(range(0, 10**6, 1000))
    engine, router = make_pod("m-g0-0", **ENGINE), make_pod("m-router-0", **{"app.kubernetes.io/component": "router"})
    status = {
        "ready": "1/1",
        "phase": "Ready",
        "readyReplicas": 1,
        "model": "b",
        "engine": {"effective": {"maxNumSeqs": 64}},
        "tuning": {"objectives": {"ttft": {"target": "500ms", "percentile": 95}}},
    }
    state = sign(to_json(TunerState(history=(DECISION,))), key="k", kind="tuning")
    event = {
        "metadata": {},
        "involvedObject": {"kind": "Pod", "name": "m-g0-0"},
        "reason": "Pulled",
        "message": "Image pulled",
        "lastTimestamp": "2026-01-01T00:00:00Z",
    }
    other = {**event, "involvedObject": {"kind": "Pod", "name": "m-gone-g0-0"}, "message": "another deployment"}
    server.replies = {
        f"GET {RESOURCE}": (200, {"metadata": {"name": "m", "namespace": "team-a"}, "spec": {}, "status": status}),
        f"GET {NAMESPACE}/pods": (200, {"metadata": {}, "items": [engine, router]}),
        f"GET {NAMESPACE}/pods/m-g0-0:8000/proxy/metrics": lambda: (200, PAGE.format(tokens=next(tokens))),
        f"GET {NAMESPACE}/pods/m-router-0:8002/proxy/metrics": (200, ROUTER_PAGE),
        f"GET {NAMESPACE}/events": (200, {"metadata": {}, "items": [other, event]}),
        f"GET {NAMESPACE}/configmaps/m-tuning": (200, {"data": {"state.json": state}}),
        f"GET {NAMESPACE}/pods/m-g0-0/log": (200, "first\nBearer abcdefgh12345 sent\n"),
        f"GET {NAMESPACE}/pods/m-router-0/log": (200, "routed\n"),
        "POST /apis/authorization.k8s.io/v1/selfsubjectaccessreviews": (201, {"status": {"allowed": True}}),
        "GET /version": (200, {"gitVersion": "v1.33.1"}),
    }
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
    with server.served():
        yield server


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_top_shows_load_against_limits_and_objectives(api: ReplyingApiServer) -> None:
    done = run("top", "m", "--once", "--interval", "0.2")
    assert done.exit_code == 0, done.output
    for part in ("97%", "50%", "95 ms / 500 ms", "READY", "1/1", "7"):
        assert part in done.stdout


def test_top_as_json_has_raw_values(api: ReplyingApiServer) -> None:
    (row,) = json.loads(run("top", "m", "-o", "json", "--interval", "0.2").stdout)
    assert (row["name"], row["router_held"], row["problem"]) == ("m", 7.0, None)
    assert (row["load"]["kv_usage"], row["load"]["slots_used"], row["load"]["waiting"]) == (0.97, 0.5, 4)
    assert row["limits"]["ttft"] == {"percentile": 95, "seconds": 0.5}


def test_top_names_engines_that_cannot_be_read(api: ReplyingApiServer) -> None:
    api.replies[f"GET {NAMESPACE}/pods/m-g0-0:8000/proxy/metrics"] = (503, {"message": "no endpoint"})
    done = run("top", "m", "--once", "--interval", "0.2")
    assert done.exit_code == 0
    assert "team-a/m: metrics of 1 engines not readable (Ready)" in done.stdout


def test_history_orders_events_and_decisions_by_time(api: ReplyingApiServer) -> None:
    entries = json.loads(run("history", "m", "-o", "json").stdout)
    assert [(entry["reason"], entry["message"]) for entry in entries] == [
        ("Pulled", "Image pulled"),
        ("Saturated", "Raised it."),
    ]
    assert "kept: faster" in run("history", "m").stdout


def test_logs_name_the_pod_only_with_several_pods(api: ReplyingApiServer) -> None:
    api.replies[f"GET {NAMESPACE}/pods"] = (200, {"metadata": {}, "items": [make_pod("m-g0-0", **ENGINE)]})
    assert run("logs", "m", "--tail", "5").stdout.splitlines()[0] == "first"
    (query,) = [sent.query for sent in api.requests if sent.path.endswith("/log")]
    assert query["tailLines"] == ["5"]
    api.replies[f"GET {NAMESPACE}/pods"] = (
        200,
        {"metadata": {}, "items": [make_pod("m-g0-0", **ENGINE), make_pod("m-g1-0", **ENGINE)]},
    )
    assert "m-g0-0: first" in run("logs", "m").stdout


def test_logs_without_pods_names_the_next_step(api: ReplyingApiServer) -> None:
    api.replies[f"GET {NAMESPACE}/pods"] = (200, {"metadata": {}, "items": []})
    done = run("logs", "m")
    assert done.exit_code == 2
    assert "logs: m has no engine pod; see `trimtab status m`" in done.stderr


def test_chat_streams_the_answer_through_the_api_server(api: ReplyingApiServer) -> None:
    path = f"{NAMESPACE}/services/m:8000/proxy/v1/chat/completions"
    parts = [{"choices": [{"delta": {"content": word}}]} for word in ("Hel", "lo")]
    api.replies[f"POST {path}"] = (200, "".join(f"data: {json.dumps(part)}\n\n" for part in parts) + "data: [DONE]\n")
    done = run("chat", "m", "Hi", "--system", "Be brief.")
    assert (done.exit_code, done.stdout) == (0, "Hello\n")
    (body,) = [sent.body for sent in api.requests if sent.path == path]
    assert [message["role"] for message in body["messages"]] == ["system", "user"]
    assert body["model"] == "b"


def test_chat_shows_the_message_of_the_engine(api: ReplyingApiServer) -> None:
    path = f"{NAMESPACE}/services/m:8000/proxy/v1/chat/completions"
    api.replies[f"POST {path}"] = (400, {"error": {"message": "the prompt is too long"}})
    done = run("chat", "m", "Hi")
    assert (done.exit_code, done.stderr.strip()) == (2, "chat: m: the prompt is too long")


def test_drain_evicts_only_the_pod_it_saw(api: ReplyingApiServer) -> None:
    api.replies[f"GET {NAMESPACE}/pods"] = (200, {"metadata": {}, "items": [make_pod("m-g0-0", **ENGINE)]})
    api.replies[f"POST {NAMESPACE}/pods/m-g0-0/eviction"] = (201, {})
    assert run("drain", "m", "--replica", "0").exit_code == 0
    assert api.requests[-1].body["deleteOptions"] == {"preconditions": {"uid": "uid-m-g0-0"}}
    api.replies[f"POST {NAMESPACE}/pods/m-g0-0/eviction"] = (429, {})
    done = run("drain", "m", "--replica", "0")
    assert done.exit_code == 2
    assert "PodDisruptionBudget allows no eviction now" in done.stderr


def test_report_has_no_secret_and_all_parts(api: ReplyingApiServer, tmp_path: Path) -> None:
    file = tmp_path / "bundle.tar.gz"
    done = run("report", "m", "--file", str(file))
    assert done.exit_code == 0, done.output
    with tarfile.open(file) as bundle:
        texts = {
            member.name.partition("/")[2]: bundle.extractfile(member).read().decode()  # type: ignore[union-attr]
            for member in bundle
        }
    assert {"resource.yaml", "events.yaml", "doctor.json", "pods.yaml", "logs/m-g0-0-main.log"} <= texts.keys()
    assert "Bearer *** sent" in texts["logs/m-g0-0-main.log"]
    assert "another deployment" not in texts["events.yaml"]
    assert not any(sent.path.endswith("/secrets") for sent in api.requests)


def test_mask_hides_values_of_sensitive_fields() -> None:
    manifest = {
        "env": [{"name": "HF_TOKEN", "value": "v"}, {"name": "HOME", "value": "/root"}],
        "password": "v",
        "max_tokens": "5",
        "tokenSecretRef": {"name": "hub"},
        "metadata": {"managedFields": []},
    }
    assert mask(manifest) == {
        "env": [{"name": "HF_TOKEN", "value": "***"}, {"name": "HOME", "value": "/root"}],
        "password": "***",
        "max_tokens": "5",
        "tokenSecretRef": {"name": "hub"},
        "metadata": {},
    }


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("key hf_abcdefghijklmnopqrst end", "key *** end"),
        ("http://user:secret@host/x", "http://***@host/x"),
        ("--api-key=abc next", "--api-key=*** next"),
        ("1,024 tokens in 5 s", "1,024 tokens in 5 s"),
    ],
)
def test_mask_text_hides_credentials_only(text: str, masked: str) -> None:
    assert mask_text(text) == masked


# --- doctor -----------------------------------------------------------------------------------------------------------

CRD = {
    "spec": {
        "versions": [
            {
                "name": "v1alpha1",
                "schema": {"openAPIV3Schema": {"properties": {"spec": {"properties": structural(Spec)["properties"]}}}},
            }
        ]
    }
}
READY = {"conditions": [{"type": "Ready", "status": "True"}]}
COMPLETE = Facts(
    version={"gitVersion": "v1.33.1"},
    crd=CRD,
    operators=[{"metadata": {"name": "o", "namespace": "trimtab-system"}, "status": READY}],
    nodes=[{"metadata": {}, "status": {"allocatable": {"nvidia.com/gpu": "8"}}}],
    webhooks=[{"metadata": {"name": "w"}, "webhooks": [{"clientConfig": {"caBundle": "x"}}]}],
    groups=frozenset({"monitoring.coreos.com/v1"}),
    storage_classes=[{"metadata": {"name": "fast"}}],
)


def test_doctor_finds_nothing_on_a_complete_cluster() -> None:
    checks = check_cluster(COMPLETE, namespace="n")
    assert [check.name for check in checks if check.verdict is not Verdict.OK or check.remedy] == []
    assert "8 GPUs on 1 nodes" in [check.message for check in checks]


def test_doctor_gives_a_remedy_for_each_finding() -> None:
    empty = Facts(None, None, [], [], [], frozenset(), ("create",), [])
    unreadable = Facts({"gitVersion": "v1.19.0"}, None, None, None, None, frozenset())
    for facts in (empty, unreadable):
        found = [check for check in check_cluster(facts, namespace="n") if check.verdict is not Verdict.OK]
        assert len(found) >= 6
        assert all(check.remedy for check in found)


def test_doctor_reports_an_older_crd() -> None:
    older = json.loads(json.dumps(CRD))
    del older["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["router"]
    facts = Facts(**{name: getattr(COMPLETE, name) for name in Facts.__slots__} | {"crd": older})
    (check,) = [check for check in check_cluster(facts, namespace="n") if check.name == "CRD"]
    assert (check.verdict, "spec.router" in check.message) == (Verdict.WARNING, True)


def test_doctor_without_kubeconfig_checks_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    done = run("doctor")
    assert done.exit_code == 1
    assert "no cluster configured" in done.stdout
    assert check_machine(has_kubeconfig=True, which=lambda _: None)[1].verdict is Verdict.WARNING


def test_doctor_reads_the_cluster(api: ReplyingApiServer) -> None:
    done = run("doctor", "-o", "json")
    checks = {check["name"]: check for check in json.loads(done.stdout)}
    assert done.exit_code == 1
    assert checks["Kubernetes"]["message"] == "v1.33.1"
    assert (checks["CRD"]["verdict"], checks["Permissions"]["verdict"]) == ("problem", "ok")


# --- completion -------------------------------------------------------------------------------------------------------


def test_names_come_from_kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "kubectl"
    program.write_text("#!/bin/sh\necho inferencedeployment.trimtab.dev/chat\necho x/code\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert names.complete_name("c") == ["chat", "code"]
    assert names.complete_name("co") == ["code"]
    program.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert names.complete_name("") == []


def test_fields_and_enumerated_values_are_completed() -> None:
    assert complete_field("maxNumS") == ["maxNumSeqs="]
    assert "kvCacheDtype=fp8" in complete_field("kvCacheDtype=fp")

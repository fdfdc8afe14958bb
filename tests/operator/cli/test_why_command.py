"""`trimtab why`: API requests, output and errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from replying_api_server import ReplyingApiServer
from trimtab_operator.cli.trimtab_command import app
from trimtab_operator.resource.signed_text import sign
from trimtab_operator.tuner.moves import Decision, Expectation, Measure, Move, Reason, decision_id
from trimtab_operator.tuner.parameters import Parameter
from trimtab_operator.tuner.state import TunerState
from trimtab_operator.tuner.stored import to_json
from typer.testing import CliRunner, Result

MOVE = Move(
    Reason.KV_CACHE_TOO_SMALL,
    Parameter.GPU_MEMORY_UTILIZATION,
    0.77,
    0.87,
    {"recomputed_share": 0.203, "preemptions": 8.0, "headroom_bytes": 235929600.0, "kv_tokens_gained": 2832.0},
    (Expectation(Measure.RECOMPUTED, 0.203, 0.0, 0.0, 0.01),),
    "less than 1% of tokens recomputed",
)
DECISION = Decision(
    decision_id(1_790_000_000.0, MOVE), 1_790_000_000.0, MOVE, "Raised it.", "kept: predicted 0.0%, observed 0.0%"
)
RESOURCE = "/apis/trimtab.dev/v1alpha1/namespaces/{}/inferencedeployments/{}"
CONFIG_MAP = "/api/v1/namespaces/{}/configmaps/{}-tuning"


class Cluster(ReplyingApiServer):
    """An API server with resources and their tuner states."""

    def set_reply(
        self, path: str, found: Any, name: str = "chat", namespace: str = "team-a", *, status: int = 200
    ) -> None:
        """Reply to a read of RESOURCE or CONFIG_MAP."""
        self.replies[f"GET {path.format(namespace, name)}"] = (status, found)

    def scales(self, name: str, namespace: str, scaling: dict[str, int], **status: Any) -> None:
        """The replica count of a resource that is there is the operator's."""
        reply = self.replies[f"GET {RESOURCE.format(namespace, name)}"]
        assert not callable(reply)
        _, resource = reply
        resource["spec"]["scaling"] = scaling
        resource["status"] |= status

    def has(self, name: str, namespace: str, memory: TunerState | None, **status: Any) -> None:
        """Add a resource with its tuner state."""
        self.set_reply(
            RESOURCE,
            {
                "metadata": {"name": name, "namespace": namespace},
                "spec": {},
                "status": {"tuning": {"mode": "Auto", **status}},
            },
            name,
            namespace,
        )
        if memory is not None:
            text = sign(to_json(memory), key="the operator's", kind="tuning")
            self.set_reply(CONFIG_MAP, {"data": {"state.json": text}}, name, namespace)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path / "kubeconfig")
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
    monkeypatch.setenv("COLUMNS", "200")
    with cluster.served():
        yield cluster


def why(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["why", *arguments])


def test_why_prints_evidence_prediction_advice_and_outcome(cluster: Cluster) -> None:
    promises = {"source": "Default", "ttft": {"target": "300ms", "percentile": 95, "perPromptToken": "125us"}}
    applied = {"gpu_memory_utilization": "0.87"}
    cluster.has("chat", "team-a", TunerState(history=(DECISION,)), objectives=promises, applied=applied)
    result = why("chat")
    assert result.exit_code == 0
    for told in (
        "chat in team-a: mode Auto",
        "objectives: ttft 300ms + 125us per prompt token for 95 % of requests (the defaults)",
        "tuned to: gpu_memory_utilization 0.87",
        f"[{DECISION.id}] {MOVE.reason.value}: Raised it.",
        "evidence: preemptions 8",
        "predicted: recomputed share from 20.3% to 0.0%",
        'guideline: "Increase gpu_memory_utilization.',
        "outcome: kept: predicted 0.0%, observed 0.0%",
    ):
        assert told in result.output


def test_the_order_of_the_queue_is_told_with_who_does_not_follow(cluster: Cluster) -> None:
    cluster.has("chat", "team-a", TunerState())
    assert "scheduling policy" not in why("chat").output
    told = {"policy": "deadline", "source": "Objectives", "ttftTarget": "2s", "message": "chat-g0 does not know …"}
    cluster.has("chat", "team-a", TunerState(), schedulingPolicy=told)
    assert (
        "  scheduling policy: deadline: requests that can still meet a TTFT of 2 s run first\n"
        "  chat-g0 does not know …\n"
    ) in why("chat").output
    assert json.loads(why("chat", "-o", "json").stdout)["tuning"]["schedulingPolicy"] == told


def test_a_count_that_is_the_operators_is_told_with_its_bounds(cluster: Cluster) -> None:
    cluster.has("chat", "team-a", TunerState())
    assert "replicas:" not in why("chat").output
    counts = {"desiredReplicas": 3, "readyReplicas": 2, "lastScaleTime": "2026-01-01T12:00:00Z"}
    cluster.scales("chat", "team-a", {"minReplicas": 1, "maxReplicas": 6}, **counts)
    assert "  replicas: 3 desired, since 2026-01-01T12:00:00Z, 2 ready; between 1 and 6\n" in why("chat").output


def test_a_count_that_the_gpu_budget_cuts_is_told_with_why(cluster: Cluster) -> None:
    cluster.has("chat", "team-a", TunerState())
    said = {"type": "ScalingLimited", "status": "True", "reason": "OverBudget", "message": "3 of 5 wanted replicas: …"}
    counts = {"desiredReplicas": 3, "wantedReplicas": 5, "readyReplicas": 3, "conditions": [said]}
    cluster.scales("chat", "team-a", {"maxReplicas": 6}, **counts)
    told = "  replicas: 5 desired, 3 ready; between 1 and 6\n  3 of 5 wanted replicas: …\n"
    assert told in why("chat").output


def test_programs_get_the_same_as_json(cluster: Cluster) -> None:
    cluster.has("chat", "team-b", TunerState(history=(DECISION,)))
    answer = json.loads(why("chat", "-n", "team-b", "-o", "json").stdout)
    assert (answer["name"], answer["namespace"], answer["recommendation"]) == ("chat", "team-b", None)
    assert answer["decisions"][0]["id"] == DECISION.id
    assert answer["decisions"][0]["evidence"]["preemptions"] == 8.0


@pytest.mark.parametrize("kept", [None, "", "{", '{"state": 7}', '{"state": "{}"}', "[" * 100_000])
def test_nothing_decided_and_nothing_readable_are_no_error(cluster: Cluster, kept: str | None) -> None:
    cluster.has("chat", "team-a", None)
    if kept is not None:
        cluster.set_reply(CONFIG_MAP, {"data": {"state.json": kept}})
    result = why("chat")
    assert result.exit_code == 0
    assert "No decisions yet" in result.output


def test_mode_off_says_that_nothing_is_decided(cluster: Cluster) -> None:
    cluster.has("chat", "team-a", None, mode="Off")
    assert "spec.tuning.mode is Off: no decisions are made" in why("chat").output


def test_why_unreadable_input_is_one_line_and_exit_2(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = why("nobody")
    assert absent.exit_code == 2
    assert "InferenceDeployment nobody not found in namespace team-a; list them with kubectl get" in absent.output
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    nowhere = why("chat")
    assert (nowhere.exit_code, "why: no cluster configured" in nowhere.output) == (2, True)


@pytest.mark.parametrize("place", [RESOURCE, CONFIG_MAP], ids=["the resource", "what the tuner remembers"])
def test_a_right_that_its_user_lacks_is_named(cluster: Cluster, place: str) -> None:
    cluster.has("chat", "team-a", TunerState())
    message = 'x is forbidden: User "u" cannot get resource "things" in API group "" in the namespace "team-a"'
    cluster.set_reply(place, {"kind": "Status", "code": 403, "message": message}, status=403)
    result = why("chat")
    assert result.exit_code == 2
    assert "permission denied to get things in namespace team-a; ask the" in result.output


def test_another_refusal_is_told_in_the_servers_words(cluster: Cluster) -> None:
    refused = {"kind": "Status", "code": 429, "message": "too many requests, please try again later"}
    cluster.set_reply(RESOURCE, refused, status=429)
    result = why("chat")
    assert result.exit_code == 2
    assert "API server error 429: too many requests, please try again later" in result.output


@pytest.mark.parametrize("text", ["{", "a: [", "just words", "- 1", ""])
def test_a_broken_kubeconfig_is_one_line(cluster: Cluster, text: str) -> None:
    cluster.kubeconfig.write_text(text)
    result = why("chat")
    assert (result.exit_code, result.output.count("\n")) == (2, 1)
    assert result.output.startswith("why: no cluster configured (")


def test_a_proxy_that_answers_in_the_cluster_s_place_is_told(cluster: Cluster) -> None:
    cluster.set_reply(RESOURCE, ["<html>"])
    result = why("chat")
    assert (result.exit_code, "no Kubernetes API server at" in result.output) == (2, True)


def test_a_resource_without_a_word_on_tuning_has_the_default_mode(cluster: Cluster) -> None:
    cluster.set_reply(RESOURCE, {"metadata": {"name": "chat"}})
    assert "chat in team-a: mode Recommend" in why("chat").output


def test_a_cluster_that_does_not_answer_is_named(cluster: Cluster, tmp_path: Path) -> None:
    config = yaml.safe_load(cluster.kubeconfig.read_text())
    config["clusters"][0]["cluster"]["server"] = "http://127.0.0.1:9"
    cluster.kubeconfig.write_text(yaml.safe_dump(config))
    result = why("chat")
    assert result.exit_code == 2
    assert "cannot reach the API server at http://127.0.0.1:9: " in result.output
    assert "refused" in result.output

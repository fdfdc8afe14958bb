"""Scenario: the sample becomes Ready, and the openai client streams an answer through the Service."""

from __future__ import annotations

import time

import pytest
from conftest import Apply
from harness.answer import EXPECTED, ask
from harness.deployment import Deployment
from harness.kube import Kube, is_true
from harness.report import log_line, report_measurement
from harness.wait import NotYet
from harness.watch import Watched, watch

CRD = "inferencedeployments.trimtab.dev"


@pytest.fixture(scope="module")
def first(apply: Apply, kube: Kube, namespace: str) -> tuple[Deployment, Watched, float]:
    """Return the sample, the states it had until Ready, and when it was applied."""
    begin = time.monotonic()
    deployment = apply()
    with watch(kube, CRD, deployment.name, namespace) as watched:
        deployment.ready()
        deployment.waiter.until("the watch has seen Ready", lambda: _has_seen_ready(watched), deadline_seconds=10.0)
    return deployment, watched, begin


def _has_seen_ready(watched: Watched) -> None:
    if not any(is_true(state, "Ready") for state in watched.states):
        raise NotYet(f"{len(watched.states)} states")


def test_openai_client_streams_answer_through_service(first: tuple[Deployment, Watched, float]) -> None:
    deployment, _, begin = first
    answer = ask(deployment)
    report_measurement(f"kubectl apply to first token: {answer.first_token_at - begin:.1f} s")
    log_line(f"answer: {answer.text!r}")
    assert EXPECTED in answer.text
    assert answer.chunks > 1, "the answer came in one piece, so it was not streamed"
    assert answer.completion_tokens >= answer.chunks > 0


def test_status_reports_load_progress_until_ready(first: tuple[Deployment, Watched, float]) -> None:
    _, watched, _ = first
    groups = [group for state in watched.states for group in state.get("status", {}).get("groups", [])]
    loads = [(group["load"]["stage"], group["load"]["percent"]) for group in groups if group.get("load")]
    log_line(f"load progress: {loads}")
    assert loads, "no load progress was seen in status.groups"
    percents = [percent for _, percent in loads]
    assert percents == sorted(percents), f"progress went back: {loads}"
    # The model loads in 3 s and the operator polls every 5 s: stages may be missed, the phase may not.
    assert "Loading" in {group["phase"] for group in groups}
    assert loads[-1] == ("ready", 100)


def test_ready_condition_follows_ready_replicas(first: tuple[Deployment, Watched, float]) -> None:
    _, watched, _ = first
    for state in watched.states:
        status = state.get("status", {})
        assert is_true(state, "Ready") == (status.get("readyReplicas", 0) >= 1), status


def test_kubectl_get_prints_columns(first: tuple[Deployment, Watched, float], kube: Kube, namespace: str) -> None:
    text = kube.run("get", "infd", "-n", namespace)
    log_line("kubectl get infd:\n" + text)
    header, row = text.splitlines()[:2]
    for column in ("NAME", "READY", "AGE"):
        assert column in header
    assert "1/1" in row


def test_status_has_url_model_and_complete_conditions(first: tuple[Deployment, Watched, float]) -> None:
    deployment, _, _ = first
    status = deployment.status()
    name, _, _ = deployment.service()
    assert status["url"].startswith(f"http://{name}.")
    assert status["model"] == deployment.served_name()
    for condition in status["conditions"]:
        assert condition["observedGeneration"] == 1, condition
        assert condition["message"], condition

"""Scenario: the operator is probed, killed, failed over, restricted and upgraded without disturbing engines."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator

import pytest
from conftest import Apply, Remove
from harness.answer import EXPECTED, ask
from harness.deployment import ROLLED_BACK_SECONDS, Deployment
from harness.install import NAMESPACE, Installation
from harness.kube import CRD_KIND, ENFORCE, Kube, KubectlError, condition, is_true
from harness.report import log_line, report_measurement
from harness.wait import NotYet

HEALTH_PORT = 8081
TAKE_OVER_SECONDS = 60.0
SECRET = "trimtab-operator"
START_TIMEOUT = "20s"


def _pod_names(installation: Installation) -> list[str]:
    return sorted(pod["metadata"]["name"] for pod in installation.pods())


def test_operator_probes_succeed(installation: Installation, kube: Kube) -> None:
    pods = _pod_names(installation)
    assert len(pods) == 2
    for pod in pods:
        kube.pod_http(NAMESPACE, pod, HEALTH_PORT, "/healthz")
        kube.pod_http(NAMESPACE, pod, HEALTH_PORT, "/readyz")
    containers = installation.pods()[0]["spec"]["containers"]
    assert containers[0]["livenessProbe"]["httpGet"]["path"] == "/healthz"
    with pytest.raises(KubectlError):
        kube.pod_http(NAMESPACE, pods[0], HEALTH_PORT, "/there-is-no-such-page")


def test_unschedulable_change_rolls_back_after_operator_kill(
    apply: Apply, remove: Remove, installation: Installation, kube: Kube
) -> None:
    deployment = apply("single", rollout={"startTimeout": START_TIMEOUT, "drainTimeout": "5s"})
    deployment.ready()
    before = deployment.revisions()
    overlay = {"spec": {"template": {"spec": {"nodeSelector": {"trimtab.dev/no-such-node": "true"}}}}}
    kube.patch(CRD_KIND, deployment.name, deployment.namespace, overlay)

    def is_under_way() -> None:
        if deployment.revisions() == before:
            raise NotYet("the replica has the old revision")

    deployment.waiter.until("the change reaches the replica", is_under_way, deadline_seconds=30.0)
    kube.delete("pod", installation.leader()["metadata"]["name"], NAMESPACE, grace=0)
    log_line("operator killed during the rollout")
    installation.ready()
    rolled_back = deployment.waiter.until(
        "the change is rolled back", deployment.rolled_back, deadline_seconds=ROLLED_BACK_SECONDS
    )
    assert "within 20s" in rolled_back["message"]
    assert deployment.revisions() == before
    assert EXPECTED in ask(deployment).text
    remove(deployment)


def test_operator_killed_during_engine_load_restarts_nothing(
    apply: Apply, installation: Installation, kube: Kube
) -> None:
    deployment = apply()

    def has_pod() -> str:
        return str(deployment.pod()["metadata"]["uid"])

    uid = deployment.waiter.until("the engine's pod exists", has_pod, deadline_seconds=60.0)
    kube.delete("pod", installation.leader()["metadata"]["name"], NAMESPACE, grace=0)
    log_line("operator killed while the engine loads")
    installation.ready()
    deployment.ready()
    assert deployment.restarts() == {uid: 0}, "the new operator replaced or restarted the engine"


def test_standby_operator_takes_over_after_leader_kill(apply: Apply, installation: Installation, kube: Kube) -> None:
    deployment = apply()
    deployment.ready()
    restarts = deployment.restarts()
    leader = installation.leader()["metadata"]["name"]
    begin = time.monotonic()
    kube.delete("pod", leader, NAMESPACE, grace=0)

    def another_leads() -> str:
        holder = installation.holder()
        if holder == leader:
            raise NotYet(f"{leader} still holds the Lease")
        return holder

    installation.waiter.until("another operator leads", another_leads, deadline_seconds=TAKE_OVER_SECONDS)
    report_measurement(f"leader killed: another operator leads after {time.monotonic() - begin:.1f} s")
    _reconciles_edit(deployment, kube)
    assert deployment.restarts() == restarts


def _reconciles_edit(deployment: Deployment, kube: Kube) -> None:
    """Assert that the new leader reconciles an edit that needs no restart."""
    item = kube.patch(CRD_KIND, deployment.name, deployment.namespace, {"spec": {"tuning": {"mode": "Off"}}})

    def observed() -> None:
        now = deployment.get()
        if now["status"]["observedGeneration"] != item["metadata"]["generation"] or not is_true(now, "Ready"):
            raise NotYet(f"observedGeneration {now['status']['observedGeneration']}")

    deployment.waiter.until("the new leader has observed an edit", observed, deadline_seconds=60.0)


@pytest.fixture
def restricted_operator(installation: Installation, kube: Kube) -> Iterator[Installation]:
    """Enforce Pod Security `restricted` in the operator's namespace."""
    kube.run("label", "namespace", NAMESPACE, "--overwrite", f"{ENFORCE}=restricted")
    yield installation
    kube.run("label", "namespace", NAMESPACE, f"{ENFORCE}-")


def test_operator_is_admitted_by_restricted_pod_security(restricted_operator: Installation, kube: Kube) -> None:
    before = {pod["metadata"]["uid"] for pod in restricted_operator.pods()}
    kube.run("rollout", "restart", "deployment/trimtab-operator", "--namespace", NAMESPACE)
    restricted_operator.ready()
    assert not before & {pod["metadata"]["uid"] for pod in restricted_operator.pods()}


def test_upgrade_with_changed_defaults_restarts_no_engine(apply: Apply, installation: Installation, kube: Kube) -> None:
    deployment = apply()
    deployment.ready()
    restarts = deployment.restarts()
    secret = kube.get("secret", SECRET, NAMESPACE)
    assert secret is not None
    rotated = {
        "former-key": secret["data"]["key"],
        "key": base64.b64encode(b"another secret of this scenario").decode(),
    }
    kube.patch("secret", SECRET, NAMESPACE, {"data": rotated})
    installation.install(**{"engine.image.tag": "of-no-image", "tickSeconds": "6"})

    def is_reported() -> None:
        progressing = condition(deployment.get(), "Progressing") or {}
        if "trimtab.dev/restarted-at" not in progressing.get("message", ""):
            raise NotYet(f"Progressing: {progressing.get('message')!r}")

    deployment.waiter.until("the new operator reports the pending pod template", is_reported, deadline_seconds=60.0)
    assert deployment.restarts() == restarts
    _reconciles_edit(deployment, kube)
    assert deployment.restarts() == restarts

"""Privileges of engine pods: none unless the administrator allows them by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from operator_builders import a_deployment, a_resource, a_spec
from operator_cluster import FakeCluster
from pod_security import violations
from trimtab_operator.builders.admin_token import TokenHashes
from trimtab_operator.builders.facts_job import facts_job
from trimtab_operator.builders.stateful_set import leader_stateful_set, rendered, worker_stateful_set
from trimtab_operator.planning.admission import review, validation_messages
from trimtab_operator.resource.allowed_privileges import PRIVILEGES
from trimtab_operator.resource.installation import Installation
from trimtab_operator.resource.spec import KIND

LOCKS = {"securityContext": {"capabilities": {"add": ["IPC_LOCK"]}}}
VOLUME = {"name": "rdma", "hostPath": {"path": "/dev/infiniband"}}
OVERLAYS: dict[str, dict[str, Any]] = {
    "hostNetwork": {"hostNetwork": True},
    "hostIPC": {"hostIPC": True},
    "serviceAccountName": {"serviceAccountName": "cloud.reader"},
    "hostPath": {"volumes": [VOLUME]},
    "IPC_LOCK": {"containers": [{"name": "main", **LOCKS}]},
}


def a_body(overlay: dict[str, Any]) -> dict[str, Any]:
    return {"kind": KIND, **a_resource(**a_spec(template={"spec": overlay}))}


def refused(overlay: dict[str, Any], *allowed_privileges: str) -> list[str]:
    return validation_messages(a_body(overlay), default_image="e", allowed_privileges=frozenset(allowed_privileges))


def test_every_privilege_has_a_case() -> None:
    assert OVERLAYS.keys() == set(PRIVILEGES)


@pytest.mark.parametrize("privilege", PRIVILEGES)
def test_privilege_is_rejected_unless_allowed(privilege: str) -> None:
    others = [other for other in PRIVILEGES if other != privilege]
    (said,) = refused(OVERLAYS[privilege], *others)
    assert f"ask the administrator to add {privilege} to the chart's podOverlay.allowedPrivileges" in said
    assert refused(OVERLAYS[privilege], privilege) == []


@pytest.mark.parametrize("privilege", PRIVILEGES)
def test_webhook_accepts_allowed_privileges(privilege: str) -> None:
    request = {"uid": "r", "operation": "CREATE", "object": a_body(OVERLAYS[privilege])}
    for allowed_privileges, is_allowed in ((frozenset[str](), False), (frozenset({privilege}), True)):
        answer = review({"request": request}, default_image="e", allowed_privileges=allowed_privileges)
        assert answer["response"]["allowed"] is is_allowed


@pytest.mark.parametrize(
    ("overlay", "field"),
    [
        ({"hostNetwork": "yes"}, "spec.template.spec.hostNetwork"),
        ({"serviceAccountName": "Not/a name"}, "spec.template.spec.serviceAccountName"),
        ({"serviceAccountName": None}, "spec.template.spec.serviceAccountName"),
        ({"hostPID": True}, "spec.template.spec.hostPID"),
        ({"containers": [{"name": "main", "securityContext": {"privileged": True}}]}, "containers[0].securityContext"),
        (
            {"containers": [{"name": "main", "securityContext": {"capabilities": {"add": ["IPC_LOCK", "SYS_ADMIN"]}}}]},
            "containers[0].securityContext",
        ),
    ],
)
def test_all_privileges_allow_nothing_else(overlay: dict[str, Any], field: str) -> None:
    (said,) = refused(overlay, *PRIVILEGES)
    assert field in said


def test_allowed_privileges_apply_to_engine_pods_only() -> None:
    overlay = {**OVERLAYS["hostNetwork"], **OVERLAYS["hostIPC"], **OVERLAYS["IPC_LOCK"]}
    deployment = replace(a_deployment(template={"spec": overlay}), allowed_privileges=frozenset(PRIVILEGES))
    wanted = rendered(deployment, token_hashes=TokenHashes("0" * 64, "0" * 64))
    for made in (leader_stateful_set(wanted, 0), worker_stateful_set(wanted, 0, address="10.0.0.1")):
        pod = made["spec"]["template"]["spec"]
        assert (pod["hostNetwork"], pod["hostIPC"]) == (True, True)
        assert pod["containers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
        assert pod["automountServiceAccountToken"] is False
    assert violations(facts_job(deployment, {})["spec"]["template"]) == []


def test_withdrawn_privilege_leaves_running_pods_alone() -> None:
    cluster = FakeCluster(**a_spec(template={"spec": OVERLAYS["hostNetwork"]}))
    cluster.installation = Installation(allowed_privileges=frozenset({"hostNetwork"}))
    cluster.settle()
    pods = {pod["metadata"]["uid"] for pod in cluster.pods.values()}
    assert cluster.condition("Ready")["status"] == "True"
    cluster.installation = Installation()
    cluster.edit(replicas=2)  # no new pod gets a privilege that is forbidden now
    for _ in range(5):
        cluster.tick()
    assert cluster.condition("Ready")["reason"] == "InvalidSpec"
    assert {pod["metadata"]["uid"] for pod in cluster.pods.values()} == pods

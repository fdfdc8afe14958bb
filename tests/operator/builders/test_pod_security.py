"""Every pod of the operator passes Pod Security `restricted`, for any valid spec."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from operator_builders import a_deployment
from pod_security import violations
from trimtab_operator.builders.admin_token import TokenHashes
from trimtab_operator.builders.facts_job import facts_job
from trimtab_operator.builders.stateful_set import leader_stateful_set, rendered, worker_stateful_set
from trimtab_operator.validation.rules import validation_errors

HASHES = TokenHashes("0" * 64, "f" * 64)
SPECS: list[dict[str, Any]] = [
    {},
    {"runtime": {"device": "cuda", "image": "e"}},
    {"parallelism": {"tensor": 2, "pipeline": 2, "gpusPerNode": 2}, "runtime": {"device": "cuda", "image": "e"}},
    {"model": {"uri": "pvc://models/llama"}},
    {
        "template": {
            "metadata": {"annotations": {"team": "a"}},
            "spec": {
                "securityContext": {"runAsUser": 1000, "fsGroup": 1000},
                "volumes": [{"name": "x", "secret": {"secretName": "s"}}],
                "containers": [{"name": "main", "volumeMounts": [{"name": "x", "mountPath": "/x"}]}],
            },
        }
    },
]


@pytest.mark.parametrize("spec", SPECS, ids=["cpu", "cuda", "several-pods", "claim", "overlay"])
def test_the_restricted_profile_admits_engines_and_the_reader_of_their_model(spec: dict[str, Any]) -> None:
    deployment = a_deployment(**spec)
    wanted = rendered(deployment, token_hashes=HASHES)
    assert violations(leader_stateful_set(wanted, 0, address="10.0.0.1")["spec"]["template"]) == []
    assert violations(worker_stateful_set(wanted, 0, address="10.0.0.1")["spec"]["template"]) == []
    assert violations(facts_job(deployment, {})["spec"]["template"]) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("hostNetwork",), True),
        (("volumes", 0, "hostPath"), {"path": "/"}),
        (("securityContext", "seccompProfile"), {"type": "Unconfined"}),
        (("securityContext", "runAsNonRoot"), False),
        (("containers", 0, "securityContext", "privileged"), True),
        (("containers", 0, "securityContext", "allowPrivilegeEscalation"), None),
        (("containers", 0, "securityContext", "capabilities"), {"drop": ["ALL"], "add": ["IPC_LOCK"]}),
        (("containers", 0, "securityContext", "capabilities"), {}),
        (("containers", 0, "ports", 0, "hostPort"), 8000),
        (("containers", 0, "startupProbe", "httpGet", "host"), "elsewhere"),
    ],
)
def test_the_checker_sees_what_the_profile_forbids(path: tuple[str | int, ...], value: object) -> None:
    template = leader_stateful_set(rendered(a_deployment(), token_hashes=HASHES), 0)["spec"]["template"]
    template = copy.deepcopy(template)
    place: Any = template["spec"]
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    assert len(violations(template)) == 1


def test_ids_can_be_left_to_the_cluster() -> None:
    """OpenShift assigns ids from the range of the namespace and rejects others."""
    removed = {"runAsUser": None, "runAsGroup": None, "fsGroup": None}
    deployment = a_deployment(template={"spec": {"securityContext": removed}})
    assert validation_errors(deployment) == ()
    pod = rendered(deployment, token_hashes=HASHES).template["spec"]
    assert pod["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}

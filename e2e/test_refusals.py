"""Story: what cannot be carried out is refused with its reason, before it is there."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import Apply
from harness.deployment import sample
from harness.install import Installation
from harness.kube import CRD_KIND, Kube, KubectlError
from harness.refused import REFUSED

NAME = "refused"
# Refused by the CRD's schema, whether or not anything of ours runs.
MALFORMED: list[tuple[str, dict[str, Any], str]] = [
    ("type", {"replicas": "two"}, "spec.replicas"),
    ("negative", {"replicas": -1}, "spec.replicas"),
    ("enum", {"tuning": {"mode": "Sometimes"}}, "spec.tuning.mode"),
    ("fraction", {"engine": {"gpuMemoryUtilization": "1.5"}}, "spec.engine.gpuMemoryUtilization"),
    ("scheme", {"model": {"uri": "ftp://x"}}, "spec.model.uri"),
]


def _refusal(installation: Installation, namespace: str, changes: dict[str, Any]) -> str:
    manifest = sample(NAME, image=installation.images.model, **changes)
    with pytest.raises(KubectlError) as refused:
        installation.kube.apply(manifest, namespace=namespace)
    return refused.value.stderr


@pytest.mark.parametrize(("changes", "says"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_what_cannot_be_carried_out_is_refused_with_the_reason(
    installation: Installation, namespace: str, changes: dict[str, Any], says: tuple[str, ...]
) -> None:
    """By the webhook, or by the CRD's own rules where Kubernetes knows them: in the same words."""
    message = _refusal(installation, namespace, changes)
    assert "denied the request" in message or f'{NAME}" is invalid' in message, message
    for part in says:
        assert part in message, message


@pytest.mark.parametrize(("changes", "field"), [row[1:] for row in MALFORMED], ids=[row[0] for row in MALFORMED])
def test_the_schema_refuses_what_is_malformed(
    installation: Installation, namespace: str, changes: dict[str, Any], field: str
) -> None:
    assert field in _refusal(installation, namespace, changes)


def test_an_edit_that_cannot_be_carried_out_is_refused_too(apply: Apply, kube: Kube, namespace: str) -> None:
    deployment = apply(replicas=0)
    with pytest.raises(KubectlError, match=r"spec\.parallelism\.gpusPerNode"):
        kube.patch(CRD_KIND, deployment.name, namespace, {"spec": {"parallelism": {"gpusPerNode": 3}}})
    assert deployment.get()["metadata"]["generation"] == 1
    kube.delete(CRD_KIND, deployment.name, namespace)

"""Scenario: invalid specs are rejected with a reason before they are stored."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import Apply
from harness.deployment import sample
from harness.install import Installation
from harness.kube import CRD_KIND, Kube, KubectlError
from harness.rejected_specs import REJECTED

NAME = "refused"
# Rejected by the CRD's schema, even without the operator.
MALFORMED: list[tuple[str, dict[str, Any], str]] = [
    ("type", {"replicas": "two"}, "spec.replicas"),
    ("negative", {"replicas": -1}, "spec.replicas"),
    ("enum", {"tuning": {"mode": "Sometimes"}}, "spec.tuning.mode"),
    ("fraction", {"engine": {"gpuMemoryUtilization": "1.5"}}, "spec.engine.gpuMemoryUtilization"),
    ("scheme", {"model": {"uri": "ftp://x"}}, "spec.model.uri"),
]


def _rejection(installation: Installation, namespace: str, changes: dict[str, Any]) -> str:
    manifest = sample(NAME, image=installation.images.model, **changes)
    with pytest.raises(KubectlError) as rejected:
        installation.kube.apply(manifest, namespace=namespace)
    return rejected.value.stderr


@pytest.mark.parametrize(("changes", "parts"), [row[1:] for row in REJECTED], ids=[row[0] for row in REJECTED])
def test_invalid_spec_is_rejected_with_reason(
    installation: Installation, namespace: str, changes: dict[str, Any], parts: tuple[str, ...]
) -> None:
    """The webhook rejects it, or the CRD's CEL rules on clusters that have them, with the same message."""
    message = _rejection(installation, namespace, changes)
    assert "denied the request" in message or f'{NAME}" is invalid' in message, message
    for part in parts:
        assert part in message, message


@pytest.mark.parametrize(("changes", "field"), [row[1:] for row in MALFORMED], ids=[row[0] for row in MALFORMED])
def test_crd_schema_rejects_malformed_fields(
    installation: Installation, namespace: str, changes: dict[str, Any], field: str
) -> None:
    assert field in _rejection(installation, namespace, changes)


def test_invalid_edit_is_rejected(apply: Apply, kube: Kube, namespace: str) -> None:
    deployment = apply(replicas=0)
    with pytest.raises(KubectlError, match=r"spec\.parallelism\.gpusPerNode"):
        kube.patch(CRD_KIND, deployment.name, namespace, {"spec": {"parallelism": {"gpusPerNode": 3}}})
    assert deployment.get()["metadata"]["generation"] == 1
    kube.delete(CRD_KIND, deployment.name, namespace)

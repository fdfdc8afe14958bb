"""Scenario: engines and the facts Job are admitted in a namespace that enforces Pod Security `restricted`.

Clusters before Kubernetes 1.23 do not enforce it; there the scenario shows that the label is harmless.
"""

from __future__ import annotations

from conftest import Apply
from harness.answer import EXPECTED, ask
from harness.kube import ENFORCE, Kube


def test_engine_and_facts_job_are_admitted_by_restricted_pod_security(apply: Apply, kube: Kube, namespace: str) -> None:
    kube.run("label", "namespace", namespace, "--overwrite", f"{ENFORCE}=restricted")
    deployment = apply()
    deployment.ready()
    assert EXPECTED in ask(deployment).text

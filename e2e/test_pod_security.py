"""Story: where Pod Security enforces `restricted`, engines, the reader of their model and the operator are admitted.

A cluster before Kubernetes 1.23 does not judge it; there the story shows that the label disturbs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from conftest import Apply
from harness.answer import EXPECTED, ask
from harness.install import NAMESPACE, Installation
from harness.kube import Kube

ENFORCE = "pod-security.kubernetes.io/enforce"


def test_engines_and_the_reader_of_their_model_are_admitted(apply: Apply, kube: Kube, namespace: str) -> None:
    kube.run("label", "namespace", namespace, "--overwrite", f"{ENFORCE}=restricted")
    deployment = apply()
    deployment.ready()
    assert EXPECTED in ask(deployment).text


@pytest.fixture
def restricted_operator(installation: Installation, kube: Kube) -> Iterator[Installation]:
    """The operator's namespace, in which no pod is made that asks for more."""
    kube.run("label", "namespace", NAMESPACE, "--overwrite", f"{ENFORCE}=restricted")
    yield installation
    kube.run("label", "namespace", NAMESPACE, f"{ENFORCE}-")


def test_the_operator_is_admitted(restricted_operator: Installation, kube: Kube) -> None:
    before = {pod["metadata"]["uid"] for pod in restricted_operator.pods()}
    kube.run("rollout", "restart", "deployment/trimtab-operator", "--namespace", NAMESPACE)
    restricted_operator.ready()
    assert not before & {pod["metadata"]["uid"] for pod in restricted_operator.pods()}

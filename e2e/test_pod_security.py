"""Story: where Pod Security enforces `restricted`, engines and the reader of their model are admitted.

A cluster before Kubernetes 1.23 does not judge it; there the story shows that the label disturbs nothing.
"""

from __future__ import annotations

from conftest import Apply
from harness.answer import EXPECTED, ask
from harness.kube import ENFORCE, Kube


def test_engines_and_the_reader_of_their_model_are_admitted(apply: Apply, kube: Kube, namespace: str) -> None:
    kube.run("label", "namespace", namespace, "--overwrite", f"{ENFORCE}=restricted")
    deployment = apply()
    deployment.ready()
    assert EXPECTED in ask(deployment).text

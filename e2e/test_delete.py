"""Story: deleting the resource leaves nothing behind."""

from __future__ import annotations

from harness.deployment import Deployment
from harness.kube import CRD_KIND, Kube
from harness.report import say


def test_delete_leaves_nothing(ready: Deployment, kube: Kube) -> None:
    children = ready.children()
    say(f"children: {', '.join(children)}")
    assert {kind.split("/")[0] for kind in children} >= {"StatefulSet", "Service", "ConfigMap", "Pod"}
    kube.delete(CRD_KIND, ready.name, ready.namespace)
    ready.gone()

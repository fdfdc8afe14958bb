"""Scenario: deleting the resource removes all its children."""

from __future__ import annotations

from harness.deployment import Deployment
from harness.kube import CRD_KIND, Kube
from harness.report import log_line


def test_delete_removes_all_children(ready: Deployment, kube: Kube) -> None:
    children = ready.children()
    log_line(f"children: {', '.join(children)}")
    assert {kind.split("/")[0] for kind in children} >= {"StatefulSet", "Service", "ConfigMap", "Pod"}
    kube.delete(CRD_KIND, ready.name, ready.namespace)
    ready.await_deletion()

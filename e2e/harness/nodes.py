"""The cluster's nodes: which pods run where, pausing one, and pretending that one has accelerators."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from harness.kube import Kube, Manifest, is_true
from harness.report import say
from harness.target import run_tool
from harness.wait import NotYet

DRAINED_SECONDS = 300.0  # pods finish their requests first, and wait for each other by their budget
CONTROL_PLANE_LABELS = ("node-role.kubernetes.io/control-plane", "node-role.kubernetes.io/master")


def node_of(pod: Manifest) -> str:
    """The node that a pod was given. Raises NotYet."""
    name = pod["spec"].get("nodeName")
    if not name:
        raise NotYet(f"{pod['metadata']['name']} has no node yet")
    return str(name)


def pod_nodes(kube: Kube) -> list[str]:
    """Nodes that take any pod, by name."""
    found = []
    for node in kube.items("nodes"):
        if not any(taint["effect"] != "PreferNoSchedule" for taint in node["spec"].get("taints", [])):
            found.append(str(node["metadata"]["name"]))
    return sorted(found)


def worker_nodes(kube: Kube) -> list[str]:
    """Those of them without which the cluster goes on, by name."""
    control_plane = set()
    for node in kube.items("nodes"):
        if node["metadata"]["labels"].keys() & set(CONTROL_PLANE_LABELS):
            control_plane.add(str(node["metadata"]["name"]))
    return [name for name in pod_nodes(kube) if name not in control_plane]


def all_ready(kube: Kube) -> None:
    """Raises NotYet while a node is not Ready."""
    waiting = [node["metadata"]["name"] for node in kube.items("nodes") if not is_true(node, "Ready")]
    if waiting:
        raise NotYet(f"not Ready: {', '.join(waiting)}")


def not_ready(kube: Kube, name: str) -> None:
    """Raises NotYet while the control plane takes the node for Ready."""
    node = kube.get("node", name)
    if node is None or is_true(node, "Ready"):
        raise NotYet(f"{name} is still taken for Ready")


@contextmanager
def paused(kube: Kube, node: str) -> Iterator[None]:
    """The node, a container of kind's, stands still and answers nobody, as one that lost its power or its network."""
    say(f"docker pause {node}")
    run_tool("docker", "pause", node, kube=kube)
    try:
        yield
    finally:
        say(f"docker unpause {node}")
        run_tool("docker", "unpause", node, kube=kube)


@contextmanager
def drained(kube: Kube, node: str, selector: str) -> Iterator[None]:
    """The node takes no pods, and those of its pods that are selected were evicted, as an administrator does it."""
    chosen = f"--pod-selector={selector}"
    try:
        kube.run("drain", node, chosen, "--delete-emptydir-data", timeout_seconds=DRAINED_SECONDS)
        yield
    finally:
        kube.run("uncordon", node)


@contextmanager
def pretended(kube: Kube, resource: str, amounts: dict[str, int]) -> Iterator[None]:
    """Nodes that say they have so many of an extended resource: pods that ask for it schedule accordingly."""
    key = resource.replace("/", "~1")
    for node, amount in amounts.items():
        body = [{"op": "add", "path": f"/status/capacity/{key}", "value": str(amount)}]
        _patch_status(kube, node, body)
    try:
        yield
    finally:
        for node in amounts:
            _patch_status(kube, node, [{"op": "remove", "path": f"/status/capacity/{key}"}])


@contextmanager
def kept_for(kube: Kube, node: str, toleration: Mapping[str, str]) -> Iterator[None]:
    """A node that takes only new pods with this toleration."""
    taint = f"{toleration['key']}:{toleration['effect']}"
    kube.run("taint", "node", node, taint)
    try:
        yield
    finally:
        kube.run("taint", "node", node, f"{taint}-")


def _patch_status(kube: Kube, node: str, body: list[dict[str, str]]) -> None:
    kube.run("patch", "node", node, "--subresource=status", "--type=json", "-p", json.dumps(body))

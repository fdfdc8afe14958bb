"""Nodes: placement of pods, pausing, draining and tainting a node, and simulated extended resources."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from harness.kube import Kube, Manifest, is_true
from harness.report import log_line
from harness.target import run_tool
from harness.wait import NotYet

DRAINED_SECONDS = 300.0  # pods drain their requests first, one at a time under their PodDisruptionBudget
CONTROL_PLANE_LABELS = ("node-role.kubernetes.io/control-plane", "node-role.kubernetes.io/master")


def node_of(pod: Manifest) -> str:
    """Return the node of a pod. Raises NotYet if it is not scheduled."""
    name = pod["spec"].get("nodeName")
    if not name:
        raise NotYet(f"{pod['metadata']['name']} has no node yet")
    return str(name)


def pod_nodes(kube: Kube) -> list[str]:
    """Return the names of schedulable nodes without taints that reject pods."""
    found = []
    for node in kube.items("nodes"):
        if not any(taint["effect"] != "PreferNoSchedule" for taint in node["spec"].get("taints", [])):
            found.append(str(node["metadata"]["name"]))
    return sorted(found)


def worker_nodes(kube: Kube) -> list[str]:
    """Return the names of schedulable nodes that are not control-plane nodes."""
    control_plane = set()
    for node in kube.items("nodes"):
        if node["metadata"]["labels"].keys() & set(CONTROL_PLANE_LABELS):
            control_plane.add(str(node["metadata"]["name"]))
    return [name for name in pod_nodes(kube) if name not in control_plane]


def all_ready(kube: Kube) -> None:
    """Raise NotYet while a node is not Ready."""
    waiting = [node["metadata"]["name"] for node in kube.items("nodes") if not is_true(node, "Ready")]
    if waiting:
        raise NotYet(f"not Ready: {', '.join(waiting)}")


def not_ready(kube: Kube, name: str) -> None:
    """Raise NotYet while the node is Ready."""
    node = kube.get("node", name)
    if node is None or is_true(node, "Ready"):
        raise NotYet(f"{name} is still Ready")


@contextmanager
def pause_node(kube: Kube, node: str) -> Iterator[None]:
    """Pause a node's container: it stops responding as after a power or network loss."""
    log_line(f"docker pause {node}")
    run_tool("docker", "pause", node, kube=kube)
    try:
        yield
    finally:
        log_line(f"docker unpause {node}")
        run_tool("docker", "unpause", node, kube=kube)


@contextmanager
def drain_node(kube: Kube, node: str, selector: str) -> Iterator[None]:
    """Drain a node with `kubectl drain`, limited to pods that match the selector; uncordon it afterwards."""
    chosen = f"--pod-selector={selector}"
    try:
        kube.run("drain", node, chosen, "--delete-emptydir-data", timeout_seconds=DRAINED_SECONDS)
        yield
    finally:
        kube.run("uncordon", node)


@contextmanager
def simulated_resource(kube: Kube, resource: str, amounts: dict[str, int]) -> Iterator[None]:
    """Add an extended resource to nodes' status, so that pods that request it are scheduled accordingly."""
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
def tainted_except(kube: Kube, node: str, toleration: Mapping[str, str]) -> Iterator[None]:
    """Taint a node so that only new pods with this toleration are scheduled to it."""
    taint = f"{toleration['key']}:{toleration['effect']}"
    kube.run("taint", "node", node, taint)
    try:
        yield
    finally:
        kube.run("taint", "node", node, f"{taint}-")


def _patch_status(kube: Kube, node: str, body: list[dict[str, str]]) -> None:
    kube.run("patch", "node", node, "--subresource=status", "--type=json", "-p", json.dumps(body))

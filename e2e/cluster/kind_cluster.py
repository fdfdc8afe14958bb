"""A kind cluster: configuration, creation until all nodes are Ready, health, loading of images, and deletion."""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from devtools import docker_cli
from devtools.cache_root import cache_root
from devtools.errors import ClusterError
from devtools.process import output_of, run
from devtools.progress import as_list, log_line, stage, wait_until
from offline import host_settings, pod_network

from .shape import Existing, parse_nodes

READY_SECONDS = 180.0
LOAD_SECONDS = 50.0  # operator and model images, 1.8 GB


@dataclass(frozen=True, slots=True)
class Cluster:
    """A kind cluster by name, and the environment with its Docker daemon, kind and kubectl."""

    name: str
    environment: dict[str, str]

    @property
    def folder(self) -> Path:
        return cache_root() / "clusters" / self.name

    @property
    def kubeconfig(self) -> Path:
        return self.folder / "kubeconfig"

    def kind(self, *arguments: str | Path) -> list[str | Path]:
        return [Path(self.environment["PATH"].split(os.pathsep)[0]) / "kind", *arguments]

    def kubectl(self, *arguments: str, timeout_seconds: float = 30.0) -> str:
        command = ["kubectl", "--kubeconfig", str(self.kubeconfig), "--request-timeout=20s", *arguments]
        return output_of(command, environment=self.environment, timeout_seconds=timeout_seconds)

    def on_node(self, node: str, script: str, stdin: bytes | None = None) -> str:
        """Run a bash script in the node's container."""
        command = ["docker", "exec", "-i", "--privileged", node, "bash", "-euc", script]
        return output_of(command, environment=self.environment, stdin=stdin if stdin is not None else b"")


UNTAINTED_CONTROL_PLANE = json.dumps({"kind": "InitConfiguration", "nodeRegistration": {"taints": []}})


def kind_configuration(workers: int, *, own_network: bool) -> str:
    """Return kind's configuration as JSON (which is valid YAML). The control plane is schedulable.

    On a single node kind itself removes the control plane's taint, and fails if kubeadm has set none.
    """
    networking = {"disableDefaultCNI": True, "podSubnet": pod_network.POD_SUBNET} if own_network else {}
    patches = {"kubeadmConfigPatches": [UNTAINTED_CONTROL_PLANE]} if workers else {}
    control_plane = {"role": "control-plane", **patches}
    nodes = [control_plane, *({"role": "worker"} for _ in range(workers))]
    document: dict[str, Any] = {"kind": "Cluster", "apiVersion": "kind.x-k8s.io/v1alpha4", "nodes": nodes}
    if networking:
        document["networking"] = networking
    return json.dumps(document, indent=2)


def exists(cluster: Cluster) -> bool:
    return cluster.name in output_of(cluster.kind("get", "clusters"), environment=cluster.environment).splitlines()


def shape_of(cluster: Cluster) -> Existing:
    """Return the nodes' roles and images from Docker, which works even if the API server does not respond."""
    listing = output_of(
        [
            *("docker", "ps", "--all", "--filter", f"label=io.x-k8s.kind.cluster={cluster.name}"),
            *("--format", '{{.Label "io.x-k8s.kind.role"}} {{.Image}}'),
        ],
        environment=cluster.environment,
    )
    return parse_nodes(listing)


def nodes(cluster: Cluster) -> list[dict[str, Any]]:
    return list(json.loads(cluster.kubectl("get", "nodes", "-o", "json"))["items"])


def is_ready(node: dict[str, Any]) -> bool:
    return any(c["type"] == "Ready" and c["status"] == "True" for c in node["status"].get("conditions", []))


def is_healthy(cluster: Cluster) -> bool:
    """Return True if the API server responds and every node is Ready."""
    try:
        found = nodes(cluster)
    except ClusterError:
        return False
    return bool(found) and all(map(is_ready, found))


def server_version(cluster: Cluster) -> str:
    return str(json.loads(cluster.kubectl("version", "-o", "json"))["serverVersion"]["gitVersion"])


def create(cluster: Cluster, image: str | None, workers: int, *, own_network: bool) -> None:
    """Create the cluster and wait until every node is Ready. kind chooses the image if `image` is None.

    `own_network` is True for images without a CNI (built by hack/offline): bridges and routes are set up instead.
    """
    host_settings.save()
    cluster.folder.mkdir(parents=True, exist_ok=True)
    configuration = cluster.folder / "kind.json"
    configuration.write_text(kind_configuration(workers, own_network=own_network))
    command = cluster.kind(
        "create",
        "cluster",
        "--name",
        cluster.name,
        "--config",
        configuration,
        "--kubeconfig",
        cluster.kubeconfig,
        "--retain",
        *(["--image", image] if image else []),
    )
    try:
        with stage(f"cluster {cluster.name}: kind create cluster", 30 + 15 * workers):
            run(command, log="kind", environment=cluster.environment)
        with stage(f"cluster {cluster.name}: nodes Ready", 30):
            if own_network:
                pod_network.connect(cluster)
            if not wait_until("nodes Ready", READY_SECONDS, lambda: is_healthy(cluster)):
                not_ready = [node["metadata"]["name"] for node in nodes(cluster) if not is_ready(node)]
                raise ClusterError(f"{as_list(not_ready)} not Ready after {READY_SECONDS:g} s")
    except ClusterError as error:
        folder = None
        with contextlib.suppress(ClusterError):
            folder = collect_logs(cluster)
        delete(cluster)
        raise ClusterError(f"{error}\nThe nodes' logs are in {folder}; the incomplete cluster was deleted") from error


def delete(cluster: Cluster) -> None:
    run(
        cluster.kind("delete", "cluster", "--name", cluster.name, "--kubeconfig", cluster.kubeconfig),
        log="kind",
        environment=cluster.environment,
    )
    cluster.kubeconfig.unlink(missing_ok=True)


def load(cluster: Cluster, images: list[str]) -> None:
    """Copy missing images from Docker to all nodes, in one archive, so that shared layers are sent once."""
    names = [node["metadata"]["name"] for node in nodes(cluster)]
    missing = [image for image in images if any(not holds(cluster, node, image) for node in names)]
    if not missing:
        log_line(f"cluster {cluster.name}: {as_list(images)} already loaded")
        return
    with stage(f"cluster {cluster.name}: loading {as_list(missing)}", LOAD_SECONDS):
        run(
            cluster.kind("load", "docker-image", "--name", cluster.name, *missing),
            log="kind",
            environment=cluster.environment,
        )


def holds(cluster: Cluster, node: str, image: str) -> bool:
    """Return True if the node has exactly this image (the same config digest as in Docker).

    kind checks this with crictl, which Debian does not package, and without it always copies everything.
    """
    reference = image if "/" in image else f"docker.io/library/{image}"
    script = (
        f"digest=$(ctr -n k8s.io images list name=={reference} | awk 'NR == 2 {{print $3}}')\n"
        'test -n "$digest" && ctr -n k8s.io content get "$digest"'
    )
    try:
        manifest = json.loads(cluster.on_node(node, script))
    except (ClusterError, ValueError):
        return False
    held = str(manifest.get("config", {}).get("digest"))
    return held == docker_cli.image_id(cluster.environment, image)


def collect_logs(cluster: Cluster) -> Path:
    """Collect logs that explain why a node or pod does not start, and return their new folder."""
    folder = cluster.folder / "logs" / time.strftime("%Y%m%d-%H%M%S")
    folder.mkdir(parents=True, exist_ok=True)
    containers = output_of(
        ["docker", "ps", "-a", "--filter", f"label=io.x-k8s.kind.cluster={cluster.name}", "--format", "{{.Names}}"],
        environment=cluster.environment,
    ).split()
    if not containers:
        raise ClusterError(
            f"no nodes of a cluster named {cluster.name} exist; `python3 e2e/cluster status` shows the state"
        )
    for node in containers:
        for name, command in {
            "node": ["docker", "logs", node],
            "kubelet": ["docker", "exec", node, "bash", "-c", "cat /var/log/kubelet.log || journalctl -u kubelet"],
            "containerd": [
                "docker",
                "exec",
                node,
                "bash",
                "-c",
                "cat /var/log/containerd.log || journalctl -u containerd",
            ],
            "containers": ["docker", "exec", node, "bash", "-c", "tail -n +1 /var/log/containers/*.log"],
        }.items():
            with contextlib.suppress(ClusterError):
                text = output_of(["bash", "-c", '"$@" 2>&1', "-", *command], environment=cluster.environment)
                (folder / f"{node}.{name}.log").write_text(text + "\n")
    for name, arguments in {"events": ["get", "events", "-A"], "pods": ["get", "pods", "-A", "-o", "wide"]}.items():
        with contextlib.suppress(ClusterError):
            (folder / f"{name}.txt").write_text(cluster.kubectl(*arguments) + "\n")
    log_line(f"logs: {folder}")
    return folder

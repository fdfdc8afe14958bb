"""A kind cluster, from nothing to nodes that are Ready: configuration, creation, pod network, health, removal."""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from devtools.cache_root import cache_root
from devtools.errors import ClusterError
from devtools.process import output_of, run
from devtools.progress import as_list, log_line, stage, wait_until
from offline import docker_daemon, host_settings

from .shape import Found, found_in

# Not kind's own 10.244.0.0/16: the NAT rules of a CNI left on the host would catch traffic between nodes.
POD_SUBNET = "10.245.0.0/16"
POD_CIDR_SECONDS = 60.0
READY_SECONDS = 180.0
LOAD_SECONDS = 50.0  # of operator and model image, 1.8 GB
CNI_FILE = "/etc/cni/net.d/10-pods.conflist"


@dataclass(frozen=True, slots=True)
class Cluster:
    """A kind cluster by name, and the environment that reaches its Docker and finds kind and kubectl."""

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


TAKES_PODS = json.dumps({"kind": "InitConfiguration", "nodeRegistration": {"taints": []}})


def kind_configuration(workers: int, *, own_network: bool) -> str:
    """kind's configuration, as JSON (which is YAML). The control plane takes pods, alone and beside workers.

    On a single node kind removes the control plane's taint itself, and fails where kubeadm was told to set none.
    """
    networking = {"disableDefaultCNI": True, "podSubnet": POD_SUBNET} if own_network else {}
    patches = {"kubeadmConfigPatches": [TAKES_PODS]} if workers else {}
    control_plane = {"role": "control-plane", **patches}
    nodes = [control_plane, *({"role": "worker"} for _ in range(workers))]
    document: dict[str, Any] = {"kind": "Cluster", "apiVersion": "kind.x-k8s.io/v1alpha4", "nodes": nodes}
    if networking:
        document["networking"] = networking
    return json.dumps(document, indent=2)


def exists(cluster: Cluster) -> bool:
    return cluster.name in output_of(cluster.kind("get", "clusters"), environment=cluster.environment).splitlines()


def shape_of(cluster: Cluster) -> Found:
    """Its nodes' roles and images, from Docker: that is there whether or not the cluster answers."""
    listing = output_of(
        [
            *("docker", "ps", "--all", "--filter", f"label=io.x-k8s.kind.cluster={cluster.name}"),
            *("--format", '{{.Label "io.x-k8s.kind.role"}} {{.Image}}'),
        ],
        environment=cluster.environment,
    )
    return found_in(listing)


def nodes(cluster: Cluster) -> list[dict[str, Any]]:
    return list(json.loads(cluster.kubectl("get", "nodes", "-o", "json"))["items"])


def is_ready(node: dict[str, Any]) -> bool:
    return any(c["type"] == "Ready" and c["status"] == "True" for c in node["status"].get("conditions", []))


def is_healthy(cluster: Cluster) -> bool:
    """Whether it answers and every node is Ready."""
    try:
        found = nodes(cluster)
    except ClusterError:
        return False
    return bool(found) and all(map(is_ready, found))


def server_version(cluster: Cluster) -> str:
    return str(json.loads(cluster.kubectl("version", "-o", "json"))["serverVersion"]["gitVersion"])


def create(cluster: Cluster, image: str | None, workers: int, *, own_network: bool) -> None:
    """Create it and wait until every node is Ready. `image` None leaves the choice to kind.

    `own_network`: the image brings no pod network (those built here), so bridges and routes are set up instead.
    """
    host_settings.remember()
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
                connect_pods(cluster)
            if not wait_until("nodes Ready", READY_SECONDS, lambda: is_healthy(cluster)):
                not_ready = [node["metadata"]["name"] for node in nodes(cluster) if not is_ready(node)]
                raise ClusterError(f"{as_list(not_ready)} not Ready after {READY_SECONDS:g} s")
    except ClusterError as error:
        folder = None
        with contextlib.suppress(ClusterError):
            folder = collect_logs(cluster)
        delete(cluster)
        raise ClusterError(
            f"{error}\nThe nodes' logs were kept in {folder}; the half-made cluster was removed"
        ) from error


def delete(cluster: Cluster) -> None:
    run(
        cluster.kind("delete", "cluster", "--name", cluster.name, "--kubeconfig", cluster.kubeconfig),
        log="kind",
        environment=cluster.environment,
    )
    cluster.kubeconfig.unlink(missing_ok=True)


def pod_network(pod_cidr: str) -> str:
    """The CNI configuration of one node: a bridge with the node's own range of addresses.

    No masquerading by the bridge: pods keep their own source address across nodes (see connect_pods for the rest).
    """
    bridge = {
        "type": "bridge",
        "bridge": "cni0",
        "isGateway": True,
        "hairpinMode": True,
        "ipMasq": False,
        "ipam": {"type": "host-local", "ranges": [[{"subnet": pod_cidr}]], "routes": [{"dst": "0.0.0.0/0"}]},
    }
    plugins = [bridge, {"type": "portmap", "capabilities": {"portMappings": True}}]
    return json.dumps({"cniVersion": "0.4.0", "name": "pods", "plugins": plugins}, indent=2)


def connect_pods(cluster: Cluster) -> None:
    """Give each node its bridge, a route to every other node's pods, and one rule that masquerades what leaves."""
    if not wait_until("pod address ranges", POD_CIDR_SECONDS, lambda: _have_ranges(cluster)):
        raise ClusterError(
            f"not every node got a podCIDR within {POD_CIDR_SECONDS:g} s: the controller manager is not up"
        )
    found = [(n["metadata"]["name"], n["spec"]["podCIDR"], _internal_ip(n)) for n in nodes(cluster)]
    for name, pod_cidr, _ in found:
        routes = "".join(f"ip route replace {cidr} via {ip}\n" for other, cidr, ip in found if other != name)
        rule = f"POSTROUTING -s {POD_SUBNET} ! -d {POD_SUBNET} -j MASQUERADE"
        script = (
            f"{routes}iptables -t nat -C {rule} 2>/dev/null || iptables -t nat -A {rule}\n"
            # Renamed into place: the runtime watches the folder and must not see half a file.
            f"cat >{CNI_FILE}.new && mv {CNI_FILE}.new {CNI_FILE}"
        )
        cluster.on_node(name, script, stdin=pod_network(pod_cidr).encode())
    # This cluster has no image of coredns; without its pods nothing is left that cannot start.
    with contextlib.suppress(ClusterError):
        cluster.kubectl("-n", "kube-system", "scale", "deployment", "coredns", "--replicas=0")


def _have_ranges(cluster: Cluster) -> bool:
    try:
        return all(node["spec"].get("podCIDR") for node in nodes(cluster))
    except ClusterError:
        return False


def _internal_ip(node: dict[str, Any]) -> str:
    return next(str(a["address"]) for a in node["status"]["addresses"] if a["type"] == "InternalIP")


def load(cluster: Cluster, images: list[str]) -> None:
    """Copy images from Docker into every node, those that lack them. One archive for all, so shared layers go once."""
    names = [node["metadata"]["name"] for node in nodes(cluster)]
    lacking = [image for image in images if any(not holds(cluster, node, image) for node in names)]
    if not lacking:
        log_line(f"cluster {cluster.name}: {as_list(images)} loaded already")
        return
    with stage(f"cluster {cluster.name}: loading {as_list(lacking)}", LOAD_SECONDS):
        run(
            cluster.kind("load", "docker-image", "--name", cluster.name, *lacking),
            log="kind",
            environment=cluster.environment,
        )


def holds(cluster: Cluster, node: str, image: str) -> bool:
    """Whether the node has this very image: the same configuration digest as Docker's.

    kind asks with crictl, which no Debian package holds, and without it copies everything every time.
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
    return held == docker_daemon.image_id(cluster.environment, image)


def collect_logs(cluster: Cluster) -> Path:
    """Everything that helps to see why a node or a pod does not start, in a new folder."""
    folder = cluster.folder / "logs" / time.strftime("%Y%m%d-%H%M%S")
    folder.mkdir(parents=True, exist_ok=True)
    containers = output_of(
        ["docker", "ps", "-a", "--filter", f"label=io.x-k8s.kind.cluster={cluster.name}", "--format", "{{.Names}}"],
        environment=cluster.environment,
    ).split()
    if not containers:
        raise ClusterError(
            f"there is no node of a cluster named {cluster.name}; `python3 e2e/cluster status` shows what is"
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

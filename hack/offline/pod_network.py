"""The pod network of a node image built from Debian packages: bridges and routes, since it has no CNI of its own."""

from __future__ import annotations

import contextlib
import json
from typing import Any, Protocol

from devtools.errors import ClusterError
from devtools.progress import wait_until

# Not kind's own 10.244.0.0/16: the NAT rules of a CNI left on the host would catch traffic between nodes.
POD_SUBNET = "10.245.0.0/16"
POD_CIDR_SECONDS = 60.0
CNI_FILE = "/etc/cni/net.d/10-pods.conflist"


class Cluster(Protocol):
    """The commands of a kind cluster that setting up its network needs."""

    def kubectl(self, *arguments: str) -> str:
        """Run kubectl and return its output."""

    def on_node(self, node: str, script: str, stdin: bytes | None = None) -> str:
        """Run a bash script in the node's container and return its output."""


def configuration(pod_cidr: str) -> str:
    """Return the CNI configuration of one node: a bridge with the node's address range.

    The bridge does not masquerade, so that pods keep their source address across nodes (see `connect`).
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


def connect(cluster: Cluster) -> None:
    """Set up each node's bridge, routes to other nodes' pods, and masquerading of traffic that leaves the cluster."""
    if not wait_until("pod address ranges", POD_CIDR_SECONDS, lambda: _have_ranges(cluster)):
        raise ClusterError(
            f"not every node got a podCIDR within {POD_CIDR_SECONDS:g} s; the controller manager is not running"
        )
    found = [(n["metadata"]["name"], n["spec"]["podCIDR"], _internal_ip(n)) for n in _nodes(cluster)]
    for name, pod_cidr, _ in found:
        routes = "".join(f"ip route replace {cidr} via {ip}\n" for other, cidr, ip in found if other != name)
        rule = f"POSTROUTING -s {POD_SUBNET} ! -d {POD_SUBNET} -j MASQUERADE"
        script = (
            f"{routes}iptables -t nat -C {rule} 2>/dev/null || iptables -t nat -A {rule}\n"
            # Renamed into place: the runtime watches the folder and must not read a partial file.
            f"cat >{CNI_FILE}.new && mv {CNI_FILE}.new {CNI_FILE}"
        )
        cluster.on_node(name, script, stdin=configuration(pod_cidr).encode())
    # This cluster has no coredns image, so its pods could not start.
    with contextlib.suppress(ClusterError):
        cluster.kubectl("-n", "kube-system", "scale", "deployment", "coredns", "--replicas=0")


def _have_ranges(cluster: Cluster) -> bool:
    try:
        return all(node["spec"].get("podCIDR") for node in _nodes(cluster))
    except ClusterError:
        return False


def _internal_ip(node: dict[str, Any]) -> str:
    return next(str(a["address"]) for a in node["status"]["addresses"] if a["type"] == "InternalIP")


def _nodes(cluster: Cluster) -> list[dict[str, Any]]:
    return list(json.loads(cluster.kubectl("get", "nodes", "-o", "json"))["items"])

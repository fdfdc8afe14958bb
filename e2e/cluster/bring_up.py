"""A cluster of the shape asked for: the one that is up, when it is that, else a new one."""

from __future__ import annotations

import os

from devtools.cache import locked
from devtools.progress import in_parallel, log_line, wait_until
from offline import docker_daemon, node_image

from . import kind_cluster, shape, target, tools
from .kind_cluster import Cluster

PATIENCE_SECONDS = 45.0  # for a cluster that exists to show itself healthy: longer than a node's lease lasts


def bring_up(name: str, workers: int) -> Cluster | None:
    """The cluster `name` with so many workers, up and healthy; None for one that is not ours (CLUSTER=current)."""
    if target.uses_current():
        version = target.current_version(target.with_tools({}, need_kind=False))
        log_line(f"CLUSTER=current: Kubernetes {version} answers; nothing was created")
        return None
    with locked(f"cluster-{name}"):
        cluster = _up(name, workers)
    version, num_nodes = kind_cluster.server_version(cluster), len(kind_cluster.nodes(cluster))
    log_line(f"cluster {cluster.name}: Kubernetes {version}, {num_nodes} node(s) Ready")
    return cluster


def node_images() -> tuple[str, ...]:
    """The images that the nodes of a cluster may run: the one that KIND_NODE_IMAGE names, else kind's or our own."""
    chosen = os.environ.get("KIND_NODE_IMAGE", "")
    return (chosen,) if chosen else (shape.KIND_REPOSITORY, node_image.image_name())


def _up(name: str, workers: int) -> Cluster:
    docker: dict[str, str] = {}
    in_parallel(
        lambda: docker.update(docker_daemon.ensure()),
        lambda: tools.ensure(tools.KIND, tools.KUBECTL, tools.HELM),
    )
    cluster = Cluster(name, target.with_tools(docker))
    if kind_cluster.exists(cluster):
        reason = _why_anew(cluster, workers)
        if reason is None:
            return cluster
        log_line(f"cluster {name}: {reason}: making it anew")
        kind_cluster.delete(cluster)
    image, own_network = _node_image(docker)
    kind_cluster.create(cluster, image, workers, own_network=own_network)
    return cluster


def _why_anew(cluster: Cluster, workers: int) -> str | None:
    """What speaks against the cluster that is there; None when it is of the shape asked for, and healthy."""
    other = shape.difference(kind_cluster.shape_of(cluster), shape.Wanted(workers, node_images()))
    if other is not None:
        return other
    # A busy machine may answer late: a cluster with somebody's work in it is not thrown away for that.
    healthy = wait_until(f"cluster {cluster.name}: healthy", PATIENCE_SECONDS, lambda: kind_cluster.is_healthy(cluster))
    return None if healthy else "it is not healthy"


def _node_image(docker: dict[str, str]) -> tuple[str | None, bool]:
    """The node image to use (None: kind's own), and whether it needs our pod network."""
    chosen = os.environ.get("KIND_NODE_IMAGE", "")
    if chosen:
        return chosen, chosen.startswith(node_image.NAME)
    if docker_daemon.reaches_registry(docker):
        log_line("node image: kind's own, from the image registry")
        return None, False
    log_line("node image: no image registry can be reached, so one of Debian's packages (built once)")
    return node_image.ensure(docker), True

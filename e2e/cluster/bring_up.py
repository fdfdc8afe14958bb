"""Creation or reuse of a cluster with the requested number of workers and node image."""

from __future__ import annotations

import os

from devtools import docker_cli
from devtools.cache import locked
from devtools.progress import in_parallel, log_line, wait_until
from offline import node_image, tools

from . import kind_cluster, shape, target
from .kind_cluster import Cluster

HEALTHY_TIMEOUT_SECONDS = 45.0  # for an existing cluster; longer than a node's lease duration


def bring_up(name: str, workers: int) -> Cluster | None:
    """Return the healthy cluster `name` with `workers` workers, or None for CLUSTER=current."""
    if target.uses_current():
        version = target.current_version(target.with_tools({}, need_kind=False))
        log_line(f"CLUSTER=current: Kubernetes {version} is reachable; nothing was created")
        return None
    with locked(f"cluster-{name}"):
        cluster = _up(name, workers)
    version, num_nodes = kind_cluster.server_version(cluster), len(kind_cluster.nodes(cluster))
    log_line(f"cluster {cluster.name}: Kubernetes {version}, {num_nodes} node(s) Ready")
    return cluster


def node_images() -> tuple[str, ...]:
    """Return the accepted node images: KIND_NODE_IMAGE if set, else kind's or the one built here."""
    chosen = os.environ.get("KIND_NODE_IMAGE", "")
    return (chosen,) if chosen else (shape.KIND_REPOSITORY, node_image.image_name())


def _up(name: str, workers: int) -> Cluster:
    docker: dict[str, str] = {}
    in_parallel(
        lambda: docker.update(docker_cli.ensure()),
        lambda: tools.ensure(tools.KIND, tools.KUBECTL, tools.HELM),
    )
    cluster = Cluster(name, target.with_tools(docker))
    if kind_cluster.exists(cluster):
        reason = _recreate_reason(cluster, workers)
        if reason is None:
            return cluster
        log_line(f"cluster {name}: {reason}; recreating it")
        kind_cluster.delete(cluster)
    image, own_network = _node_image(docker)
    kind_cluster.create(cluster, image, workers, own_network=own_network)
    return cluster


def _recreate_reason(cluster: Cluster, workers: int) -> str | None:
    """Return why the existing cluster cannot be reused, or None if it matches the request and is healthy."""
    other = shape.difference(kind_cluster.shape_of(cluster), shape.Wanted(workers, node_images()))
    if other is not None:
        return other
    # A busy machine may respond late; that is no reason to delete a cluster that is in use.
    healthy = wait_until(
        f"cluster {cluster.name}: healthy", HEALTHY_TIMEOUT_SECONDS, lambda: kind_cluster.is_healthy(cluster)
    )
    return None if healthy else "it is not healthy"


def _node_image(docker: dict[str, str]) -> tuple[str | None, bool]:
    """Return the node image (None for kind's default), and whether it needs the pod network of hack/offline."""
    chosen = os.environ.get("KIND_NODE_IMAGE", "")
    if chosen:
        return chosen, chosen.startswith(node_image.NAME)
    if docker_cli.reaches_registry(docker):
        log_line("node image: kind's own, from the image registry")
        return None, False
    log_line("node image: no image registry is reachable, so it is built from Debian packages (once)")
    return node_image.ensure(docker), True

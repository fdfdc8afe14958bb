"""Selection of the cluster that commands use: this tool's kind cluster, or KUBECONFIG's (CLUSTER=current)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

from devtools import docker_cli
from devtools.cache_root import cache_root
from devtools.errors import ClusterError, UsageError
from devtools.process import output_of, run, succeeds
from offline import tools

from . import kind_cluster
from .kind_cluster import Cluster

DEFAULT_NAME = "trimtab"


def uses_current(environment: Mapping[str, str] = os.environ) -> bool:
    """Return True for CLUSTER=current. Raises UsageError for unknown values."""
    value = environment.get("CLUSTER", "")
    if value not in ("", "kind", "current"):
        raise UsageError(f"CLUSTER is {value!r}; set it to current (the cluster KUBECONFIG points at), or unset it")
    return value == "current"


def with_tools(environment: Mapping[str, str], *, need_kind: bool = True) -> dict[str, str]:
    """Return `environment` with kind, kubectl and helm first on PATH."""
    wanted = (tools.KIND,) if need_kind else ()
    folder = tools.ensure(*wanted, tools.KUBECTL, tools.HELM)
    parts = [part for part in os.environ.get("PATH", os.defpath).split(os.pathsep) if part != str(folder)]
    return {**environment, "PATH": os.pathsep.join([str(folder), *parts])}


def existing(name: str) -> Cluster | None:
    """Return the cluster `name`, or None if it does not exist or Docker is not running. Starts nothing."""
    docker = docker_cli.find()
    if docker is None or not (cache_root() / "bin" / "kind").exists():
        return None
    cluster = Cluster(name, with_tools(docker))
    return cluster if kind_cluster.exists(cluster) else None


def required(name: str) -> Cluster:
    cluster = existing(name)
    if cluster is None:
        raise ClusterError(
            f"there is no cluster named {name}; bring one up with `python3 e2e/cluster up --name {name}`"
        )
    return cluster


def current_version(environment: Mapping[str, str]) -> str:
    """Return the server version of KUBECONFIG's cluster. Raises ClusterError if it is not reachable."""
    command = ["kubectl", "--request-timeout=15s", "version", "-o", "json"]
    try:
        server = json.loads(output_of(command, environment=environment)).get("serverVersion")
    except ClusterError as error:
        raise ClusterError(
            f"CLUSTER=current, but the cluster of KUBECONFIG={os.environ.get('KUBECONFIG', '~/.kube/config')} is not "
            f"reachable; check it with `kubectl version`: {error}"
        ) from error
    return str(server["gitVersion"])


def load_into_current(images: list[str], environment: Mapping[str, str]) -> list[str]:
    """Load images into KUBECONFIG's kind cluster, or push them to IMAGE_REGISTRY. Returns the names that pods use."""
    docker = docker_cli.ensure()
    everything = {**environment, **docker}
    kind_name = _kind_name(environment)
    if kind_name is not None:
        folder = tools.ensure(tools.KIND)
        run(
            [folder / "kind", "load", "docker-image", "--name", kind_name, *images],
            log="kind",
            environment=everything,
        )
        return images
    registry = os.environ.get("IMAGE_REGISTRY", "").rstrip("/")
    if not registry:
        raise UsageError(
            "CLUSTER=current selects a cluster that is not kind's, so its nodes pull images from a registry; "
            "set IMAGE_REGISTRY to one that they can pull from and that you are logged in to (docker login)"
        )
    pushed = [f"{registry}/{image}" for image in images]
    for image, name in zip(images, pushed, strict=True):
        run(["docker", "tag", image, name], log="push", environment=docker)
        run(["docker", "push", name], log="push", environment=docker)
    return pushed


def _kind_name(environment: Mapping[str, str]) -> str | None:
    """Return the kind cluster's name if the current context is one of kind's, else None."""
    command = ["kubectl", "config", "current-context"]
    if not succeeds(command, environment=environment):
        return None
    context = output_of(command, environment=environment)
    return context.removeprefix("kind-") if context.startswith("kind-") else None

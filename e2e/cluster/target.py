"""Which cluster the commands speak of: one of kind's that this tool made, or the one you have (CLUSTER=current)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

from devtools.cache_root import cache_root
from devtools.errors import ClusterError, UsageError
from devtools.process import output_of, run, succeeds
from offline import docker_daemon

from . import kind_cluster, tools
from .kind_cluster import Cluster

DEFAULT_NAME = "trimtab"


def uses_current(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether CLUSTER says to use the cluster that KUBECONFIG points at; any other value is refused."""
    value = environment.get("CLUSTER", "")
    if value not in ("", "kind", "current"):
        raise UsageError(f"CLUSTER is {value!r}; set it to current (the cluster KUBECONFIG points at), or unset it")
    return value == "current"


def with_tools(environment: Mapping[str, str], *, need_kind: bool = True) -> dict[str, str]:
    """`environment` with a PATH that has kind, kubectl and helm first."""
    wanted = (tools.KIND,) if need_kind else ()
    folder = tools.ensure(*wanted, tools.KUBECTL, tools.HELM)
    parts = [part for part in os.environ.get("PATH", os.defpath).split(os.pathsep) if part != str(folder)]
    return {**environment, "PATH": os.pathsep.join([str(folder), *parts])}


def existing(name: str) -> Cluster | None:
    """The cluster `name` when Docker runs and has it; starts nothing."""
    docker = docker_daemon.find()
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
    """The server version of the cluster that KUBECONFIG points at; raises when it does not answer."""
    command = ["kubectl", "--request-timeout=15s", "version", "-o", "json"]
    try:
        server = json.loads(output_of(command, environment=environment)).get("serverVersion")
    except ClusterError as error:
        raise ClusterError(
            f"CLUSTER=current, but the cluster of KUBECONFIG={os.environ.get('KUBECONFIG', '~/.kube/config')} does not "
            f"answer; check it with `kubectl version`: {error}"
        ) from error
    return str(server["gitVersion"])


def load_into_current(images: list[str], environment: Mapping[str, str]) -> list[str]:
    """Bring images to the cluster of KUBECONFIG: kind load, or push to IMAGE_REGISTRY. Returns the names pods use."""
    docker = docker_daemon.ensure()
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
            "CLUSTER=current points at a cluster that is not kind's, so its nodes pull images from a registry; "
            "set IMAGE_REGISTRY to one that they can pull from and that you are logged in to (docker login)"
        )
    pushed = [f"{registry}/{image}" for image in images]
    for image, name in zip(images, pushed, strict=True):
        run(["docker", "tag", image, name], log="push", environment=docker)
        run(["docker", "push", name], log="push", environment=docker)
    return pushed


def _kind_name(environment: Mapping[str, str]) -> str | None:
    """The kind cluster's name when the current context is one of kind's, else None."""
    command = ["kubectl", "config", "current-context"]
    if not succeeds(command, environment=environment):
        return None
    context = output_of(command, environment=environment)
    return context.removeprefix("kind-") if context.startswith("kind-") else None

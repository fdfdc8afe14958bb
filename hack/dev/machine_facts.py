"""The state of this machine, read without changing anything; announcement.py formats it."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from pathlib import Path

from cluster import bring_up, kind_cluster
from cluster.kind_cluster import Cluster
from cluster.shape import Existing
from devtools import docker_cli, model, python_environment
from devtools.cache_root import cache_root
from devtools.errors import ClusterError
from devtools.process import output_of
from offline import debian, kubernetes_build, node_image

from .announcement import Machine

DOCKER_PACKAGES = ("docker.io", "iptables")
PACKAGES_IMAGES = ("trimtab-engine-packages", "trimtab-operator-packages", "trimtab-model")


def inspect(name: str) -> Machine:
    """Return the state of this machine and of the cluster `name`."""
    docker = docker_cli.find()
    held = _images(docker)
    has_node_image = node_image.image_name() in held
    has_images = all(any(image.startswith(f"{each}:") for image in held) for each in PACKAGES_IMAGES)
    has_kubernetes = kubernetes_build.is_built()
    built_here: list[str] = []
    if not (has_node_image and has_images):
        built_here.append("debootstrap")
    if not has_node_image:
        built_here += ["gcc", "libc6-dev", *(() if has_kubernetes else kubernetes_build.PACKAGES)]
    needed = [] if shutil.which("dockerd") and shutil.which("docker") else [*DOCKER_PACKAGES]
    if importlib.util.find_spec("ensurepip") is None and not python_environment.is_ready():
        needed.append("python3-venv")
    return Machine(
        packages=_not_installed(needed) if docker is None else _not_installed(needed[len(DOCKER_PACKAGES) :]),
        packages_without_registry=_not_installed(built_here),
        docker=None if docker is None else _describe_docker(docker),
        has_python_packages=python_environment.is_ready(),
        has_model=model.is_ready(),
        has_kubernetes=has_kubernetes,
        has_node_image=has_node_image,
        has_images=has_images,
        cluster=_cluster(docker, name),
        node_images=bring_up.node_images(),
        cache=_short(cache_root()),
    )


def _not_installed(packages: list[str]) -> list[str]:
    """Return the Debian packages that are not installed, or none on machines without dpkg."""
    if shutil.which("dpkg-query") is None:
        return []
    return [package for package in dict.fromkeys(packages) if not debian.is_installed(package)]


def _describe_docker(docker: dict[str, str]) -> str:
    if docker.get("DOCKER_HOST") == docker_cli.own_host():
        return "the daemon that an earlier command started"
    return f"the daemon at {docker['DOCKER_HOST']}" if "DOCKER_HOST" in docker else "the daemon of this machine"


def _images(docker: dict[str, str] | None) -> set[str]:
    """Return the names of existing images, from the running daemon or from the data of a stopped one in the cache."""
    if docker is not None:
        command = ["docker", "image", "ls", "--format", "{{.Repository}}:{{.Tag}}"]
        try:
            return set(output_of(command, environment=docker).split())
        except ClusterError:
            return set()
    names: set[str] = set()
    for file in (docker_cli.own_folder() / "data" / "image").glob("*/repositories.json"):
        try:
            repositories = json.loads(file.read_text()).get("Repositories", {})
        except (OSError, ValueError):
            continue
        names.update(name for tags in repositories.values() for name in tags)
    return names


def _cluster(docker: dict[str, str] | None, name: str) -> Existing | None:
    if docker is None:
        return None
    try:
        found = kind_cluster.shape_of(Cluster(name, {**docker, "PATH": os.environ.get("PATH", os.defpath)}))
    except ClusterError:
        return None
    return found if found.nodes else None


def _short(path: Path) -> str:
    """Return the path with ~ for the home folder."""
    home = Path(os.environ.get("HOME", "/"))
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)

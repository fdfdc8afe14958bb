"""Announcement of what a make command will do to this machine, before it does anything. Pure: facts to text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.shape import Existing, Wanted, difference
from devtools.stage_log import duration
from offline.host_settings import KUBELET_SYSCTLS

# Seconds per part on two idle cores. Parallel parts share the cores, so estimates add them up.
PYTHON_SECONDS = 100.0
MODEL_SECONDS = 45.0
DOCKER_SECONDS = 25.0
KUBERNETES_SECONDS = 620.0
NODE_IMAGE_SECONDS = 120.0
IMAGES_SECONDS = 200.0
CLUSTER_SECONDS = 60.0
LOAD_SECONDS = 50.0


@dataclass(frozen=True, slots=True)
class Machine:
    """The state of this machine, as far as it can be read without changes."""

    packages: Sequence[str]  # Debian packages that will be installed
    packages_without_registry: Sequence[str]  # in addition, if no image registry is reachable
    docker: str | None  # the daemon that is running; None if one will be started
    has_python_packages: bool
    has_model: bool
    has_kubernetes: bool  # binaries in the cache
    has_node_image: bool
    has_images: bool  # of operator, engine and model
    cluster: Existing | None  # nodes of the running cluster
    node_images: tuple[str, ...]  # accepted node images of a running cluster
    cache: str


@dataclass(frozen=True, slots=True)
class CommandPlan:
    """A make command: its name, the parts it sets up, and the work after that."""

    command: str
    parts: frozenset[str]
    then: str  # the work after the set-up
    then_seconds: float
    workers: int
    keeps: bool  # True if the cluster is kept
    current: bool  # CLUSTER=current: nothing is created


def needs_cluster(plan: CommandPlan) -> bool:
    """Return True if a kind cluster is created or reused."""
    return "cluster" in plan.parts and not plan.current


def recreate_reason(machine: Machine, plan: CommandPlan) -> str | None:
    """Return why the running cluster will be deleted first, or None if it is reused or absent."""
    if machine.cluster is None or not needs_cluster(plan):
        return None
    return difference(machine.cluster, Wanted(plan.workers, machine.node_images))


def first_line(machine: Machine, plan: CommandPlan) -> str:
    """Return one sentence: what is installed and changed on this machine, where, and how long it takes."""
    clauses = []
    if needs_cluster(plan):
        clauses.append(_apt(machine))
        if recreate_reason(machine, plan) is not None:
            clauses.append("deletes the running cluster, which has another shape")
        if machine.docker is None:
            clauses.append("starts a Docker daemon")
        clauses.append(f"sets {len(KUBELET_SYSCTLS)} sysctls until the cluster is deleted")
    if not machine.has_python_packages:
        clauses.append("installs Python packages into .venv")
    clauses.append(f"caches builds in {machine.cache}")
    return f"{plan.command} {_joined(clauses)}; about {duration(seconds(machine, plan))}"


def _apt(machine: Machine) -> str:
    """Return what apt will install, in any case and if images have to be built here."""
    required, optional = " ".join(machine.packages), " ".join(machine.packages_without_registry)
    if required and optional:
        return f"installs Debian's {required} (and {optional} if no image registry is reachable)"
    if optional:
        return f"installs Debian's {optional} if no image registry is reachable"
    return f"installs Debian's {required}" if required else "installs no Debian packages"


def _joined(parts: Sequence[str]) -> str:
    return ", ".join(parts[:-1]) + (" and " if len(parts) > 1 else "") + parts[-1]


def missing(machine: Machine, plan: CommandPlan) -> list[tuple[str, float]]:
    """Return the missing parts, each with its expected seconds."""
    parts = plan.parts
    own = needs_cluster(plan)
    recreated = machine.cluster is None or recreate_reason(machine, plan) is not None
    found = [
        ("Python packages", PYTHON_SECONDS, not machine.has_python_packages),
        ("model", MODEL_SECONDS, "model" in parts and not machine.has_model),
        ("Docker", DOCKER_SECONDS, own and machine.docker is None),
        ("Kubernetes", KUBERNETES_SECONDS, own and not machine.has_node_image and not machine.has_kubernetes),
        ("node image", NODE_IMAGE_SECONDS, own and not machine.has_node_image),
        ("images", IMAGES_SECONDS, "images" in parts and not machine.has_images),
        ("cluster", CLUSTER_SECONDS, own and recreated),
        ("images into the cluster", LOAD_SECONDS, own and "images" in parts and recreated),
    ]
    return [(name, seconds) for name, seconds, is_missing in found if is_missing]


def seconds(machine: Machine, plan: CommandPlan) -> float:
    """Return the expected duration of the command."""
    return sum(each for _, each in missing(machine, plan)) + plan.then_seconds


def details(machine: Machine, plan: CommandPlan) -> list[str]:
    """Return the lines of a dry run, one for each change."""
    rows: list[tuple[str, str]] = []
    if needs_cluster(plan):
        rows += _cluster_rows(machine, plan)
    elif plan.current and "cluster" in plan.parts:
        rows.append(("cluster", "KUBECONFIG's (CLUSTER=current); none is created"))
    rows.append((".venv", "complete" if machine.has_python_packages else "Python packages from pip's index"))
    if "model" in plan.parts:
        rows.append(("model", "in the cache" if machine.has_model else "SmolLM2-135M-Instruct, from a package on PyPI"))
    if "images" in plan.parts:
        others = ", and Prometheus" if "prometheus" in plan.parts else ""
        ours = "built, except the project's code" if machine.has_images else "operator, engine and model"
        rows.append(("images", f"{ours}{others}"))
    rows.append(("cache", f"{machine.cache}, kept (`python3 e2e/cluster down --purge-cache` removes it)"))
    steps = [f"{name} {duration(each)}" for name, each in missing(machine, plan)]
    steps.append(f"{plan.then} {duration(plan.then_seconds)}")
    rows.append(("time", f"about {duration(seconds(machine, plan))}: {', '.join(steps)}"))
    return [f"  {name:<9} {text}" for name, text in rows]


def _cluster_rows(machine: Machine, plan: CommandPlan) -> list[tuple[str, str]]:
    nodes = "one node" if plan.workers == 0 else f"{plan.workers + 1} nodes"
    end = "kept (KEEP=1)" if plan.keeps else "removed at the end"
    rows = [("apt", " ".join(machine.packages) or "nothing to install")]
    if machine.packages_without_registry:
        rows.append(("", f"and if no image registry is reachable: {' '.join(machine.packages_without_registry)}"))
    own = f"a new daemon with its data in {machine.cache}/docker, {end}"
    rows.append(("Docker", machine.docker or own))
    sysctls = " ".join(f"{name}={value}" for name, value in KUBELET_SYSCTLS.items())
    rows.append(("sysctls", f"{sysctls}, restored when the cluster is deleted"))
    if machine.docker is None:
        rows.append(("", "its daemon enables packet forwarding and adds firewall rules, restored as well"))
    rows.append(("cluster", f"{nodes} of Kubernetes, named trimtab, {end}"))
    if machine.cluster is not None:
        other = recreate_reason(machine, plan)
        action = "reused" if other is None else f"deleted first, with everything in it ({other})"
        rows.append(("", f"the running one with {len(machine.cluster.nodes)} node(s) is {action}"))
    return rows

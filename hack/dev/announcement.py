"""What a command of make is about to do to this machine, said before it does anything: pure, from facts to lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.shape import Found, Wanted, difference
from devtools.stage_log import duration
from offline.host_settings import KUBELET_SYSCTLS

# Seconds of each part on two idle cores; parts that run at once share the cores, so an estimate adds them all.
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
    """What is there and what is not, as far as it can be seen without changing anything."""

    packages: Sequence[str]  # of Debian, that will be installed
    packages_without_registry: Sequence[str]  # and these where no image registry can be reached
    docker: str | None  # whose daemon answers; None where one will be started
    has_python_packages: bool
    has_model: bool
    has_kubernetes: bool  # its binaries
    has_node_image: bool
    has_images: bool  # of operator, engine and model
    cluster: Found | None  # the nodes of one that is up
    node_images: tuple[str, ...]  # those that will do, where one is up
    cache: str


@dataclass(frozen=True, slots=True)
class Journey:
    """What is about to run: its name, the parts it sets up, and what comes behind them."""

    command: str
    parts: frozenset[str]
    then: str  # what is done once everything is set up
    then_seconds: float
    workers: int
    keeps: bool  # whether the cluster is left up
    current: bool  # CLUSTER=current: nothing is created


def needs_cluster(journey: Journey) -> bool:
    """Whether a cluster of our own is brought up."""
    return "cluster" in journey.parts and not journey.current


def why_anew(machine: Machine, journey: Journey) -> str | None:
    """What the cluster that is up has otherwise than asked for, so that it will be deleted first; None: it will do."""
    if machine.cluster is None or not needs_cluster(journey):
        return None
    return difference(machine.cluster, Wanted(journey.workers, machine.node_images))


def first_line(machine: Machine, journey: Journey) -> str:
    """One sentence: what it installs on this machine, what else it changes, where things go, how long it takes."""
    clauses = []
    if needs_cluster(journey):
        clauses.append(_apt(machine))
        if why_anew(machine, journey) is not None:
            clauses.append("deletes the cluster that is up, which has another shape")
        if machine.docker is None:
            clauses.append("starts a Docker daemon of its own")
        clauses.append(f"sets {len(KUBELET_SYSCTLS)} sysctls until the cluster is gone")
    if not machine.has_python_packages:
        clauses.append("puts Python packages into .venv")
    clauses.append(f"keeps what it builds in {machine.cache}")
    return f"{journey.command} {_joined(clauses)}; about {duration(seconds(machine, journey))}"


def _apt(machine: Machine) -> str:
    """What apt will install: for certain, and further what only building images here needs."""
    certain, further = " ".join(machine.packages), " ".join(machine.packages_without_registry)
    if certain and further:
        return f"installs Debian's {certain} (and {further} where no image registry answers)"
    if further:
        return f"installs Debian's {further} where no image registry answers"
    return f"installs Debian's {certain}" if certain else "installs nothing"


def _joined(parts: Sequence[str]) -> str:
    return ", ".join(parts[:-1]) + (" and " if len(parts) > 1 else "") + parts[-1]


def missing(machine: Machine, journey: Journey) -> list[tuple[str, float]]:
    """What has to be made first, each with its seconds."""
    parts = journey.parts
    own = needs_cluster(journey)
    anew = machine.cluster is None or why_anew(machine, journey) is not None
    found = [
        ("Python packages", PYTHON_SECONDS, not machine.has_python_packages),
        ("model", MODEL_SECONDS, "model" in parts and not machine.has_model),
        ("Docker", DOCKER_SECONDS, own and machine.docker is None),
        ("Kubernetes", KUBERNETES_SECONDS, own and not machine.has_node_image and not machine.has_kubernetes),
        ("node image", NODE_IMAGE_SECONDS, own and not machine.has_node_image),
        ("images", IMAGES_SECONDS, "images" in parts and not machine.has_images),
        ("cluster", CLUSTER_SECONDS, own and anew),
        ("images into the cluster", LOAD_SECONDS, own and "images" in parts and anew),
    ]
    return [(name, seconds) for name, seconds, is_missing in found if is_missing]


def seconds(machine: Machine, journey: Journey) -> float:
    """How long all of it takes."""
    return sum(each for _, each in missing(machine, journey)) + journey.then_seconds


def details(machine: Machine, journey: Journey) -> list[str]:
    """The lines of a dry run, one for each thing that would be changed or made."""
    rows: list[tuple[str, str]] = []
    if needs_cluster(journey):
        rows += _cluster_rows(machine, journey)
    elif journey.current and "cluster" in journey.parts:
        rows.append(("cluster", "the one that KUBECONFIG points at (CLUSTER=current); none is made"))
    rows.append(
        (".venv", "complete" if machine.has_python_packages else "Python packages, from the index that pip uses")
    )
    if "model" in journey.parts:
        rows.append(("model", "in the cache" if machine.has_model else "SmolLM2-135M-Instruct, from a package on PyPI"))
    if "images" in journey.parts:
        others = ", and Prometheus" if "prometheus" in journey.parts else ""
        ours = "built, but for our own code" if machine.has_images else "operator, engine and model"
        rows.append(("images", f"{ours}{others}"))
    rows.append(("cache", f"{machine.cache}, which stays (`python3 e2e/cluster down --purge-cache` removes it)"))
    steps = [f"{name} {duration(each)}" for name, each in missing(machine, journey)]
    steps.append(f"{journey.then} {duration(journey.then_seconds)}")
    rows.append(("time", f"about {duration(seconds(machine, journey))}: {', '.join(steps)}"))
    return [f"  {name:<9} {text}" for name, text in rows]


def _cluster_rows(machine: Machine, journey: Journey) -> list[tuple[str, str]]:
    nodes = "one node" if journey.workers == 0 else f"{journey.workers + 1} nodes"
    end = "left up (KEEP=1)" if journey.keeps else "removed at the end"
    rows = [("apt", " ".join(machine.packages) or "nothing to install")]
    if machine.packages_without_registry:
        rows.append(("", f"and where no image registry answers: {' '.join(machine.packages_without_registry)}"))
    own = f"a daemon of its own, all of it in {machine.cache}/docker, {end}"
    rows.append(("Docker", machine.docker or own))
    sysctls = " ".join(f"{name}={value}" for name, value in KUBELET_SYSCTLS.items())
    rows.append(("sysctls", f"{sysctls}, put back when the cluster is removed"))
    if machine.docker is None:
        rows.append(("", "its daemon turns packet forwarding on and adds firewall rules, put back likewise"))
    rows.append(("cluster", f"{nodes} of Kubernetes, named trimtab, {end}"))
    if machine.cluster is not None:
        other = why_anew(machine, journey)
        fate = "is used" if other is None else f"is deleted first, with all that runs in it ({other})"
        rows.append(("", f"the one that is up already, of {len(machine.cluster.nodes)} node(s), {fate}"))
    return rows

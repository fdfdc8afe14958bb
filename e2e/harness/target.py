"""The cluster under test: its environment (from `e2e/cluster env`), images and version."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from harness.kube import Kube
from harness.report import forward, log_line

REPOSITORY = Path(__file__).resolve().parents[2]
CLUSTER_TOOL = REPOSITORY / "e2e" / "cluster"


class NoCluster(Exception):
    """There is no cluster to run on; the message has the remedy."""


@dataclass(frozen=True, slots=True)
class Images:
    """Image names as pods use them. `model` is the engine image with the model in it, so it is used as engine too."""

    operator: str
    model: str
    router: str


@dataclass(frozen=True, slots=True)
class Target:
    """A reachable cluster. `is_own` is False for CLUSTER=current."""

    kube: Kube
    version: str
    is_own: bool

    def describe(self) -> str:
        nodes = self.kube.items("nodes")
        names = ", ".join(node["metadata"]["name"] for node in nodes)
        kind = "the cluster of e2e/cluster" if self.is_own else "CLUSTER=current"
        return f"Kubernetes {self.version}, {len(nodes)} node(s): {names} ({kind})"


def connect() -> Target:
    """Return the cluster of `e2e/cluster up`, or KUBECONFIG's with CLUSTER=current. Raises NoCluster."""
    environment = {}
    for line in _tool("env").splitlines():
        for word in shlex.split(line.removeprefix("export ")):
            name, _, value = word.partition("=")
            environment[name] = value
    kube = Kube(environment, kubectl=_which("kubectl", environment))
    return Target(kube, kube.server_version(), is_own=os.environ.get("CLUSTER", "") != "current")


def images_in_cluster() -> Images:
    """Build missing images and load them into the nodes.

    TRIMTAB_IMAGES="OPERATOR MODEL ROUTER" selects existing ones.
    """
    given = os.environ.get("TRIMTAB_IMAGES", "").split()
    if given:
        return Images(*given)
    log_line("images: operator, model and router (built once, then from the cache)")
    names = ("operator", "model", "router")
    built = json.loads(_tool("images", "-o", "json", *names))
    log_line("images: loading into the cluster")
    return Images(*_tool("load", *(built[name] for name in names)).split())


def prometheus_in_cluster() -> str:
    """Load the image of Debian's Prometheus into the nodes. TRIMTAB_PROMETHEUS_IMAGE names an existing one instead."""
    given = os.environ.get("TRIMTAB_PROMETHEUS_IMAGE")
    if given:
        return given
    log_line("images: prometheus (built once, then from the cache)")
    built = json.loads(_tool("images", "-o", "json", "prometheus"))
    return _tool("load", built["prometheus"]).strip()


def run_tool(name: str, *arguments: str, kube: Kube, timeout_seconds: float = 300.0) -> str:
    """Run helm or another tool of the cluster's PATH. Raises RuntimeError with its output if it fails."""
    environment = kube.full_environment()
    done = subprocess.run(
        [_which(name, environment), *arguments],
        capture_output=True, text=True, env=environment, timeout=timeout_seconds, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(f"{name} {shlex.join(arguments)} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def _tool(*arguments: str) -> str:
    """Run a command of e2e/cluster, show its stderr line by line, and return its stdout. Raises NoCluster."""
    progress: list[str] = []
    with subprocess.Popen(
        [sys.executable, str(CLUSTER_TOOL), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TRIMTAB_PYTHON": sys.executable},
    ) as process:
        assert process.stderr is not None
        assert process.stdout is not None
        for line in process.stderr:
            progress.append(line.rstrip())
            forward(line.rstrip())
        output = process.stdout.read()
    if process.returncode != 0:
        raise NoCluster(f"`python3 e2e/cluster {' '.join(arguments)}` failed: {' '.join(progress[-3:])}")
    return output


def _which(name: str, environment: dict[str, str]) -> str:
    """Return the first `name` on the environment's PATH."""
    for folder in environment.get("PATH", os.defpath).split(os.pathsep):
        candidate = Path(folder) / name
        if os.access(candidate, os.X_OK):
            return str(candidate)
    return name

"""The announcement of a make command's changes to the machine."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cluster.shape import Existing
from dev.announcement import CommandPlan, Machine, details, first_line, missing, seconds

EMPTY = Machine(
    packages=("docker.io", "iptables"),
    packages_without_registry=("debootstrap", "golang-1.19-go"),
    docker=None,
    has_python_packages=False,
    has_model=False,
    has_kubernetes=False,
    has_node_image=False,
    has_images=False,
    cluster=None,
    node_images=(),
    cache="~/.cache/trimtab",
)
FULL = Machine(
    packages=(),
    packages_without_registry=(),
    docker="the daemon of this machine",
    has_python_packages=True,
    has_model=True,
    has_kubernetes=True,
    has_node_image=True,
    has_images=True,
    cluster=Existing((("control-plane", "kindest/node:v1.36.0"),)),
    node_images=("kindest/node",),
    cache="~/.cache/trimtab",
)
DEMO = CommandPlan(
    command="make demo",
    parts=frozenset({"python", "model", "cluster", "images"}),
    then="the demo",
    then_seconds=240.0,
    workers=0,
    keeps=False,
    current=False,
)
TEST = replace(DEMO, command="make test", parts=frozenset({"python", "model"}), then="the tests")


def test_first_line_names_packages_and_changes() -> None:
    assert first_line(EMPTY, DEMO).startswith(
        "make demo installs Debian's docker.io iptables (and debootstrap golang-1.19-go if no image registry "
        "is reachable), starts a Docker daemon, sets 3 sysctls until the cluster is deleted, "
        "installs Python packages into .venv and caches builds in ~/.cache/trimtab; about "
    )


def test_first_line_on_complete_machine_installs_nothing() -> None:
    assert first_line(FULL, DEMO) == (
        "make demo installs no Debian packages, sets 3 sysctls until the cluster is deleted and caches builds "
        "in ~/.cache/trimtab; about 4m00s"
    )


def test_first_line_with_docker_installs_only_build_packages() -> None:
    with_docker = replace(EMPTY, docker="the daemon of this machine", packages=())
    assert "installs Debian's debootstrap golang-1.19-go if no image registry is reachable," in first_line(
        with_docker, DEMO
    )


@pytest.mark.parametrize("plan", [TEST, replace(DEMO, current=True)], ids=["tests", "a cluster of one's own"])
def test_first_line_without_cluster_names_only_packages_and_cache(plan: CommandPlan) -> None:
    line = first_line(EMPTY, plan)
    assert "installs Python packages into .venv and caches" in line
    assert not any(word in line for word in ("Debian", "Docker", "sysctl"))


def test_seconds_adds_missing_parts_and_following_work() -> None:
    assert seconds(FULL, DEMO) == 240.0
    without_images = replace(FULL, has_images=False)
    assert seconds(without_images, DEMO) == sum(each for _, each in missing(without_images, DEMO)) + 240.0
    assert seconds(EMPTY, DEMO) > seconds(replace(EMPTY, has_kubernetes=True), DEMO) > seconds(EMPTY, TEST)


def test_existing_node_image_needs_no_kubernetes_build() -> None:
    names = [name for name, _ in missing(replace(EMPTY, has_node_image=True), DEMO)]
    assert "Kubernetes" not in names
    assert "node image" not in names


@pytest.mark.parametrize(
    ("keeps", "end"),
    [(False, "one node of Kubernetes, named trimtab, removed at the end"), (True, "kept (KEEP=1)")],
)
def test_dry_run_has_one_line_per_change(keeps: bool, end: str) -> None:
    lines = details(EMPTY, replace(DEMO, keeps=keeps))
    assert [line.split()[0] for line in lines if not line.startswith("   ")] == [
        "apt", "Docker", "sysctls", "cluster", ".venv", "model", "images", "cache", "time",
    ]  # fmt: skip
    assert any(end in line for line in lines)
    assert any("vm.overcommit_memory=1 kernel.panic=10 kernel.panic_on_oops=1, restored" in line for line in lines)


def test_dry_run_with_current_cluster_creates_none() -> None:
    (line,) = [line for line in details(EMPTY, replace(DEMO, current=True)) if line.split()[0] == "cluster"]
    assert "KUBECONFIG" in line
    assert "none is created" in line


def test_cluster_of_other_shape_is_announced_as_deleted() -> None:
    three = replace(DEMO, workers=2)
    assert "deletes the running cluster, which has another shape" in first_line(FULL, three)
    assert {name for name, _ in missing(FULL, three)} == {"cluster", "images into the cluster"}
    assert any(
        "is deleted first, with everything in it (it has no worker, 2 requested)" in line
        for line in details(FULL, three)
    )


def test_cluster_of_same_shape_is_announced_as_reused() -> None:
    assert any("the running one with 1 node(s) is reused" in line for line in details(FULL, DEMO))
    assert "deletes" not in first_line(FULL, DEMO)

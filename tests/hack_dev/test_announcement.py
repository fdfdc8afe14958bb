"""What a command of make says it will do to a machine, before it does anything."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cluster.shape import Found
from dev.announcement import Journey, Machine, details, first_line, missing, seconds

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
    cluster=Found((("control-plane", "kindest/node:v1.36.0"),)),
    node_images=("kindest/node",),
    cache="~/.cache/trimtab",
)
DEMO = Journey(
    command="make demo",
    parts=frozenset({"python", "model", "cluster", "images"}),
    then="the story",
    then_seconds=240.0,
    workers=0,
    keeps=False,
    current=False,
)
TEST = replace(DEMO, command="make test", parts=frozenset({"python", "model"}), then="the tests")


def test_the_first_line_names_each_package_and_change() -> None:
    assert first_line(EMPTY, DEMO).startswith(
        "make demo installs Debian's docker.io iptables (and debootstrap golang-1.19-go where no image registry "
        "answers), starts a Docker daemon of its own, sets 3 sysctls until the cluster is gone, "
        "puts Python packages into .venv and keeps what it builds in ~/.cache/trimtab; about "
    )


def test_where_everything_is_there_nothing_is_installed() -> None:
    assert first_line(FULL, DEMO) == (
        "make demo installs nothing, sets 3 sysctls until the cluster is gone and keeps what it builds in "
        "~/.cache/trimtab; about 4m00s"
    )


def test_with_docker_only_what_builds_images_may_be_installed() -> None:
    with_docker = replace(EMPTY, docker="the daemon of this machine", packages=())
    assert "installs Debian's debootstrap golang-1.19-go where no image registry answers," in first_line(
        with_docker, DEMO
    )


@pytest.mark.parametrize("journey", [TEST, replace(DEMO, current=True)], ids=["tests", "a cluster of one's own"])
def test_without_a_cluster_to_make_only_packages_and_the_cache_are_touched(journey: Journey) -> None:
    said = first_line(EMPTY, journey)
    assert "puts Python packages into .venv and keeps" in said
    assert not any(word in said for word in ("Debian", "Docker", "sysctl"))


def test_the_time_is_of_what_is_missing_and_of_what_comes_then() -> None:
    assert seconds(FULL, DEMO) == 240.0
    without_images = replace(FULL, has_images=False)
    assert seconds(without_images, DEMO) == sum(each for _, each in missing(without_images, DEMO)) + 240.0
    assert seconds(EMPTY, DEMO) > seconds(replace(EMPTY, has_kubernetes=True), DEMO) > seconds(EMPTY, TEST)


def test_a_node_image_needs_no_kubernetes() -> None:
    names = [name for name, _ in missing(replace(EMPTY, has_node_image=True), DEMO)]
    assert "Kubernetes" not in names
    assert "node image" not in names


@pytest.mark.parametrize(
    ("keeps", "end"),
    [(False, "one node of Kubernetes, named trimtab, removed at the end"), (True, "left up (KEEP=1)")],
)
def test_a_dry_run_has_a_line_for_each_thing(keeps: bool, end: str) -> None:
    lines = details(EMPTY, replace(DEMO, keeps=keeps))
    assert [line.split()[0] for line in lines if not line.startswith("   ")] == [
        "apt", "Docker", "sysctls", "cluster", ".venv", "model", "images", "cache", "time",
    ]  # fmt: skip
    assert any(end in line for line in lines)
    assert any("vm.overcommit_memory=1 kernel.panic=10 kernel.panic_on_oops=1, put back" in line for line in lines)


def test_a_dry_run_on_a_cluster_of_one_s_own_says_that_none_is_made() -> None:
    (line,) = [line for line in details(EMPTY, replace(DEMO, current=True)) if line.split()[0] == "cluster"]
    assert "KUBECONFIG" in line
    assert "none is made" in line


def test_a_cluster_of_another_shape_is_said_to_be_deleted_before_it_is() -> None:
    three = replace(DEMO, workers=2)
    assert "deletes the cluster that is up, which has another shape" in first_line(FULL, three)
    assert {name for name, _ in missing(FULL, three)} == {"cluster", "images into the cluster"}
    assert any(
        "is deleted first, with all that runs in it (it has no worker, 2 asked for)" in line
        for line in details(FULL, three)
    )


def test_a_cluster_of_that_shape_is_said_to_be_used() -> None:
    assert any("the one that is up already, of 1 node(s), is used" in line for line in details(FULL, DEMO))
    assert "deletes" not in first_line(FULL, DEMO)

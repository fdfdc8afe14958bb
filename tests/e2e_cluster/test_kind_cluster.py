"""The documents that make a cluster (kind's configuration, a node's pod network), and when one is made anew."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from cluster.cli import main
from cluster.kind_cluster import is_ready, kind_configuration
from offline import pod_network
from offline.node_image import image_name


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_cluster_has_one_control_plane_and_the_workers_asked_for(workers: int) -> None:
    document = json.loads(kind_configuration(workers, own_network=False))
    assert [node["role"] for node in document["nodes"]] == ["control-plane"] + ["worker"] * workers
    assert "networking" not in document  # kind's own image brings its own


def test_beside_workers_kubeadm_lets_the_control_plane_take_pods() -> None:
    document = json.loads(kind_configuration(2, own_network=False))
    (patch,) = document["nodes"][0]["kubeadmConfigPatches"]
    assert json.loads(patch)["nodeRegistration"] == {"taints": []}


def test_alone_the_control_plane_keeps_the_taint_that_kind_then_removes() -> None:
    """kind fails ("taint not found") where kubeadm has set none, and with one node always removes it."""
    document = json.loads(kind_configuration(0, own_network=True))
    assert document["nodes"] == [{"role": "control-plane"}]


def test_a_node_image_without_a_pod_network_turns_kind_s_off() -> None:
    document = json.loads(kind_configuration(0, own_network=True))
    assert document["networking"] == {"disableDefaultCNI": True, "podSubnet": pod_network.POD_SUBNET}


@pytest.mark.parametrize(
    ("conditions", "ready"),
    [
        ([{"type": "Ready", "status": "True"}], True),
        ([{"type": "Ready", "status": "Unknown"}], False),
        ([{"type": "MemoryPressure", "status": "True"}], False),
        ([], False),
    ],
)
def test_a_node_is_ready_when_its_condition_says_so(conditions: list[dict[str, Any]], ready: bool) -> None:
    assert is_ready({"status": {"conditions": conditions}}) is ready


@dataclass(slots=True)
class Machine:
    """Docker, tools and kind of a machine, stood in for: what was done to its one cluster."""

    listing: str
    healthy: bool = True
    done: list[str] = field(default_factory=list)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    standing = Machine("")
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path))
    monkeypatch.delenv("KIND_NODE_IMAGE", raising=False)
    monkeypatch.delenv("CLUSTER", raising=False)
    monkeypatch.setattr("devtools.docker_cli.ensure", dict)
    monkeypatch.setattr("devtools.docker_cli.reaches_registry", lambda _: False)
    monkeypatch.setattr("cluster.tools.ensure", lambda *_: tmp_path)
    monkeypatch.setattr("offline.node_image.ensure", lambda _: image_name())
    monkeypatch.setattr("cluster.kind_cluster.exists", lambda _: bool(standing.listing))
    monkeypatch.setattr("cluster.kind_cluster.is_healthy", lambda _: standing.healthy)
    monkeypatch.setattr("cluster.kind_cluster.output_of", lambda *_, **__: standing.listing)
    monkeypatch.setattr("cluster.kind_cluster.server_version", lambda _: "v1.20.2")
    monkeypatch.setattr("cluster.kind_cluster.nodes", lambda _: [])
    monkeypatch.setattr("cluster.kind_cluster.delete", lambda _: standing.done.append("deleted"))
    monkeypatch.setattr(
        "cluster.kind_cluster.create",
        lambda _, image, workers, **__: standing.done.append(f"created with {workers} workers of {image}"),
    )
    monkeypatch.setattr("cluster.bring_up.HEALTHY_TIMEOUT_SECONDS", 0.0)
    return standing


def test_up_without_workers_makes_a_three_node_cluster_anew_and_says_so(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.listing = f"control-plane {image_name()}\nworker {image_name()}\nworker {image_name()}\n"
    assert main(["up"]) == 0
    assert machine.done == ["deleted", f"created with 0 workers of {image_name()}"]
    assert "it has 2 workers, none requested; recreating it" in capsys.readouterr().err


def test_up_makes_a_cluster_of_another_node_image_anew_and_says_so(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.listing = f"control-plane {image_name()}\n"
    monkeypatch.setenv("KIND_NODE_IMAGE", "mine:7")
    assert main(["up"]) == 0
    assert machine.done == ["deleted", "created with 0 workers of mine:7"]
    assert f"its nodes run {image_name()}, mine:7 requested" in capsys.readouterr().err


@pytest.mark.parametrize("workers", [0, 2])
def test_up_reuses_a_healthy_cluster_of_the_shape_asked_for(machine: Machine, workers: int) -> None:
    machine.listing = f"control-plane {image_name()}\n" + f"worker {image_name()}\n" * workers
    assert main(["up", "--workers", str(workers)]) == 0
    assert machine.done == []


def test_up_makes_a_cluster_that_is_not_healthy_anew(machine: Machine) -> None:
    machine.listing, machine.healthy = f"control-plane {image_name()}\n", False
    assert main(["up"]) == 0
    assert machine.done == ["deleted", f"created with 0 workers of {image_name()}"]

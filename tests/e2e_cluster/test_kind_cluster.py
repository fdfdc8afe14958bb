"""kind's configuration, and when an existing cluster is recreated."""

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
def test_configuration_has_one_control_plane_and_workers(workers: int) -> None:
    document = json.loads(kind_configuration(workers, own_network=False))
    assert [node["role"] for node in document["nodes"]] == ["control-plane"] + ["worker"] * workers
    assert "networking" not in document  # kind's own image brings its own


def test_control_plane_with_workers_is_untainted_by_kubeadm() -> None:
    document = json.loads(kind_configuration(2, own_network=False))
    (patch,) = document["nodes"][0]["kubeadmConfigPatches"]
    assert json.loads(patch)["nodeRegistration"] == {"taints": []}


def test_single_node_keeps_taint_for_kind_to_remove() -> None:
    """With one node kind always removes the taint, and fails ("taint not found") if kubeadm has set none."""
    document = json.loads(kind_configuration(0, own_network=True))
    assert document["nodes"] == [{"role": "control-plane"}]


def test_own_network_disables_default_cni() -> None:
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
def test_is_ready_follows_ready_condition(conditions: list[dict[str, Any]], ready: bool) -> None:
    assert is_ready({"status": {"conditions": conditions}}) is ready


@dataclass(slots=True)
class Machine:
    """A fake machine with one cluster, and the operations performed on it."""

    listing: str
    healthy: bool = True
    done: list[str] = field(default_factory=list)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    fake = Machine("")
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path))
    monkeypatch.delenv("KIND_NODE_IMAGE", raising=False)
    monkeypatch.delenv("CLUSTER", raising=False)
    monkeypatch.setattr("devtools.docker_cli.ensure", dict)
    monkeypatch.setattr("devtools.docker_cli.reaches_registry", lambda _: False)
    monkeypatch.setattr("offline.tools.ensure", lambda *_: tmp_path)
    monkeypatch.setattr("offline.node_image.ensure", lambda _: image_name())
    monkeypatch.setattr("cluster.kind_cluster.exists", lambda _: bool(fake.listing))
    monkeypatch.setattr("cluster.kind_cluster.is_healthy", lambda _: fake.healthy)
    monkeypatch.setattr("cluster.kind_cluster.output_of", lambda *_, **__: fake.listing)
    monkeypatch.setattr("cluster.kind_cluster.server_version", lambda _: "v1.20.2")
    monkeypatch.setattr("cluster.kind_cluster.nodes", lambda _: [])
    monkeypatch.setattr("cluster.kind_cluster.delete", lambda _: fake.done.append("deleted"))
    monkeypatch.setattr(
        "cluster.kind_cluster.create",
        lambda _, image, workers, **__: fake.done.append(f"created with {workers} workers of {image}"),
    )
    monkeypatch.setattr("cluster.bring_up.HEALTHY_TIMEOUT_SECONDS", 0.0)
    return fake


def test_up_recreates_cluster_with_other_workers(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.listing = f"control-plane {image_name()}\nworker {image_name()}\nworker {image_name()}\n"
    assert main(["up"]) == 0
    assert machine.done == ["deleted", f"created with 0 workers of {image_name()}"]
    assert "it has 2 workers, none requested; recreating it" in capsys.readouterr().err


def test_up_recreates_cluster_with_other_node_image(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.listing = f"control-plane {image_name()}\n"
    monkeypatch.setenv("KIND_NODE_IMAGE", "mine:7")
    assert main(["up"]) == 0
    assert machine.done == ["deleted", "created with 0 workers of mine:7"]
    assert f"its nodes run {image_name()}, mine:7 requested" in capsys.readouterr().err


@pytest.mark.parametrize("workers", [0, 2])
def test_up_reuses_healthy_cluster_of_same_shape(machine: Machine, workers: int) -> None:
    machine.listing = f"control-plane {image_name()}\n" + f"worker {image_name()}\n" * workers
    assert main(["up", "--workers", str(workers)]) == 0
    assert machine.done == []


def test_up_recreates_unhealthy_cluster(machine: Machine) -> None:
    machine.listing, machine.healthy = f"control-plane {image_name()}\n", False
    assert main(["up"]) == 0
    assert machine.done == ["deleted", f"created with 0 workers of {image_name()}"]

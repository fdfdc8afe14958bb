"""The documents that make a cluster: kind's configuration and the pod network of a node."""

from __future__ import annotations

import json
from typing import Any

import pytest
from cluster.kind_cluster import POD_SUBNET, is_ready, kind_configuration, pod_network


@pytest.mark.parametrize("workers", [0, 2])
def test_a_cluster_has_one_control_plane_and_the_workers_asked_for(workers: int) -> None:
    document = json.loads(kind_configuration(workers, own_network=False))
    assert [node["role"] for node in document["nodes"]] == ["control-plane"] + ["worker"] * workers
    (patch,) = document["nodes"][0]["kubeadmConfigPatches"]
    assert json.loads(patch)["nodeRegistration"] == {"taints": []}, "the control plane takes pods"
    assert "networking" not in document  # kind's own image brings its own


def test_a_node_image_without_a_pod_network_turns_kind_s_off() -> None:
    document = json.loads(kind_configuration(0, own_network=True))
    assert document["networking"] == {"disableDefaultCNI": True, "podSubnet": POD_SUBNET}


def test_pods_get_addresses_of_their_own_node_and_keep_them_across_nodes() -> None:
    bridge, portmap = json.loads(pod_network("10.245.1.0/24"))["plugins"]
    assert bridge["ipam"]["ranges"] == [[{"subnet": "10.245.1.0/24"}]]
    assert not bridge["ipMasq"]
    assert bridge["hairpinMode"]
    assert portmap["type"] == "portmap"


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

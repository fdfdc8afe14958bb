"""GPUs of a cluster's nodes, and warnings for a layout."""

from __future__ import annotations

from typing import Any

import pytest
from trimtab_operator.layout.gpus import gpu_named
from trimtab_operator.layout.node_gpus import gpu_for, too_few_gpus
from trimtab_operator.resource.spec import InferenceDeployment

H200, L4 = "NVIDIA-H200", "NVIDIA-L4"


def a_deployment(
    tensor: int = 1, *, selector: dict[str, str] | None = None, device: str = "cuda"
) -> InferenceDeployment:
    spec: dict[str, Any] = {
        "model": {"uri": "file:///m"},
        "runtime": {"device": device, "image": "e"},
        "parallelism": {"tensor": tensor},
        "template": {"spec": {"nodeSelector": selector or {}}},
    }
    return InferenceDeployment.parse({"metadata": {"name": "m"}, "spec": spec})


def a_node(gpus: int = 0, product: str | None = None, **labels: str) -> dict[str, Any]:
    named = {} if product is None else {"nvidia.com/gpu.product": product}
    allocatable = {"nvidia.com/gpu": str(gpus)} if gpus else {}
    return {"metadata": {"name": "n", "labels": {**named, **labels}}, "status": {"allocatable": allocatable}}


@pytest.mark.parametrize(
    ("nodes", "name"),
    [
        ([a_node(8, H200)], "H200"),
        ([a_node(8, H200), a_node(1, L4), a_node()], "H200"),  # it may run on the larger one
        ([a_node(8, H200), a_node(8)], None),  # a node that does not say may be larger still
        ([a_node(8, "NVIDIA-H200-MIG-1g.18gb")], None),
        ([a_node()], None),
        ([], None),
    ],
)
def test_the_gpu_is_the_largest_that_is_present_if_all_say_what_they_are(nodes: list[Any], name: str | None) -> None:
    found = gpu_for(a_deployment(), nodes)
    assert (None if found is None else found.name) == name


def test_the_node_selector_narrows_it_and_may_name_it() -> None:
    nodes = [a_node(8, H200, pool="big"), a_node(1, L4, pool="small")]
    found = gpu_for(a_deployment(selector={"pool": "small"}), nodes)
    assert found is not None
    assert found.name == "L4"
    named = gpu_for(a_deployment(selector={"nvidia.com/gpu.product": L4}), [])
    assert named == gpu_named("L4")


def test_a_gpu_that_is_given_in_part_is_as_large_as_its_part() -> None:
    found = gpu_for(a_deployment(), [a_node(4, L4, **{"nvidia.com/gpu.memory": "11264"})])
    assert found is not None
    assert found.memory_bytes == 11 << 30


def test_on_the_cpu_there_is_no_gpu() -> None:
    assert gpu_for(a_deployment(device="cpu"), [a_node(8, H200)]) is None
    assert too_few_gpus(a_deployment(8, device="cpu"), []) is None


def test_more_gpus_than_any_node_has_are_a_warning_with_both_numbers() -> None:
    said = too_few_gpus(a_deployment(16), [a_node(8), a_node(4)])
    assert said is not None
    assert "requests 16 GPUs" in said
    assert "largest node has 8" in said
    assert "no node has any" in (too_few_gpus(a_deployment(), [a_node()]) or "")


def test_nodes_that_fit_or_cannot_be_seen_give_no_warning() -> None:
    assert too_few_gpus(a_deployment(8), [a_node(8)]) is None
    assert too_few_gpus(a_deployment(8), None) is None

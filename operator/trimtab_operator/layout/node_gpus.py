"""GPU counts and models of a cluster's nodes. Pure.

A node pool may scale from zero, so too few GPUs are a warning, never an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from trimtab_operator.layout import layout_of
from trimtab_operator.layout.gpus import Gpu, gpu_of_label
from trimtab_operator.resource.manifest import Manifest
from trimtab_operator.resource.spec import InferenceDeployment

GPU_RESOURCE = "nvidia.com/gpu"
PRODUCT_LABEL = "nvidia.com/gpu.product"  # this and MEMORY_LABEL are set by GPU feature discovery
MEMORY_LABEL = "nvidia.com/gpu.memory"  # MiB
MIB = 1 << 20


def gpu_for(deployment: InferenceDeployment, nodes: Iterable[Manifest]) -> Gpu | None:
    """Return the GPU of the replicas: from the node selector, else the largest in the cluster.

    None if a node's labels are missing or unknown; the memory is not checked then.
    """
    if deployment.spec.runtime.device != "cuda":
        return None
    selector = deployment.spec.template.spec.node_selector
    if PRODUCT_LABEL in selector:
        return gpu_of_label(selector[PRODUCT_LABEL])
    labels = [_labels(node) for node in nodes if num_gpus(node) and selector.items() <= _labels(node).items()]
    found = [_gpu(own) for own in labels]
    known = [gpu for gpu in found if gpu is not None]
    return max(known, key=lambda gpu: gpu.memory_bytes) if found and len(known) == len(found) else None


def too_few_gpus(deployment: InferenceDeployment, nodes: Sequence[Manifest] | None) -> str | None:
    """Return a warning if no node has enough GPUs for a pod of the layout. None if one has, or nodes are unknown."""
    wanted = layout_of(deployment.spec).gpus_per_pod
    most = max((num_gpus(node) for node in nodes or ()), default=0)
    if nodes is None or wanted <= most:
        return None
    present = f"the largest node has {most}" if most else "no node has any"
    return (
        f"each pod requests {wanted} GPU{'s' * (wanted > 1)}, but {present}; add such a node, or set "
        f"spec.parallelism.gpusPerNode to {most or 1} or less. Pods stay pending until then"
    )


def num_gpus(node: Manifest) -> int:
    """Return the number of allocatable GPUs of a node."""
    text = str(((node.get("status") or {}).get("allocatable") or {}).get(GPU_RESOURCE, "0"))
    return int(text) if text.isdigit() else 0


def _labels(node: Manifest) -> Mapping[str, str]:
    return node["metadata"].get("labels") or {}


def _gpu(labels: Mapping[str, str]) -> Gpu | None:
    gpu = gpu_of_label(labels.get(PRODUCT_LABEL, ""))
    mib = labels.get(MEMORY_LABEL, "")
    if gpu is None or not mib.isdigit():
        return gpu
    return replace(gpu, memory_bytes=min(gpu.memory_bytes, int(mib) * MIB))  # pods may get only a part of a GPU

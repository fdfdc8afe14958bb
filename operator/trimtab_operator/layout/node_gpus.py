"""What the nodes of a cluster say of their GPUs: how many, and of which kind. Pure.

Nodes come and go: a pool may scale from zero. So too few GPUs are a warning, never a refusal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from trimtab_operator.layout import layout_of
from trimtab_operator.layout.gpus import Gpu, gpu_of_label
from trimtab_operator.resource.manifest import Manifest
from trimtab_operator.resource.spec import InferenceDeployment

GPU_RESOURCE = "nvidia.com/gpu"
PRODUCT_LABEL = "nvidia.com/gpu.product"  # these two are written by GPU feature discovery
MEMORY_LABEL = "nvidia.com/gpu.memory"  # MiB
MIB = 1 << 20


def gpu_for(deployment: InferenceDeployment, nodes: Iterable[Manifest]) -> Gpu | None:
    """The GPU that the replicas would run on: what the node selector names, else the largest that is present.

    None when nodes do not say, or say something that is not known: then nothing is refused for its memory.
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
    """Why no present node can take a pod of the layout; None when one can, and when nodes cannot be seen."""
    wanted = layout_of(deployment.spec).gpus_per_pod
    most = max((num_gpus(node) for node in nodes or ()), default=0)
    if nodes is None or wanted <= most:
        return None
    present = f"the largest node has {most}" if most else "no node has any"
    return (
        f"each pod asks for {wanted} GPU{'s' * (wanted > 1)}, and {present} now; pods wait until there is such a node, "
        f"or set spec.parallelism.gpusPerNode to {most or 1} or less"
    )


def num_gpus(node: Manifest) -> int:
    """GPUs that pods may ask a node for."""
    text = str(((node.get("status") or {}).get("allocatable") or {}).get(GPU_RESOURCE, "0"))
    return int(text) if text.isdigit() else 0


def _labels(node: Manifest) -> Mapping[str, str]:
    return node["metadata"].get("labels") or {}


def _gpu(labels: Mapping[str, str]) -> Gpu | None:
    gpu = gpu_of_label(labels.get(PRODUCT_LABEL, ""))
    mib = labels.get(MEMORY_LABEL, "")
    if gpu is None or not mib.isdigit():
        return gpu
    return replace(gpu, memory_bytes=min(gpu.memory_bytes, int(mib) * MIB))  # a part of one may be all that is given

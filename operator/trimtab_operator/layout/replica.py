"""Pods and devices of one replica, computed from spec.parallelism."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trimtab_operator.resource.spec import Spec


@dataclass(frozen=True, slots=True)
class Layout:
    """`world_size` ranks in `pods` pods, each with `gpus_per_pod` devices (0 on the CPU)."""

    world_size: int
    pods: int
    gpus_per_pod: int


def layout_of(spec: Spec) -> Layout:
    """Return the layout: tensor × pipeline × data ranks, at most gpusPerNode (default tensor × pipeline) per pod."""
    parallelism = spec.parallelism
    ranks_per_engine = parallelism.tensor * parallelism.pipeline
    per_pod = parallelism.gpus_per_node or ranks_per_engine
    world_size = ranks_per_engine * parallelism.data
    on_gpu = spec.runtime.device == "cuda"
    return Layout(world_size, math.ceil(world_size / per_pod), min(per_pod, world_size) if on_gpu else 0)

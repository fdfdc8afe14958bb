"""Parallel degrees of a layout, comparable between the spec and an engine's report."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab_operator.resource.spec import Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """Tensor, pipeline and data parallel degrees, expert parallelism, and the ranks of one replica."""

    tensor: int
    pipeline: int
    data: int
    expert: bool
    world_size: int

    @classmethod
    def wanted(cls, spec: Spec) -> Degrees:
        """Return the degrees of one replica that the spec requests."""
        parallelism = spec.parallelism
        ranks = parallelism.tensor * parallelism.pipeline * parallelism.data
        return cls(
            tensor=parallelism.tensor,
            pipeline=parallelism.pipeline,
            data=parallelism.data,
            expert=parallelism.expert,
            world_size=ranks,
        )

    def __str__(self) -> str:
        experts = ", expert parallel" if self.expert else ""
        return f"tensor {self.tensor}, pipeline {self.pipeline}, data {self.data}{experts} ({self.world_size} ranks)"

    def status(self) -> dict[str, int | bool]:
        """Return the fields of `status.layout`."""
        return {
            "worldSize": self.world_size,
            "tensor": self.tensor,
            "pipeline": self.pipeline,
            "data": self.data,
            "expert": self.expert,
        }

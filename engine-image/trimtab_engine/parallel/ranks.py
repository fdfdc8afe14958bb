"""Numbering of ranks in a parallel layout, as in vLLM. Pure tables.

ranks = external DP x DP x PP x TP, the tensor-parallel rank varies fastest:
```
TP2 PP2 DP2   DP 0: stage 0 |0 1| stage 1 |2 3|      DP 1: stage 0 |4 5| stage 1 |6 7|
```
"""

from collections.abc import Callable
from dataclasses import dataclass

from trimtab_engine.config.engine import EngineConfig

RanksByGroup = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class RankCoordinates:
    """A rank's coordinates."""

    external: int
    data: int
    pipeline: int
    tensor: int


Key = Callable[[RankCoordinates], tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The parallel degrees. `external` counts data-parallel copies that another balancer feeds."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    external: int = 1
    expert: bool = False

    @classmethod
    def of(cls, config: EngineConfig, *, is_moe: bool) -> "Layout":
        """Return the layout of the world that one engine core belongs to. Data-parallel cores share a world only for
        MoE models; cores of a dense model are independent.
        """
        return cls(
            tensor=config.tensor_parallel_size,
            pipeline=config.pipeline_parallel_size,
            data=config.data_parallel_size if is_moe else 1,
            expert=config.enable_expert_parallel,
        )

    @property
    def world_size(self) -> int:
        return self.external * self.data * self.pipeline * self.tensor

    @property
    def ranks_per_engine(self) -> int:
        """Ranks that one engine core drives."""
        return self.pipeline * self.tensor

    def place(self, rank: int) -> RankCoordinates:
        rest, tensor = divmod(rank, self.tensor)
        rest, pipeline = divmod(rest, self.pipeline)
        external, data = divmod(rest, self.data)
        return RankCoordinates(external, data, pipeline, tensor)

    def rank(self, place: RankCoordinates) -> int:
        return ((place.external * self.data + place.data) * self.pipeline + place.pipeline) * self.tensor + place.tensor

    def tensor_groups(self) -> RanksByGroup:
        """Return ranks that split each layer."""
        return self._groups(lambda place: (place.external, place.data, place.pipeline))

    def pipeline_groups(self) -> RanksByGroup:
        """Return ranks that pass hidden states on, first stage first."""
        return self._groups(lambda place: (place.external, place.data, place.tensor))

    def data_groups(self) -> RanksByGroup:
        """Return ranks that hold the same layers and heads and serve other requests."""
        return self._groups(lambda place: (place.external, place.pipeline, place.tensor))

    def expert_groups(self) -> RanksByGroup:
        """Return ranks that share the experts of a mixture: all DP x TP ranks of one stage."""
        return self._groups(lambda place: (place.external, place.pipeline))

    def _groups(self, key: Key) -> RanksByGroup:
        """Return ranks with an equal key, ascending; groups in the order of their first rank."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            groups.setdefault(key(self.place(rank)), []).append(rank)
        return tuple(tuple(ranks) for ranks in groups.values())

    def data_rank(self, config: EngineConfig) -> int:
        """Return this core's index among its world's data-parallel cores; 0 for a dense model."""
        return config.data_parallel_rank if self.data > 1 else 0

    def driver(self, data: int = 0) -> int:
        """Return the rank in the engine core's own process: of the last stage, which has the logits and samples."""
        return self.rank(RankCoordinates(0, data, self.pipeline - 1, 0))

    def rank_of_process(self, process: int, data: int = 0) -> int:
        """Processes are counted over the nodes of one engine, 0 being the engine core's; ranks follow cyclically.

        ```
        TP2 PP2, two nodes   node 0: process 0 1 = rank 2 3 (stage 1)    node 1: process 2 3 = rank 0 1 (stage 0)
        ```
        """
        size = self.ranks_per_engine
        return data * size + (process + (self.pipeline - 1) * self.tensor) % size

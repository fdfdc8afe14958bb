"""A MoE on one rank: routing, the experts that are held here, and the sum over the ranks of the group.

Data-parallel ranks have different tokens and one set of experts: each rank gathers the tokens of all, computes its
experts' (or its slice of every expert's) part for all of them, and the parts are summed and handed back:
```
tokens of DP 0 |    -- all-gather -->  | 0 | 1 |  -- experts held here -->  | 0 | 1 |  -- reduce-scatter -->  own rows
tokens of DP 1 |                         (on every rank)                      (parts)     then all-reduce over TP
```
All data-parallel ranks therefore have the same number of rows, which the step sees to.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from trimtab_kernels.fused_moe import fused_moe, sum_of_experts
from trimtab_kernels.moe.sigmoid_routing import SigmoidRouting, route_by_sigmoid
from trimtab_modelspec.config import ClampedGate

from trimtab_engine.layers.gated_mlp import GatedMlp
from trimtab_engine.layers.quantized import Projection
from trimtab_engine.parallel.expert_slots import ExpertSlots
from trimtab_engine.parallel.groups import RankGroups

MAX_TOKENS = 1024  # of one call on the CPU: the wide intermediate of more would set the activations' peak
MAX_CUDA_TOKENS = 16384  # on CUDA every call reads all experts' weights, so a step is one call


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """w13 [experts held, 2 * intermediate, hidden], w2 [experts held, hidden, intermediate] of this rank; float8 with
    scales per block, or of the computing dtype without. w13_bias [experts held, 2 * intermediate], w2_bias [experts
    held, hidden], where there are some.
    """

    w13: torch.Tensor
    w2: torch.Tensor
    w13_scales: torch.Tensor | None = None
    w2_scales: torch.Tensor | None = None
    w13_bias: torch.Tensor | None = None
    w2_bias: torch.Tensor | None = None
    clamped_gate: ClampedGate | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Parameters of the experts, one entry per expert."""
        more = (self.w13_scales, self.w2_scales, self.w13_bias, self.w2_bias)
        return self.w13, self.w2, *(tensor for tensor in more if tensor is not None)


Experts = StackedExperts | Sequence[GatedMlp]
"""This rank's experts, fused or separate, multiplied as stored."""


class MixtureOfExperts:
    """`shared`: this rank's part of the shared experts, included in the sum over tensor-parallel ranks."""

    def __init__(
        self,
        router: Projection,
        experts: Experts,
        *,
        top_k: int,
        renormalize: bool,
        expert_map: torch.Tensor | None,
        groups: RankGroups,
        sigmoid: SigmoidRouting | None = None,
        shared: GatedMlp | None = None,
        slots: ExpertSlots | None = None,
    ) -> None:
        self.experts = experts
        self._router = router
        self._top_k, self._renormalize = top_k, renormalize
        self._sigmoid, self._shared = sigmoid, shared
        self._expert_map = expert_map if slots is None else slots.expert_map
        self._slots = slots
        self._tensor, self._data = groups.tensor, groups.data

    @property
    def slots(self) -> ExpertSlots:
        """Placement of experts; only with expert parallel load balancing."""
        assert self._slots is not None
        return self._slots

    @property
    def expert_tensors(self) -> tuple[torch.Tensor, ...]:
        """Parameters of this rank's experts, one entry per slot; only with expert parallel load balancing."""
        assert isinstance(self.experts, StackedExperts)
        return self.experts.tensors

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, hidden_size] -> the same shape."""
        own, logits = x, self._router(x)
        if self._data is not None:
            x, logits = self._data.all_gather(x), self._data.all_gather(logits)
        most = MAX_CUDA_TOKENS if x.is_cuda else MAX_TOKENS
        parts = [
            self._compute(rows, scores)
            for rows, scores in zip(torch.split(x, most), torch.split(logits, most), strict=True)
        ]
        y = parts[0] if len(parts) == 1 else torch.cat(parts)
        if self._data is not None:
            y = self._data.reduce_scatter(y)
        if self._shared is not None:
            y = y + self._shared(own)
        return y if self._tensor is None else self._tensor.all_reduce(y)

    def _compute(self, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """The part of the experts that are held here."""
        if self._slots is not None:
            self._slots.count(self._chosen(logits))
        held = self.experts
        if not isinstance(held, StackedExperts):
            return sum_of_experts(
                x,
                logits,
                lambda expert, rows: held[expert](rows),
                self._top_k,
                self._renormalize,
                self._expert_map,
                sigmoid=self._sigmoid,
            )
        return fused_moe(
            x,
            logits,
            held.w13,
            held.w2,
            self._top_k,
            self._renormalize,
            self._expert_map,
            w13_scales=held.w13_scales,
            w2_scales=held.w2_scales,
            w13_bias=held.w13_bias,
            w2_bias=held.w2_bias,
            clamps=None if held.clamped_gate is None else (held.clamped_gate.alpha, held.clamped_gate.limit),
            sigmoid=self._sigmoid,
        )

    def _chosen(self, logits: torch.Tensor) -> torch.Tensor:
        """The experts [rows, top_k] of each token."""
        if self._sigmoid is None:
            return logits.topk(self._top_k, dim=-1).indices
        return route_by_sigmoid(logits, self._top_k, self._renormalize, self._sigmoid)[1]

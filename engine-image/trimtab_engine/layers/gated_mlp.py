"""The gated MLP of a decoder layer (Shazeer 2020, arXiv:2002.05202): down(silu(gate x) * (up x))."""

import torch

from trimtab_engine.layers.quantized import Projection


class GatedMlp:
    """`gate_up` multiplies with both projections at once and gates; `down` sums over the ranks that share the layer."""

    def __init__(self, gate_up: Projection, down: Projection) -> None:
        self.gate_up, self.down = gate_up, down

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, hidden_size] -> the same shape."""
        return self.down(self.gate_up(x))

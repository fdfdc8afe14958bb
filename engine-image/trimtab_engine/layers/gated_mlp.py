"""The gated MLP of a decoder layer (Shazeer 2020, arXiv:2002.05202): down(silu(gate x) * (up x)), or another gate."""

import torch
import torch.nn.functional as F
from trimtab_kernels.silu_and_mul import clamped_gate
from trimtab_modelspec.config import ClampedGate

from trimtab_engine.layers.quantized import Projection


class GatedMlp:
    """`gate_up` multiplies with both projections at once and gates; `down` sums over the ranks that share the layer."""

    def __init__(self, gate_up: Projection, down: Projection) -> None:
        self.gate_up, self.down = gate_up, down

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, hidden_size] -> the same shape."""
        return self.down(self.gate_up(x))


class GeluMlp(GatedMlp):
    """The same with gelu, approximated by tanh, for silu; `gate_up` multiplies only."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, hidden_size] -> the same shape."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.gelu(gate, approximate="tanh").mul_(up))


class ClampedMlp(GatedMlp):
    """The same with gpt-oss's gate, which is cut off; `gate_up` multiplies only."""

    def __init__(self, gate_up: Projection, down: Projection, gate: ClampedGate) -> None:
        super().__init__(gate_up, down)
        self._gate = gate

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, hidden_size] -> the same shape."""
        return self.down(clamped_gate(self.gate_up(x), self._gate.alpha, self._gate.limit))

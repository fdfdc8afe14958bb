"""Gated activation of Llama's MLP:  y = silu(x[:, :n]) * x[:, n:]   (Shazeer 2020, arXiv:2002.05202).

x  [num_tokens, 2 * intermediate_size]  fp32 | bf16 | fp16: gate, then up
y  [num_tokens, intermediate_size]      dtype of x
Bound by memory: 3 * num_tokens * intermediate_size * itemsize bytes. Source: own.
"""

import torch
import torch.nn.functional as F


def silu_and_mul_reference(x: torch.Tensor) -> torch.Tensor:
    """The definition, in float32, with the activation rounded to x's dtype before the product as transformers does."""
    gate, up = x.chunk(2, dim=-1)
    wide = gate.float()
    return (wide * torch.sigmoid(wide)).to(x.dtype) * up


def silu_and_mul_fused(x: torch.Tensor) -> torch.Tensor:
    """Two operators, the product in place."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Apply the gate. Raises ValueError when the last dimension is odd."""
    if x.shape[-1] % 2:
        raise ValueError(f"silu_and_mul: x is {list(x.shape)}; the last dimension must hold gate and up of equal size")
    return silu_and_mul_fused(x)

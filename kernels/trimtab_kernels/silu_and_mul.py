"""Gated activation of Llama's MLP:  y = silu(x[:, :n]) * x[:, n:]   (Shazeer 2020, arXiv:2002.05202).

x  [num_tokens, 2 * intermediate_size]  fp32 | bf16 | fp16: gate, then up
y  [num_tokens, intermediate_size]      dtype of x
clamped_gate is gpt-oss's gate: gate and up are clamped, then y = (up + 1) * gate * sigmoid(alpha * gate).
Memory-bound: 3 * num_tokens * intermediate_size * itemsize bytes. Source: own.
"""

import torch
import torch.nn.functional as F

from trimtab_kernels.launch.jit import cdiv, kernel, next_power_of_2, tl

BLOCK_COLUMNS = 2048
"""Columns of one CTA: two 16-byte vector loads per thread with 4 warps and 2 bytes per value, for gate and for up."""


def silu_and_mul_reference(x: torch.Tensor) -> torch.Tensor:
    """Return the definition in float32, with the activation rounded to x's dtype before the multiplication, as
    transformers does.
    """
    gate, up = x.chunk(2, dim=-1)
    wide = gate.float()
    return (wide * torch.sigmoid(wide)).to(x.dtype) * up


def clamped_gate(x: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """Return the definition of the clamped gate in torch operators."""
    gate, up = x.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return (up + 1) * gate * torch.sigmoid(gate * alpha)


def silu_and_mul_fused(x: torch.Tensor) -> torch.Tensor:
    """Compute the gate with two operators, the multiplication in place."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


@kernel()
def _silu_and_mul(
    x: tl.tensor,
    y: tl.tensor,
    x_stride: tl.tensor,
    size: tl.tensor,
    BLOCK: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
) -> None:
    """ALPHA and LIMIT belong to the clamped gate, or are None."""
    token = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < size
    row = x + token * x_stride
    gate = tl.load(row + offsets, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(row + size + offsets, mask=inside, other=0.0)
    if LIMIT is None:
        activated = (gate * tl.sigmoid(gate)).to(up.dtype)
        # Rounded once more after the multiplication, which is exact in float32 for 16-bit factors.
        product = activated.to(tl.float32) * up.to(tl.float32)
    else:
        gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        wide = tl.clamp(up.to(tl.float32), -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        product = (wide + 1.0) * gate * tl.sigmoid(gate * ALPHA)
    tl.store(y + token * size + offsets, product.to(up.dtype), mask=inside)


def silu_and_mul_triton(x: torch.Tensor, clamps: tuple[float, float] | None = None) -> torch.Tensor:
    """Launch the kernel. x may have any row stride. `clamps`: (alpha, limit) of the clamped gate."""
    num_tokens, size = x.shape[0], x.shape[1] // 2
    y = torch.empty(num_tokens, size, dtype=x.dtype, device=x.device)
    if num_tokens:
        block = min(BLOCK_COLUMNS, next_power_of_2(size))
        alpha, limit = (None, None) if clamps is None else clamps
        _silu_and_mul[(num_tokens, cdiv(size, block))](
            x, y, x.stride(0), size, BLOCK=block, ALPHA=alpha, LIMIT=limit, num_warps=4
        )
    return y


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Apply the gate.

    Raises:
        ValueError: the last dimension is odd.
    """
    if x.shape[-1] % 2:
        raise ValueError(f"silu_and_mul: x is {list(x.shape)}; the last dimension must hold gate and up of equal size")
    return silu_and_mul_triton(x) if x.is_cuda else silu_and_mul_fused(x)

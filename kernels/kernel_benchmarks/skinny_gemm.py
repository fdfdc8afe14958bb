"""skinny_gemm: the four GEMMs of a layer of Llama-3.1-8B for 1 and 16 rows, compared with the operators they
replace.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from trimtab_kernels.rms_norm import rms_norm_reference
from trimtab_kernels.skinny_gemm import skinny_gemm_reference, skinny_gemm_triton

from kernel_benchmarks.row import Row, tolerance_of

SHAPES = ((6144, 4096, "norm"), (4096, 4096, "residual"), (14336, 4096, "gate"), (4096, 14336, "residual"))
EPS = 1e-5


def rows(device: torch.device, *, tiny: bool) -> Iterator[Row]:
    # The interpreter does not multiply bfloat16.
    dtype = torch.float32 if tiny else torch.bfloat16
    for n, k, variant in ((40, 64, "norm"), (40, 64, "residual"), (40, 64, "gate")) if tiny else SHAPES:
        for num_rows in (3,) if tiny else (1, 16):
            yield _row(num_rows, n, k, variant, dtype, device)


def _row(num_rows: int, n: int, k: int, variant: str, dtype: torch.dtype, device: torch.device) -> Row:
    is_gated = variant == "gate"
    x = torch.randn(num_rows, k, device=device).to(dtype)
    weight = (torch.randn(2 * n if is_gated else n, k, device=device) / k**0.5).to(dtype)
    norm = None if variant == "residual" else torch.rand(k, device=device).to(dtype)
    residual = torch.zeros(num_rows, n, device=device, dtype=dtype) if variant == "residual" else None
    return Row(
        f"skinny_gemm {n}x{k} {variant}, {num_rows} rows",
        "read",
        weight.numel() * weight.itemsize,
        0.80,
        partial(skinny_gemm_triton, x, weight, norm=norm, eps=EPS, is_gated=is_gated, residual=residual),
        # The residual accumulates over calls: only the GEMM is compared.
        partial(skinny_gemm_reference, x, weight, norm=norm, eps=EPS, is_gated=is_gated),
        4 * tolerance_of(dtype),
        {"torch": partial(_by_torch, x, weight, norm, residual, is_gated=is_gated)},
        read=None if residual is None else _gemm_only(residual, x, weight),
    )


def _gemm_only(residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> Callable[[], torch.Tensor]:
    def read() -> torch.Tensor:
        residual.zero_()
        return skinny_gemm_triton(x, weight, residual=residual)

    return read


def _by_torch(
    x: torch.Tensor,
    weight: torch.Tensor,
    norm: torch.Tensor | None,
    residual: torch.Tensor | None,
    *,
    is_gated: bool,
) -> object:
    y = F.linear(x if norm is None else rms_norm_reference(x, norm, EPS), weight)
    if is_gated:
        gate, up = y.chunk(2, dim=-1)
        return F.silu(gate) * up
    return y if residual is None else residual.add_(y)

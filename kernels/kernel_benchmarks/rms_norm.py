"""rms_norm, plain and with a residual, at the hidden sizes of 8B and 70B models."""

from collections.abc import Iterator
from functools import partial

import torch
from trimtab_kernels.rms_norm import rms_norm_reference, rms_norm_triton

from kernel_benchmarks.row import Row, compiled_once, tolerance_of


def rows(device: torch.device, *, tiny: bool) -> Iterator[Row]:
    dtype = torch.float32 if tiny else torch.bfloat16
    for num_tokens, size in ((5, 72),) if tiny else ((16384, 4096), (8192, 8192)):
        x, residual = (torch.randn(num_tokens, size, device=device, dtype=dtype) for _ in range(2))
        weight = torch.randn(size, device=device, dtype=dtype)
        plain = x.numel() * x.element_size()
        compiled = compiled_once(rms_norm_reference)
        yield Row(
            f"rms_norm {num_tokens}x{size}",
            "copy",
            2 * plain,
            0.90,
            partial(rms_norm_triton, x, weight, 1e-6),
            partial(rms_norm_reference, x, weight, 1e-6),
            tolerance_of(dtype),
            {},
            {"torch.compile": partial(compiled, x, weight, 1e-6)},
        )
        # The residual grows by x with each call: the reference uses the first one's.
        yield Row(
            f"rms_norm with residual {num_tokens}x{size}",
            "copy",
            4 * plain,
            0.90,
            partial(rms_norm_triton, x, weight, 1e-6, residual=residual),
            partial(rms_norm_reference, x + residual, weight, 1e-6),
            tolerance_of(dtype),
            {},
            {"torch.compile": partial(compiled_once(_add_norm), x, residual.clone(), weight)},
        )


def _add_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the sum, which is kept, and its norm."""
    total = x + residual
    return rms_norm_reference(total, weight, 1e-6), total

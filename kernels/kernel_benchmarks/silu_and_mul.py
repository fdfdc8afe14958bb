"""silu_and_mul at the intermediate size of Llama-3.1-8B."""

from collections.abc import Iterator

import torch
from trimtab_kernels.silu_and_mul import silu_and_mul_reference, silu_and_mul_triton

from kernel_benchmarks.row import Row, compiled_once, tolerance_of


def rows(device: torch.device, *, tiny: bool) -> Iterator[Row]:
    dtype = torch.float32 if tiny else torch.bfloat16
    num_tokens, size = (3, 40) if tiny else (8192, 14336)
    x = torch.randn(num_tokens, 2 * size, device=device, dtype=dtype)
    compiled = compiled_once(silu_and_mul_reference)
    yield Row(
        f"silu_and_mul {num_tokens}x{size}",
        "copy",
        1.5 * x.numel() * x.element_size(),
        0.90,
        lambda: silu_and_mul_triton(x),
        lambda: silu_and_mul_reference(x),
        tolerance_of(dtype),
        {},
        {"torch.compile": lambda: compiled(x)},
    )

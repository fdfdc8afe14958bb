"""w8a8_block_fp8 at shapes of DeepSeek-V3 and Llama-3.1-8B, compared with torch's float8 GEMM with one scale, and on
Hopper with the warp-specialised kernel for many tokens, so that one run shows which is correct and faster.
"""

from collections.abc import Iterator
from functools import partial

import torch
from trimtab_kernels.launch.device_facts import device_facts
from trimtab_kernels.w8a8_block_fp8 import quantize_groups_reference, w8a8_block_fp8_reference, w8a8_block_fp8_triton
from trimtab_kernels.w8a8_block_fp8_gluon import is_supported, w8a8_block_fp8_gluon

from kernel_benchmarks.row import Row, tolerance_of

SHAPES = (
    (28672, 4096), (4096, 14336), (6144, 4096), (4096, 4096),  # Llama-3.1-8B: gate and up, down, qkv, o
    (7168, 16384), (24576, 1536), (36864, 7168), (7168, 18432), (7168, 2048),  # DeepSeek-V3: o, q_b, dense, shared
)  # fmt: skip
MEMORY_BOUND_TOKENS, COMPUTE_BOUND_TOKENS = 32, 1024
"""Up to the first, the weights' bytes are the limit; from the second on, the FLOPs; between them there is no target."""


def rows(device: torch.device, *, tiny: bool) -> Iterator[Row]:
    for n, k in ((64, 256),) if tiny else SHAPES:
        b = torch.randn(n, k, device=device).to(torch.float8_e4m3fn)
        b_scales = torch.rand(-(-n // 128), -(-k // 128), device=device) + 0.5
        for m in (3,) if tiny else (1, 32, 256, 1024, 4096):
            a, a_scales = quantize_groups_reference(torch.randn(m, k, device=device))
            is_small = m <= MEMORY_BOUND_TOKENS
            padded = torch.zeros(max(16, m), k, device=device).to(torch.float8_e4m3fn)
            one = torch.ones((), device=device)
            yield Row(
                f"w8a8_block_fp8 {n}x{k}, {m} tokens",
                "read" if is_small else "fp8",
                n * k + m * k + 2 * m * n if is_small else 2 * m * n * k,
                0.80 if is_small else 0.70 if m >= COMPUTE_BOUND_TOKENS else 0.0,
                partial(w8a8_block_fp8_triton, a, a_scales, b, b_scales, torch.bfloat16),
                partial(w8a8_block_fp8_reference, a, a_scales, b, b_scales, torch.float32),
                tolerance_of(torch.bfloat16),
                {"torch._scaled_mm, one scale": partial(_one_scale, padded, b, one)},
            )
            if device.type == "cuda" and is_supported(m, k, device_facts(device)):
                yield Row(
                    f"w8a8_block_fp8 {n}x{k}, {m} tokens, in Gluon",
                    "fp8",
                    2 * m * n * k,
                    0.70,
                    partial(w8a8_block_fp8_gluon, a, a_scales, b, b_scales, torch.bfloat16),
                    partial(w8a8_block_fp8_reference, a, a_scales, b, b_scales, torch.float32),
                    tolerance_of(torch.bfloat16),
                )


def _one_scale(a: torch.Tensor, b: torch.Tensor, one: torch.Tensor) -> torch.Tensor:
    """Compute with one scale and at least 16 rows: less work than our kernel's."""
    return torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16)

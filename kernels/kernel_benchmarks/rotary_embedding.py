"""rotary_embedding over the query and key heads of Llama-3.1-8B."""

from collections.abc import Iterator

import torch
from trimtab_kernels.rotary_embedding import rotary_embedding_reference, rotary_embedding_triton

from kernel_benchmarks.row import Row, compiled_once, tolerance_of


def rows(device: torch.device, *, tiny: bool) -> Iterator[Row]:
    dtype = torch.float32 if tiny else torch.bfloat16
    num_tokens, heads, size = (3, 5, 16) if tiny else (16384, 40, 128)
    x = torch.randn(num_tokens, heads, size, device=device, dtype=dtype)
    angles = torch.rand(num_tokens, size // 2, device=device) * 6
    rotation = torch.complex(angles.cos(), angles.sin())
    compiled = compiled_once(rotary_embedding_reference)
    yield Row(
        f"rotary_embedding {num_tokens}x{heads}x{size}",
        "copy",
        2 * x.numel() * x.element_size() + 8 * rotation.numel(),
        0.90,
        lambda: rotary_embedding_triton(x, rotation),
        lambda: rotary_embedding_reference(x, rotation),
        tolerance_of(dtype),
        {},
        {"torch.compile": lambda: compiled(x, rotation)},
    )

"""copy_blocks: scattered blocks of Llama-3.1-8B's 64 regions, compared with torch's indexing."""

from collections.abc import Iterator
from functools import partial

import torch
from trimtab_kernels.copy_blocks import copy_blocks_triton

from kernel_benchmarks.row import Row, compiled_once


def rows(device: torch.device, *, tiny: bool) -> Iterator[Row]:
    dtype = torch.float32 if tiny else torch.bfloat16
    regions, blocks, elements, num_pairs = (2, 8, 64, 3) if tiny else (64, 1024, 16 * 8 * 128, 256)
    cache = torch.randn(regions, blocks, elements, device=device, dtype=dtype)
    order = torch.randperm(blocks, device=device)
    pairs = torch.stack([order[:num_pairs], order[num_pairs : 2 * num_pairs]], dim=1)

    def by_index(cache: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
        cache[:, pairs[:, 1]] = cache[:, pairs[:, 0]]
        return cache

    def copy() -> torch.Tensor:
        copy_blocks_triton(cache, cache, pairs)
        return cache

    yield Row(
        f"copy_blocks {num_pairs} of {regions}x{elements}",
        "copy",
        2 * num_pairs * regions * elements * dtype.itemsize,
        0.90,
        copy,
        lambda: cache[0, pairs[:, 0]],
        0.0,
        {"torch indexing": partial(by_index, cache, pairs)},
        {"torch.compile": partial(compiled_once(by_index), cache, pairs)},
        read=lambda: cache[0, pairs[:, 1]],
    )

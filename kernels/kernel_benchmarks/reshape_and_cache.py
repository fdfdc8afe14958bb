"""reshape_and_cache into scattered slots, in bf16 and with quantisation to float8, compared with torch's indexing."""

from collections.abc import Iterator
from functools import partial

import torch
from trimtab_kernels.reshape_and_cache import (
    FLOAT8,
    quantize_float8,
    reshape_and_cache_cpu,
    reshape_and_cache_triton,
)

from kernel_benchmarks.row import Row, compiled_once, tolerance_of


def rows(device: torch.device, *, tiny: bool) -> Iterator[Row]:
    dtype = torch.float32 if tiny else torch.bfloat16
    num_tokens, heads, size, num_blocks = (3, 2, 16, 2) if tiny else (65536, 8, 128, 8192)
    # Exactly representable in float8, so that both kinds can be compared without a rounding tolerance.
    key, value = (torch.randn(num_tokens, heads, size, device=device).to(FLOAT8).to(dtype) for _ in range(2))
    slots = torch.randperm(num_blocks * 16, device=device)[:num_tokens]
    for cache_dtype in (dtype, FLOAT8):
        caches = [torch.zeros(num_blocks, 16, heads, size, device=device).to(cache_dtype) for _ in range(2)]

        def write(caches: list[torch.Tensor] = caches) -> torch.Tensor:
            reshape_and_cache_triton(key, value, caches[0], caches[1], slots)
            return caches[0]

        def read(caches: list[torch.Tensor] = caches) -> torch.Tensor:
            return torch.stack([cache.flatten(0, 1)[slots[:1024]].float() for cache in caches])

        def expect(cache_dtype: torch.dtype = cache_dtype) -> torch.Tensor:
            new = torch.stack([key[:1024], value[:1024]])
            return quantize_float8(new, 1.0).float() if cache_dtype == FLOAT8 else new.float()

        yield Row(
            f"reshape_and_cache {num_tokens}x{heads}x{size} {str(cache_dtype).removeprefix('torch.')}",
            "copy",
            2 * key.numel() * (dtype.itemsize + cache_dtype.itemsize),
            0.90,
            write,
            expect,
            tolerance_of(dtype),
            {},
            {"torch.compile": partial(compiled_once(reshape_and_cache_cpu), key, value, caches[0], caches[1], slots)},
            read=read,
        )

"""rope_and_cache on the projections of Llama-3.1-8B and of Qwen3-0.6B, which has norms, compared with its separate
steps.
"""

from collections.abc import Iterator
from functools import partial

import torch
from trimtab_kernels.reshape_and_cache import reshape_and_cache_triton
from trimtab_kernels.rms_norm import rms_norm_triton
from trimtab_kernels.rope_and_cache import Norms, rope_and_cache_reference, rope_and_cache_triton, split_heads
from trimtab_kernels.rotary_embedding import rotary_embedding_triton

from kernel_benchmarks.row import Row, tolerance_of

CHECKED_TOKENS = 1024


def rows(device: torch.device, *, tiny: bool) -> Iterator[Row]:
    for name, num_heads, num_kv_heads, has_norms in (("Llama-3.1-8B", 32, 8, False), ("Qwen3-0.6B", 16, 8, True)):
        step = _Step(device, *((2, 1) if tiny else (num_heads, num_kv_heads)), has_norms=has_norms, tiny=tiny)
        yield Row(
            f"rope_and_cache {name}, {step.slots.shape[0]} tokens",
            "copy",
            step.num_bytes,
            0.90,
            step.run,
            step.reference,
            tolerance_of(step.qkv.dtype),
            {"in separate steps": step.run_in_parts},
            read=step.written,
        )


class _Step:
    """Inputs of one step, which running it changes."""

    def __init__(self, device: torch.device, num_heads: int, num_kv_heads: int, *, has_norms: bool, tiny: bool) -> None:
        dtype = torch.float32 if tiny else torch.bfloat16
        num_tokens, size = (3, 16) if tiny else (16384, 128)
        make = partial(torch.randn, device=device, dtype=dtype)
        self.qkv = make(num_tokens, (num_heads + 2 * num_kv_heads) * size)
        self._before = self.qkv[:CHECKED_TOKENS].clone()
        angles = torch.rand(num_tokens, size // 2, device=device) * 6
        self.rotation = torch.complex(angles.cos(), angles.sin())
        cache_shape = num_tokens // 8 + 1, 16, num_kv_heads, size
        self.caches = make(*cache_shape), make(*cache_shape)
        self.slots = torch.randperm(self.caches[0].shape[0] * 16, device=device)[:num_tokens]
        self.norms = Norms(make(size), make(size), 1e-6) if has_norms else None
        # Read: all heads. Written: query heads, key heads twice, value heads.
        moved = (num_heads + 2 * num_kv_heads) + (num_heads + 3 * num_kv_heads)
        self.num_bytes = num_tokens * (moved * size * dtype.itemsize + 4 * size)

    def run(self) -> torch.Tensor:
        query, *_ = rope_and_cache_triton(self.qkv, self.rotation, *self.caches, self.slots, norms=self.norms)
        return query

    def run_in_parts(self) -> None:
        query, key, value = split_heads(self.qkv, *self.caches[0].shape[2:])
        if self.norms is not None:
            query = rms_norm_triton(query, self.norms.query, self.norms.eps)
            key = rms_norm_triton(key, self.norms.key, self.norms.eps)
        rotary_embedding_triton(query, self.rotation)
        reshape_and_cache_triton(rotary_embedding_triton(key, self.rotation), value, *self.caches, self.slots)

    def written(self) -> torch.Tensor:
        """Return the written query and key heads and cache entries of the first tokens, concatenated."""
        query, key, _ = split_heads(self.qkv[:CHECKED_TOKENS], *self.caches[0].shape[2:])
        return torch.cat((query, key, *(cache.flatten(0, 1)[self._checked_slots] for cache in self.caches)), dim=1)

    def reference(self) -> torch.Tensor:
        fresh = torch.zeros_like(self.caches[0]), torch.zeros_like(self.caches[1])
        rotation = self.rotation[:CHECKED_TOKENS]
        query, key, _ = rope_and_cache_reference(self._before, rotation, *fresh, self._checked_slots, norms=self.norms)
        return torch.cat((query, key, *(cache.flatten(0, 1)[self._checked_slots] for cache in fresh)), dim=1)

    @property
    def _checked_slots(self) -> torch.Tensor:
        return self.slots[:CHECKED_TOKENS]

"""Layers of Llama-3.1-8B for few rows, six launches each: with ordinary launches, and on Hopper and later also with
dependent launches. One run shows whether the latter are correct and what they gain.
"""

from collections.abc import Iterator
from functools import partial

import torch
from trimtab_kernels.launch.backends import KernelBackends, override_backends
from trimtab_kernels.launch.dependence import FIRST_CAPABILITY
from trimtab_kernels.launch.device_facts import device_facts
from trimtab_kernels.paged_decode import paged_decode_reference, paged_decode_triton
from trimtab_kernels.rope_and_cache import rope_and_cache_reference, rope_and_cache_triton
from trimtab_kernels.skinny_gemm import skinny_gemm_reference, skinny_gemm_triton

from kernel_benchmarks.row import Row, tolerance_of

NUM_LAYERS, CONTEXT, BLOCK = 4, 1024, 16
EPS = 1e-5
BAR = 0.85


def rows(device: torch.device, *, tiny: bool) -> Iterator[Row]:
    for num_rows in (3,) if tiny else (1, 16):
        step = _Step(device, num_rows, tiny=tiny)
        name = f"{len(step.layers)} layers of Llama-3.1-8B, {num_rows} rows"
        tolerance = 8 * tolerance_of(step.start.dtype)
        yield Row(name, "read", step.num_bytes, BAR, step.run, step.reference, tolerance)
        if device.type == "cuda" and device_facts(device).capability >= FIRST_CAPABILITY:
            ahead = f"{name}, dependent launches"
            yield Row(ahead, "read", step.num_bytes, BAR, step.run_dependent, step.reference, tolerance)


class _Layer:
    """Weights of one layer, random with a scale that preserves the size of activations, and its cache."""

    def __init__(self, device: torch.device, sizes: tuple[int, int, int, int, int], num_blocks: int) -> None:
        hidden, heads, kv_heads, size, wide = sizes
        dtype = torch.float32 if hidden < 1024 else torch.bfloat16
        make = partial(torch.randn, device=device, dtype=dtype)
        self.norms = torch.rand(2, hidden, device=device).to(dtype)
        self.qkv = make((heads + 2 * kv_heads) * size, hidden) / hidden**0.5
        self.out = make(hidden, heads * size) / (heads * size) ** 0.5
        self.gate_up = make(2 * wide, hidden) / hidden**0.5
        self.down = make(hidden, wide) / wide**0.5
        shape = num_blocks, BLOCK, kv_heads, size
        self.caches: tuple[torch.Tensor, torch.Tensor] = (make(*shape), make(*shape))

    @property
    def weights(self) -> tuple[torch.Tensor, ...]:
        return self.qkv, self.out, self.gate_up, self.down


class _Step:
    """Inputs of one step of decodes."""

    def __init__(self, device: torch.device, num_rows: int, *, tiny: bool) -> None:
        sizes = (64, 4, 2, 16, 40) if tiny else (4096, 32, 8, 128, 14336)
        context, num_layers = (20, 2) if tiny else (CONTEXT, NUM_LAYERS)
        hidden, _, kv_heads, size, _ = sizes
        per_row = -(-context // BLOCK)
        self.layers = [_Layer(device, sizes, num_rows * per_row) for _ in range(num_layers)]
        dtype = self.layers[0].qkv.dtype
        self.start = torch.randn(num_rows, hidden, device=device, dtype=dtype)
        self.hidden = self.start.clone()
        angles = torch.rand(num_rows, size // 2, device=device) * 6
        self.rotation = torch.complex(angles.cos(), angles.sin())
        self.tables = torch.arange(num_rows * per_row, dtype=torch.int32, device=device).view(num_rows, per_row)
        self.lengths = torch.full((num_rows,), context, dtype=torch.int32, device=device)
        self.slots = self.tables[:, -1].long() * BLOCK + (context - 1) % BLOCK
        keys = 2 * num_rows * context * kv_heads * size * dtype.itemsize
        self.num_bytes = sum(w.nbytes for layer in self.layers for w in layer.weights) + num_layers * keys

    def run(self) -> torch.Tensor:
        with override_backends(KernelBackends()):
            return self._run()

    def _run(self) -> torch.Tensor:
        hidden = self.hidden.copy_(self.start)
        for layer in self.layers:
            qkv = skinny_gemm_triton(hidden, layer.qkv, norm=layer.norms[0], eps=EPS)
            query, *_ = rope_and_cache_triton(qkv, self.rotation, *layer.caches, self.slots)
            seen = paged_decode_triton(query, *layer.caches, self.tables, self.lengths, scale=0.1)
            skinny_gemm_triton(seen.flatten(1), layer.out, residual=hidden)
            wide = skinny_gemm_triton(hidden, layer.gate_up, norm=layer.norms[1], eps=EPS, is_gated=True)
            skinny_gemm_triton(wide, layer.down, residual=hidden)
        return hidden

    def run_dependent(self) -> torch.Tensor:
        with override_backends(KernelBackends(dependent_launches=True)):
            return self._run()

    def reference(self) -> torch.Tensor:
        hidden, dtype = self.start.float(), self.start.dtype
        for layer in self.layers:
            qkv = skinny_gemm_reference(hidden, layer.qkv, norm=layer.norms[0], eps=EPS).to(dtype)
            query, *_ = rope_and_cache_reference(qkv, self.rotation, *layer.caches, self.slots)
            seen = paged_decode_reference(query, *layer.caches, self.tables, self.lengths, scale=0.1)
            hidden = hidden + skinny_gemm_reference(seen.flatten(1), layer.out)
            wide = skinny_gemm_reference(hidden, layer.gate_up, norm=layer.norms[1], eps=EPS, is_gated=True)
            hidden = hidden + skinny_gemm_reference(wide.to(dtype), layer.down)
        return hidden

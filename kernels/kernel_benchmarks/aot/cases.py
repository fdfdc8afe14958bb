"""The engine's launches: each case calls a launcher with tensors on torch's meta device, shaped as in real models.

A case is called once per target with that device's facts. `in_sample` marks the cases that every test run compiles.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from trimtab_kernels.argmax import argmax_triton
from trimtab_kernels.copy_blocks import copy_blocks_triton
from trimtab_kernels.edit_logits import ban_tokens_triton, edit_logits_triton
from trimtab_kernels.fused_moe import fused_moe_triton
from trimtab_kernels.latent_and_cache import latent_and_cache_triton
from trimtab_kernels.latent_decode import latent_decode_triton
from trimtab_kernels.latent_prefill import latent_prefill_triton
from trimtab_kernels.launch.backends import KernelBackends, override_backends
from trimtab_kernels.launch.device_facts import HOPPER, DeviceFacts
from trimtab_kernels.launch.gemm_config import default_config
from trimtab_kernels.launch.jit import Launch, record_launches
from trimtab_kernels.lora import lora_triton
from trimtab_kernels.moe.grouped_gemm import default_moe_config
from trimtab_kernels.moe.sigmoid_routing import SigmoidRouting, route_by_sigmoid_triton
from trimtab_kernels.paged_decode import paged_decode_triton
from trimtab_kernels.paged_prefill import paged_prefill_triton
from trimtab_kernels.paged_prefill_gluon import paged_prefill_gluon
from trimtab_kernels.reshape_and_cache import FLOAT8, reshape_and_cache_triton
from trimtab_kernels.rms_norm import rms_norm_triton
from trimtab_kernels.rope_and_cache import Norms, rope_and_cache_triton
from trimtab_kernels.rotary_embedding import rotary_embedding_triton
from trimtab_kernels.sample import sample_triton
from trimtab_kernels.silu_and_mul import silu_and_mul_triton
from trimtab_kernels.skinny_gemm import skinny_gemm_triton
from trimtab_kernels.w8a8_block_fp8 import quantize_groups_triton, w8a8_block_fp8_triton
from trimtab_kernels.w8a8_block_fp8_gluon import w8a8_block_fp8_gluon

BF16 = torch.bfloat16
NUM_TOKENS = 256  # any number: it is never specialised on
GEMM_SHAPES = (
    (2112, 7168), (1536, 7168), (24576, 1536), (7168, 16384), (4096, 7168), (7168, 2048), (36864, 7168), (7168, 18432),
    (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336),
)  # fmt: skip
"""(N, K) of DeepSeek-V3, then of Llama-3.1-8B, on one GPU."""


@dataclass(frozen=True, slots=True)
class Case:
    """`launch` calls a launcher; `needs_float8` excludes generations without the type, `needs_hopper` all except
    Hopper.
    """

    name: str
    launch: Callable[[DeviceFacts], object]
    needs_float8: bool = False
    needs_hopper: bool = False
    in_sample: bool = False

    def launches(self, facts: DeviceFacts) -> list[Launch]:
        """Return the launches on such a device, with the plain backends unless the case selects others."""
        if (self.needs_float8 and not facts.has_float8) or (self.needs_hopper and facts.capability != HOPPER):
            return []
        with override_backends(KernelBackends()), record_launches() as recorded:
            self.launch(facts)
        return recorded


def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Return a tensor with a shape and no memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def _rms_norm(size: int, *, heads: int | None = None, residual: bool = False, rows: bool = False) -> Case:
    shape = (NUM_TOKENS, size) if heads is None else (NUM_TOKENS, heads, size)

    def launch(_: DeviceFacts) -> object:
        return rms_norm_triton(
            empty(*shape),
            empty(size),
            1e-6,
            residual=empty(*shape) if residual else None,
            rows=empty(32, dtype=torch.int64) if rows else None,
        )

    parts = [f"{heads}x{size}" if heads else str(size), *["residual"] * residual, *["rows"] * rows]
    return Case("rms_norm " + " ".join(parts), launch, in_sample=size == 4096 and residual)


def _elementwise() -> Iterator[Case]:
    for size in (576, 1024, 2048, 4096, 5120, 7168, 8192, 16384):
        yield _rms_norm(size)
        yield _rms_norm(size, residual=True)
        yield _rms_norm(size, rows=True)
    yield _rms_norm(128, heads=32)
    yield _rms_norm(128, heads=8)
    for heads, size in ((12, 64), (40, 128), (24, 96), (16, 256)):
        yield Case(
            f"rotary_embedding {heads}x{size}",
            lambda _, h=heads, s=size: rotary_embedding_triton(  # type: ignore[misc]
                empty(NUM_TOKENS, h, s), empty(NUM_TOKENS, s // 2, dtype=torch.complex64)
            ),
            in_sample=size == 128,
        )
    for size in (1536, 3072, 14336, 18432):
        yield Case(
            f"silu_and_mul {size}",
            lambda _, s=size: silu_and_mul_triton(empty(NUM_TOKENS, 2 * s)),  # type: ignore[misc]
            in_sample=size == 14336,
        )


def _cache() -> Iterator[Case]:
    for heads, size in ((3, 64), (8, 128), (32, 128), (4, 256)):
        for dtype in (BF16, FLOAT8, *[torch.float8_e5m2] * ((heads, size) == (8, 128))):
            yield Case(
                f"reshape_and_cache {heads}x{size} {str(dtype).removeprefix('torch.')}",
                lambda _, h=heads, s=size, d=dtype: reshape_and_cache_triton(  # type: ignore[misc]
                    empty(NUM_TOKENS, h, s),
                    empty(NUM_TOKENS, h, s),
                    empty(1024, 16, h, s, dtype=d),
                    empty(1024, 16, h, s, dtype=d),
                    empty(NUM_TOKENS, dtype=torch.int64),
                ),
                needs_float8=dtype == FLOAT8,
                in_sample=(heads, size) == (8, 128),
            )
    for shape in HEADS:
        if shape.block_size == 16 and shape.sees_all and shape.soft_cap is None:
            yield from _rope_and_cache(shape)
    yield Case(
        "copy_blocks 16x8x128",
        lambda _: copy_blocks_triton(
            empty(64, 1024, 16 * 8 * 128), empty(64, 1024, 16 * 8 * 128), empty(5, 2, dtype=torch.int64)
        ),
        in_sample=True,
    )


@dataclass(frozen=True, slots=True)
class Heads:
    """Shapes of a model's attention, and its score modifications."""

    num_heads: int
    num_kv_heads: int
    size: int
    block_size: int = 16
    window: int | None = None
    soft_cap: float | None = None
    cache_dtype: torch.dtype = BF16
    chunk_size: int | None = None
    has_sinks: bool = False

    @property
    def sees_all(self) -> bool:
        return self.window is None and self.chunk_size is None

    def options(self, num_seqs: int) -> dict[str, Any]:
        """Return the attention options in addition to the tensors."""
        gone = None if self.chunk_size is None else empty(num_seqs, dtype=torch.int32)
        sinks = empty(self.num_heads, dtype=torch.float32) if self.has_sinks else None
        attention_window = {"window": self.window, "chunk_size": self.chunk_size, "gone": gone}
        return {"scale": 0.1, "soft_cap": self.soft_cap, "sinks": sinks, **attention_window}

    @property
    def name(self) -> str:
        parts = [f"{self.num_heads}/{self.num_kv_heads}x{self.size} block {self.block_size}"]
        parts += [f"window {self.window}"] * (self.window is not None)
        parts += [f"chunks {self.chunk_size}"] * (self.chunk_size is not None)
        parts += ["sinks"] * self.has_sinks
        parts += ["soft cap"] * (self.soft_cap is not None)
        parts += ["float8"] * (self.cache_dtype == FLOAT8)
        parts += ["float8_e5m2"] * (self.cache_dtype == torch.float8_e5m2)
        return " ".join(parts)


HEADS = (
    Heads(9, 3, 64),  # SmolLM2-135M
    Heads(32, 8, 128),  # Llama-3.1-8B, Qwen3-8B
    Heads(32, 8, 128, block_size=8),
    Heads(32, 8, 128, block_size=32),
    Heads(32, 8, 128, block_size=128),
    Heads(32, 8, 128, cache_dtype=FLOAT8),
    Heads(32, 8, 128, block_size=32, cache_dtype=FLOAT8),
    Heads(32, 8, 128, cache_dtype=torch.float8_e5m2),
    Heads(32, 1, 128, cache_dtype=FLOAT8),
    Heads(64, 1, 128, cache_dtype=FLOAT8),
    Heads(4, 2, 16, cache_dtype=FLOAT8),
    Heads(32, 8, 128, window=4096),  # Mistral
    Heads(16, 8, 128),  # Qwen3-0.6B
    Heads(32, 4, 128),  # Qwen3-30B-A3B
    Heads(32, 32, 128),  # Llama-2-7B: one query head per kv head
    Heads(64, 1, 128),  # one kv head for all
    Heads(32, 32, 80),
    Heads(32, 8, 96),
    Heads(16, 8, 192),
    Heads(16, 8, 256, window=4096, soft_cap=50.0),  # Gemma-2-9B
    Heads(8, 4, 256, soft_cap=50.0),
    Heads(32, 16, 128, window=1024),  # Gemma-3-27B
    Heads(64, 8, 64, has_sinks=True),  # gpt-oss
    Heads(64, 8, 64, window=128, has_sinks=True),
    Heads(40, 8, 128, chunk_size=8192),  # Llama-4-Scout
)


GLUON_HEADS = (
    *(heads for heads in HEADS if heads.size in (64, 128) and heads.cache_dtype == BF16 and heads.block_size > 8),
    Heads(16, 8, 256, window=1024),  # Gemma-3-12B
)


def _rope_and_cache(heads: Heads) -> Iterator[Case]:
    for has_norms in (False, True):

        def launch(_: DeviceFacts, has_norms: bool = has_norms) -> object:
            cache = empty(1024, 16, heads.num_kv_heads, heads.size, dtype=heads.cache_dtype)
            return rope_and_cache_triton(
                empty(NUM_TOKENS, (heads.num_heads + 2 * heads.num_kv_heads) * heads.size),
                empty(NUM_TOKENS, heads.size // 2, dtype=torch.complex64),
                cache,
                cache,
                empty(NUM_TOKENS, dtype=torch.int64),
                norms=Norms(empty(heads.size), empty(heads.size), 1e-6) if has_norms else None,
            )

        name = f"rope_and_cache {heads.name}" + " norms" * has_norms
        is_sampled = heads == HEADS[1]
        yield Case(name, launch, needs_float8=heads.cache_dtype == FLOAT8, in_sample=is_sampled)


def _attention() -> Iterator[Case]:
    for heads in HEADS:
        is_sampled = heads == HEADS[1]
        yield _decode(heads, in_sample=is_sampled)
        for max_query_len in (8192, 4):
            yield _prefill(heads, max_query_len, in_sample=is_sampled and max_query_len > 4)
    for heads in GLUON_HEADS:
        yield _gluon_prefill(heads, in_sample=heads == HEADS[1])


def _decode(heads: Heads, *, in_sample: bool) -> Case:
    def launch(facts: DeviceFacts) -> object:
        cache = empty(64, heads.block_size, heads.num_kv_heads, heads.size, dtype=heads.cache_dtype)
        return paged_decode_triton(
            empty(NUM_TOKENS, heads.num_heads, heads.size),
            cache,
            cache,
            empty(NUM_TOKENS, 512, dtype=torch.int32),
            empty(NUM_TOKENS, dtype=torch.int32),
            facts=facts,
            **heads.options(NUM_TOKENS),
        )

    return Case(f"paged_decode {heads.name}", launch, needs_float8=heads.cache_dtype == FLOAT8, in_sample=in_sample)


def _prefill(heads: Heads, max_query_len: int, *, in_sample: bool) -> Case:
    def launch(facts: DeviceFacts) -> object:
        cache = empty(64, heads.block_size, heads.num_kv_heads, heads.size, dtype=heads.cache_dtype)
        return paged_prefill_triton(
            empty(2048, heads.num_heads, heads.size),
            cache,
            cache,
            empty(2, 512, dtype=torch.int32),
            empty(2, dtype=torch.int32),
            empty(3, dtype=torch.int32),
            max_query_len=max_query_len,
            facts=facts,
            **heads.options(2),
        )

    name = f"paged_prefill {heads.name}, chunks of {max_query_len}"
    return Case(name, launch, needs_float8=heads.cache_dtype == FLOAT8, in_sample=in_sample)


def _gluon_prefill(heads: Heads, *, in_sample: bool) -> Case:
    def launch(_: DeviceFacts) -> object:
        cache = empty(64, heads.block_size, heads.num_kv_heads, heads.size)
        return paged_prefill_gluon(
            empty(2048, heads.num_heads, heads.size),
            cache,
            cache,
            empty(2, 512, dtype=torch.int32),
            empty(2, dtype=torch.int32),
            empty(3, dtype=torch.int32),
            scale=0.1,
            window=heads.window,
        )

    return Case(f"paged_prefill_gluon {heads.name}", launch, needs_hopper=True, in_sample=in_sample)


def _latents() -> Iterator[Case]:
    """Yield DeepSeek-V3's heads on one GPU, on four and on eight: each has its own tile height."""
    for heads, query_len, dtype in (
        (128, 1, BF16), (32, 1, BF16), (16, 1, BF16), (16, 2, BF16), (128, 1, FLOAT8), (16, 1, FLOAT8),
    ):  # fmt: skip
        yield _latent_decode(heads, query_len, dtype)
    for heads in (128, 16):
        yield _latent_decode(heads, 1, BF16, separate_merge=True)
    for heads, max_query_len, dtype in ((128, 8192, BF16), (16, 8192, BF16), (16, 1, BF16), (128, 8192, FLOAT8)):
        yield _latent_prefill(heads, max_query_len, dtype)
    for heads, dtype in ((128, BF16), (16, BF16), (128, FLOAT8)):
        yield _latent_and_cache(heads, dtype)


def _latent_and_cache(heads: int, dtype: torch.dtype) -> Case:
    def launch(_: DeviceFacts) -> object:
        return latent_and_cache_triton(
            empty(NUM_TOKENS, heads, 576),
            empty(NUM_TOKENS, heads, 192)[:, :, 128:],
            empty(NUM_TOKENS, 576),
            empty(512),
            1e-6,
            empty(NUM_TOKENS, 32, dtype=torch.complex64),
            empty(1024, 16, 1, 576, dtype=dtype),
            empty(NUM_TOKENS, dtype=torch.int64),
        )

    name = f"latent_and_cache {heads} heads" + " float8" * (dtype == FLOAT8)
    return Case(name, launch, needs_float8=dtype == FLOAT8, in_sample=heads == 16)


def _latent_decode(heads: int, query_len: int, dtype: torch.dtype, *, separate_merge: bool = False) -> Case:
    def launch(facts: DeviceFacts) -> object:
        return latent_decode_triton(
            empty(NUM_TOKENS * query_len, heads, 576),
            empty(64, 16, 1, 576, dtype=dtype),
            empty(NUM_TOKENS, 512, dtype=torch.int32),
            empty(NUM_TOKENS, dtype=torch.int32),
            query_len=query_len,
            kv_rank=512,
            scale=0.1,
            facts=facts,
            separate_merge=separate_merge,
        )

    name = f"latent_decode {heads} heads" + " float8" * (dtype == FLOAT8) + f", {query_len} tokens" * (query_len > 1)
    is_sampled = heads == 16 and query_len == 1 and dtype == BF16
    return Case(name + ", separate merge" * separate_merge, launch, needs_float8=dtype == FLOAT8, in_sample=is_sampled)


def _latent_prefill(heads: int, max_query_len: int, dtype: torch.dtype) -> Case:
    def launch(facts: DeviceFacts) -> object:
        return latent_prefill_triton(
            empty(2048, heads, 576),
            empty(64, 16, 1, 576, dtype=dtype),
            empty(2, 512, dtype=torch.int32),
            empty(2, dtype=torch.int32),
            empty(3, dtype=torch.int32),
            max_query_len=max_query_len,
            kv_rank=512,
            scale=0.1,
            facts=facts,
        )

    name = f"latent_prefill {heads} heads" + " float8" * (dtype == FLOAT8) + f", chunks of {max_query_len}"
    return Case(name, launch, needs_float8=dtype == FLOAT8, in_sample=heads == 128 and dtype == BF16)


def _sampling() -> Iterator[Case]:
    def draw(facts: DeviceFacts, dtype: torch.dtype) -> object:
        ints, floats = _eight()
        seeds = empty(8, dtype=torch.int64)
        return sample_triton(empty(8, 128256, dtype=dtype), floats, ints, floats, floats, seeds, facts=facts)

    def choose(facts: DeviceFacts, dtype: torch.dtype) -> object:
        return argmax_triton(empty(8, 128256, dtype=dtype), facts=facts)

    def edit(_: DeviceFacts) -> None:
        table, ints, floats = (empty(256, 128256, dtype=torch.int32), *_eight())
        edit_logits_triton(empty(8, 128256, dtype=torch.float32), table, ints, ints, ints, floats, floats, floats)

    def ban(_: DeviceFacts) -> None:
        ints, last_tokens = _eight()[0], empty(8, dtype=torch.int64)
        ban_tokens_triton(empty(8, 128256, dtype=torch.float32), ints, ints, ints, ints, last_tokens)

    for dtype in (BF16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        yield Case(f"argmax {name}", lambda facts, d=dtype: choose(facts, d), in_sample=True)  # type: ignore[misc]
        yield Case(f"sample {name}", lambda facts, d=dtype: draw(facts, d), in_sample=True)  # type: ignore[misc]
    yield Case("edit_logits", edit, in_sample=True)
    yield Case("ban_tokens", ban, in_sample=True)


def _eight() -> tuple[torch.Tensor, torch.Tensor]:
    """Return values of eight rows: int32, float32."""
    return empty(8, dtype=torch.int32), empty(8, dtype=torch.float32)


def _skinny_gemm() -> Iterator[Case]:
    for n, k, variant in (
        (6144, 4096, "norm"), (4096, 4096, "residual"), (14336, 4096, "gate"), (4096, 14336, "residual"),
        (960, 576, "norm"), (576, 576, "residual"), (1536, 576, "gate"), (576, 1536, "residual"),
    ):  # fmt: skip
        yield _skinny_gemm_case(n, k, variant)


def _skinny_gemm_case(n: int, k: int, variant: str) -> Case:
    """Return a case of a GEMM of Llama-3.1-8B or SmolLM2-135M with its prologue or epilogue."""
    is_gated = variant == "gate"

    def launch(facts: DeviceFacts) -> object:
        return skinny_gemm_triton(
            empty(16, k),
            empty(2 * n if is_gated else n, k),
            norm=None if variant == "residual" else empty(k),
            is_gated=is_gated,
            residual=empty(16, n) if variant == "residual" else None,
            facts=facts,
        )

    return Case(f"skinny_gemm {n}x{k} {variant}", launch, in_sample=k == 4096)


def _lora() -> Iterator[Case]:
    for n, k in ((6144, 4096), (4096, 14336)):  # of Llama-3.1-8B: q, k and v together, and down
        for rank in (16, 64) if k == 14336 else (48, 192):
            for rows in (16, 4096):
                yield _lora_case(n, k, rank, rows)


def _lora_case(n: int, k: int, rank: int, rows: int) -> Case:
    """Return a case with four adapters."""

    def launch(facts: DeviceFacts) -> object:
        y, x, slots = empty(rows, n), empty(rows, k), empty(rows, dtype=torch.int32)
        return lora_triton(y, x, empty(4, rank, k), empty(4, n, rank), slots, facts=facts)

    return Case(f"lora {n}x{k} rank {rank}, {rows} rows", launch, in_sample=rank == 16)


def _block_fp8() -> Iterator[Case]:
    for size in (4096, 7168, 14336):
        yield Case(
            f"quantize_groups {size}",
            lambda _, s=size: quantize_groups_triton(empty(NUM_TOKENS, s)),  # type: ignore[misc]
            needs_float8=True,
            in_sample=size == 4096,
        )
    for n, k in GEMM_SHAPES:
        for m in (1, 64, 4096):
            yield _gemm(m, n, k)
    for n, k in ((4096, 4096), (2112, 7168)):
        yield _gluon_gemm(n, k)


def _gluon_gemm(n: int, k: int) -> Case:
    def launch(facts: DeviceFacts) -> object:
        return w8a8_block_fp8_gluon(
            empty(4096, k, dtype=FLOAT8),
            empty(4096, k // 128, dtype=torch.float32),
            empty(n, k, dtype=FLOAT8),
            empty(-(-n // 128), k // 128, dtype=torch.float32),
            BF16,
            facts=facts,
        )

    return Case(f"w8a8_block_fp8_gluon {n}x{k}", launch, needs_hopper=True, in_sample=n == k)


def _gemm(m: int, n: int, k: int) -> Case:
    def launch(facts: DeviceFacts) -> object:
        return w8a8_block_fp8_triton(
            empty(m, k, dtype=FLOAT8),
            empty(m, k // 128, dtype=torch.float32),
            empty(n, k, dtype=FLOAT8),
            empty(-(-n // 128), k // 128, dtype=torch.float32),
            BF16,
            config=default_config(m, n, k, facts),
            facts=facts,
        )

    name = f"w8a8_block_fp8 {n}x{k}, {m} tokens"
    return Case(name, launch, needs_float8=True, in_sample=(n, k) == (4096, 4096) and m != 64)


@dataclass(frozen=True, slots=True)
class MoeShape:
    """Shapes of a model's experts on one GPU."""

    name: str
    num_experts: int
    top_k: int
    hidden: int
    wide: int
    dtype: torch.dtype
    has_biases: bool = False
    clamps: tuple[float, float] | None = None
    sigmoid: SigmoidRouting | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Return the additional options of a model."""
        e, h, w = self.num_experts, self.hidden, self.wide
        biases = {"w13_bias": empty(e, 2 * w), "w2_bias": empty(e, h)} if self.has_biases else {}
        return {"clamps": self.clamps, "sigmoid": self.sigmoid, **biases}


DEEPSEEK_ROUTING = SigmoidRouting(bias=empty(256, dtype=torch.float32), num_groups=8, num_top_groups=4, factor=2.5)
MOE_SHAPES = (
    MoeShape("Qwen3-30B-A3B", 128, 8, 2048, 768, BF16),
    MoeShape("Qwen3-30B-A3B float8", 128, 8, 2048, 768, FLOAT8),
    MoeShape("DeepSeek-V3 of 8", 32, 8, 7168, 2048, FLOAT8),  # 256 experts on 8 ranks
    MoeShape("gpt-oss-20b", 32, 4, 2880, 2880, BF16, has_biases=True, clamps=(1.702, 7.0)),
    MoeShape("Llama-4-Scout of 2", 16, 1, 5120, 4096, BF16, sigmoid=SigmoidRouting(weighs_inputs=True)),  # by columns
)


def _moe_case(moe: MoeShape, num_tokens: int) -> Case:
    e, h, w = moe.num_experts, moe.hidden, moe.wide

    def scales(n: int, k: int) -> torch.Tensor | None:
        return empty(e, n // 128, k // 128, dtype=torch.float32) if moe.dtype == FLOAT8 else None

    def launch(facts: DeviceFacts) -> object:
        return fused_moe_triton(
            empty(num_tokens, h),
            empty(num_tokens, e),
            empty(e, 2 * w, h, dtype=moe.dtype),
            empty(e, h, w, dtype=moe.dtype),
            moe.top_k,
            True,
            w13_scales=scales(2 * w, h),
            w2_scales=scales(h, w),
            config=default_moe_config(num_tokens, moe.top_k, e, moe.dtype.itemsize, facts),
            facts=facts,
            **moe.options,
        )

    is_float8 = moe.dtype == FLOAT8
    name = f"fused_moe {moe.name}, {num_tokens} tokens"
    in_sample = (num_tokens == 4096 and moe.hidden == 2048) or (num_tokens == 1 and moe.sigmoid is not None)
    return Case(name, launch, needs_float8=is_float8, in_sample=in_sample)


def _moe_cases() -> Iterator[Case]:
    for moe in MOE_SHAPES:
        for num_tokens in (1, 256, 4096):
            yield _moe_case(moe, num_tokens)
    yield Case("route_by_sigmoid 8 of 256 in 4 of 8 groups", _route_in_groups)  # DeepSeek-V3


def _route_in_groups(_: DeviceFacts) -> object:
    return route_by_sigmoid_triton(empty(NUM_TOKENS, 256), 8, True, DEEPSEEK_ROUTING)


def _dependent() -> Iterator[Case]:
    """Yield a layer's kernels with dependent launches."""
    llama = HEADS[1]
    products = [case for case in _skinny_gemm() if "4096" in case.name]
    ready = next(case for case in _rope_and_cache(llama))
    for case in (*products, ready, _decode(llama, in_sample=False)):

        def launch(facts: DeviceFacts, case: Case = case) -> None:
            with override_backends(KernelBackends(dependent_launches=True)):
                case.launch(facts)

        kernel, what = case.name.split(" ", 1)
        yield Case(f"{kernel} dependent, {what}", launch, needs_hopper=True)


def all_cases() -> list[Case]:
    """Return every case, in the order of the report."""
    return [
        *_attention(),
        *_latents(),
        *_cache(),
        *_elementwise(),
        *_sampling(),
        *_skinny_gemm(),
        *_lora(),
        *_dependent(),
        *_block_fp8(),
        *_moe_cases(),
    ]

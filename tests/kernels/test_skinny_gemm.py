"""skinny_gemm in the interpreter: small-M GEMMs with a norm, gate or residual, for any split of k."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from trimtab_kernels.launch.arrivals import arrival_counters
from trimtab_kernels.launch.device_facts import H200, L40, DeviceFacts
from trimtab_kernels.skinny_gemm import (
    GATED,
    MAX_ROWS,
    MIN_SLICE,
    NORMED,
    PLAIN,
    TILING,
    Tiling,
    skinny_gemm_reference,
    skinny_gemm_triton,
    split_of,
    tiling_of,
)

ONE_MULTIPROCESSOR = replace(H200, num_sms=1)
SHAPES = [(96, 64), (40, 1200), (200, 2 * MIN_SLICE), (33, 2 * MIN_SLICE + 1)]
"""(n, k): one tile and one slice; partially filled tiles and columns; several of both; odd numbers."""


def inputs(rows: int, n: int, k: int, dtype: torch.dtype = torch.float32, *, is_gated: bool = False) -> Any:
    generator = torch.Generator().manual_seed(n + k)
    x = torch.randn(rows, k + 8, generator=generator)[:, :k]
    weight = torch.randn(2 * n if is_gated else n, k, generator=generator) / k**0.5
    norm, bias = torch.rand(k, generator=generator) + 0.5, torch.randn(weight.shape[0], generator=generator)
    residual = torch.randn(rows, n, generator=generator)
    return [tensor.to(dtype) for tensor in (x, weight, norm, bias, residual)]


@pytest.mark.parametrize("facts", [H200, ONE_MULTIPROCESSOR])
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("rows", [1, 2, MAX_ROWS - 1, MAX_ROWS])
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("has_norm", [False, True])
def test_skinny_gemm_applies_norm_bias_and_gate(
    facts: DeviceFacts, n: int, k: int, rows: int, is_gated: bool, has_norm: bool
) -> None:
    x, weight, norm, bias, _ = inputs(rows, n, k, is_gated=is_gated)
    options: dict[str, Any] = {
        "norm": norm * 3 if has_norm else None,
        "bias": bias,
        "is_gated": is_gated,
        "eps": 1e-5,
    }
    y = skinny_gemm_triton(x, weight, **options, facts=facts)
    torch.testing.assert_close(y, skinny_gemm_reference(x, weight, **options), atol=2e-5, rtol=2e-5)
    tiling = tiling_of(has_norm=has_norm, is_gated=is_gated, facts=facts)
    tiles = split_of(n, k, is_gated=is_gated, facts=facts, tiling=tiling).tiles
    assert not arrival_counters(x.device, tiles).any(), "the next launch counts from 0"


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_skinny_gemm_adds_to_residual_in_place(n: int, k: int, has_bias: bool) -> None:
    x, weight, _, bias, residual = inputs(3, n, k)
    before = residual.clone()
    options: dict[str, Any] = {"bias": bias if has_bias else None}
    assert skinny_gemm_triton(x, weight, **options, residual=residual) is residual
    torch.testing.assert_close(residual, before + skinny_gemm_reference(x, weight, **options), atol=2e-5, rtol=2e-5)


def test_skinny_gemm_normalises_large_16_bit_inputs_after_gemm() -> None:
    x, weight, norm, _, _ = inputs(4, 96, 1200, torch.float16)
    x *= 300
    y = skinny_gemm_triton(x, weight, norm=norm)
    torch.testing.assert_close(y.float(), skinny_gemm_reference(x, weight, norm=norm), atol=5e-3, rtol=5e-3)


def test_skinny_gemm_is_deterministic_and_rows_are_independent() -> None:
    x, weight, norm, _, _ = inputs(7, 200, 2 * MIN_SLICE)
    whole = skinny_gemm_triton(x, weight, norm=norm)
    assert torch.equal(skinny_gemm_triton(x, weight, norm=norm), whole)
    assert torch.equal(skinny_gemm_triton(x[2:5], weight, norm=norm), whole[2:5])


@pytest.mark.parametrize("facts", [H200, ONE_MULTIPROCESSOR])
@pytest.mark.parametrize(
    ("n", "k", "tiling"),
    [(6144, 4096, NORMED), (4096, 4096, PLAIN), (14336, 4096, GATED), (4096, 14336, PLAIN), (1, 8, TILING)],
)
def test_slices_cover_k_and_fill_device(n: int, k: int, tiling: Tiling, facts: DeviceFacts) -> None:
    split = split_of(n, k, is_gated=tiling is GATED, facts=facts, tiling=tiling)
    assert (split.slices - 1) * split.slice_columns < k <= split.slices * split.slice_columns
    assert split.tiles * split.outputs >= n
    assert split.slices == 1 or split.slice_columns >= MIN_SLICE
    if n > 1:
        programs, at_once = split.tiles * split.slices, tiling.ctas_per_sm * facts.num_sms
        assert programs / (-(-programs // at_once) * at_once) > 0.7, "most CTAs of the last wave have work"


def test_small_shared_memory_uses_smaller_tiles() -> None:
    for has_norm, is_gated in ((False, False), (True, False), (True, True)):
        for facts in (L40, H200):
            tiling = tiling_of(has_norm=has_norm, is_gated=is_gated, facts=facts)
            in_flight = tiling.stages * 2 * tiling.columns * (tiling.rows + MAX_ROWS)
            assert tiling.ctas_per_sm * in_flight <= 232_448 or tiling is TILING
            assert in_flight <= facts.shared_bytes


def test_skinny_gemm_rejects_wrong_shapes() -> None:
    x, weight, norm, bias, residual = inputs(3, 96, 64)
    for wrong in (
        {"norm": norm[1:]},
        {"bias": bias[1:]},
        {"x": torch.zeros(MAX_ROWS + 1, 64)},
        {"weight": weight.half()},
        {"weight": weight[:, :-8]},
        {"residual": residual[:2]},
    ):
        with pytest.raises(ValueError, match="skinny_gemm"):
            skinny_gemm_triton(**({"x": x, "weight": weight} | wrong))
    assert skinny_gemm_triton(x[:0], weight).shape == (0, 96)

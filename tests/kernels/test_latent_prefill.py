"""latent_prefill against float32 attention of one sequence at a time. Triton's interpreter multiplies float16 and
float32 but not bfloat16; the ahead-of-time cases compile bfloat16.
"""

import pytest
import torch
from trimtab_kernels.latent_prefill import latent_prefill_reference, latent_prefill_triton, latent_tile
from trimtab_kernels.launch.device_facts import A100, B200, H200, L40, DeviceFacts

Spans = list[tuple[int, int]]
MIXED: Spans = [(0, 37), (20, 1), (0, 1), (150, 9), (3, 70), (63, 2)]
"""(tokens before, tokens now)"""
FLOAT8 = torch.float8_e4m3fn


def check(
    spans: Spans = MIXED,
    *,
    heads: int = 4,
    kv_rank: int = 24,
    rotary: int = 8,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    cache_scale: float = 1.0,
    max_query_len: int | None = None,
) -> None:
    """Compare with the reference. Every sequence's blocks are shuffled, slots beyond its length contain NaN, and the
    query has a token stride.
    """
    generator = torch.Generator().manual_seed(5)
    lengths = [before + now for before, now in spans]
    counts = [-(-length // block_size) for length in lengths]
    order = (torch.randperm(sum(counts), generator=generator) + 1).to(torch.int32)
    tables = torch.zeros(len(spans), max(counts) + 2, dtype=torch.int32)
    width = kv_rank + rotary
    cache = torch.randn(sum(counts) + 1, block_size, 1, width, generator=generator)
    for row, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        first = sum(counts[:row])
        tables[row, :count] = order[first : first + count]
        if length % block_size:
            cache[int(tables[row, count - 1]), length % block_size :] = float("nan")
    starts = torch.tensor([sum(now for _, now in spans[:n]) for n in range(len(spans) + 1)], dtype=torch.int32)
    query = torch.randn(int(starts[-1]), heads + 1, width, generator=generator).to(dtype)[:, :heads]
    tensors = (query, cache.to(cache_dtype or dtype), tables, torch.tensor(lengths, dtype=torch.int32), starts)
    options = {"kv_rank": kv_rank, "scale": width**-0.5, "cache_scale": cache_scale}
    longest = max_query_len or max(now for _, now in spans)
    ours = latent_prefill_triton(*tensors, max_query_len=longest, **options)
    expected = latent_prefill_reference(*tensors, **options)
    tolerance = (64 if dtype == torch.float32 else 16) * torch.finfo(dtype).eps  # float32 is three TF32 on a GPU
    torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("heads", [1, 3, 16, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_latent_prefill_rows_span_tokens_and_heads(heads: int, dtype: torch.dtype) -> None:
    check(heads=heads, dtype=dtype)


@pytest.mark.parametrize("block_size", [8, 16, 32, 128])
def test_latent_prefill_every_block_size(block_size: int) -> None:
    check(block_size=block_size, dtype=torch.float16)


@pytest.mark.parametrize(("kv_rank", "rotary"), [(512, 64), (10, 6), (48, 16), (64, 24)])
def test_latent_prefill_widths_with_and_without_padding(kv_rank: int, rotary: int) -> None:
    check([(0, 19), (40, 3), (9, 1)], kv_rank=kv_rank, rotary=rotary, dtype=torch.float16)


@pytest.mark.parametrize("longest", [1, 3, 7, 100])
def test_latent_prefill_result_does_not_depend_on_tile(longest: int) -> None:
    check(max_query_len=longest, dtype=torch.float16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_latent_prefill_float8_cache_uses_scale(dtype: torch.dtype) -> None:
    check(dtype=dtype, cache_dtype=FLOAT8, cache_scale=0.5)


def test_latent_prefill_skips_sequence_without_rows() -> None:
    check([(0, 3), (7, 0), (8, 5), (33, 0)])


def test_latent_prefill_zero_lengths_read_and_write_nothing() -> None:
    """Lengths are 0 at start-up, before the cache is mapped."""
    cache = torch.full((1, 8, 1, 32), float("nan"))
    zeros = torch.zeros(1, dtype=torch.int32)
    starts = torch.zeros(2, dtype=torch.int32)
    options = {"max_query_len": 1, "kv_rank": 24, "scale": 1.0}
    y = latent_prefill_triton(torch.ones(1, 4, 32), cache, zeros[None], zeros, starts, **options)  # type: ignore[arg-type]
    assert y.shape == (1, 4, 24)


@pytest.mark.parametrize(
    ("shape", "kv_rank", "width"), [((2, 8, 2, 32), 24, 32), ((2, 8, 1, 40), 24, 32), ((2, 8, 1, 32), 32, 32)]
)
def test_latent_prefill_rejects_mismatched_inputs(shape: tuple[int, ...], kv_rank: int, width: int) -> None:
    zeros, starts = torch.zeros(1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"latent_prefill: query .* do not fit the cache"):
        latent_prefill_triton(
            torch.zeros(1, 4, width), torch.zeros(shape), zeros[None], zeros, starts,
            max_query_len=1, kv_rank=kv_rank, scale=1.0,
        )  # fmt: skip


@pytest.mark.cpu
def test_latent_prefill_rejects_unaligned_rows_on_gpu() -> None:
    query, cache = (torch.empty(shape, dtype=torch.float16, device="meta") for shape in ((1, 4, 84), (2, 8, 1, 84)))
    numbers = torch.empty(1, 1, dtype=torch.int32, device="meta")
    with pytest.raises(ValueError, match=r"latent_prefill: a token's 84 elements take 168 bytes .* a multiple of 16"):
        latent_prefill_triton(query, cache, numbers, numbers[0], numbers[0], max_query_len=1, kv_rank=64, scale=1.0)


@pytest.mark.parametrize(
    ("facts", "few", "many"),
    [(A100, (16, 32), (32, 32)), (L40, (16, 32), (32, 32)), (H200, (16, 32), (64, 64)), (B200, (16, 32), (32, 64))],
)
def test_latent_tiles_are_as_tall_as_device_allows(
    facts: DeviceFacts, few: tuple[int, int], many: tuple[int, int]
) -> None:
    """Ahead-of-time compilation checks that they fit."""
    for num_rows, expected in ((1, few), (16, few), (128, many), (1 << 20, many)):
        tile = latent_tile(num_rows, 576, 2, 2, facts)
        assert (tile.rows, tile.keys) == expected
    assert latent_tile(32, 576, 2, 2, facts).rows == 32
    assert latent_tile(1 << 20, 576, 2, 1, facts).rows == 16, "with a float8 cache"


def test_latent_tile_rejects_oversized_float32() -> None:
    assert latent_tile(128, 576, 4, 4, H200).rows == 16
    assert latent_tile(128, 32, 4, 4, L40).rows == 16
    with pytest.raises(ValueError, match=r"latent vectors of 576 in float32 takes 108 KiB .* has 99 KiB; use bfloat16"):
        latent_tile(128, 576, 4, 4, L40)

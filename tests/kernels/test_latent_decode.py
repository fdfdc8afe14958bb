"""latent_decode against float32 attention of one sequence at a time: whole and split sequences, one token and
several.
"""

import pytest
import torch
from kernel_benchmarks.aot.bounds import ctas_per_sm
from trimtab_kernels.latent_decode import has_separate_merge, latent_ctas, latent_decode_reference, latent_decode_triton
from trimtab_kernels.latent_prefill import latent_tile
from trimtab_kernels.launch.arrivals import arrival_counters
from trimtab_kernels.launch.device_facts import A100, B200, H200, L40, DeviceFacts
from trimtab_kernels.launch.jit import record_launches

LENGTHS = [1, 65, 1100, 0, 33]
"""With several CTAs, the long sequence is split, and short ones share CTAs with its splits."""
FLOAT8 = torch.float8_e4m3fn


def check(
    *,
    lengths: list[int] = LENGTHS,
    query_len: int = 1,
    heads: int = 4,
    kv_rank: int = 24,
    rotary: int = 8,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    cache_scale: float = 1.0,
    ctas: int = 1,
) -> None:
    """Compare with the reference. Every sequence's blocks are shuffled; slots beyond its length contain NaN."""
    generator = torch.Generator().manual_seed(5)
    counts = [-(-length // block_size) for length in lengths]
    order = (torch.randperm(sum(counts), generator=generator) + 1).to(torch.int32)
    tables = torch.zeros(len(lengths), max(1, *counts), dtype=torch.int32)
    width = kv_rank + rotary
    cache = torch.randn(sum(counts) + 1, block_size, 1, width, generator=generator)
    for row, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        first = sum(counts[:row])
        tables[row, :count] = order[first : first + count]
        if length % block_size:
            cache[int(tables[row, count - 1]), length % block_size :] = float("nan")
    query = torch.randn(len(lengths) * query_len, heads + 1, width, generator=generator).to(dtype)[:, :heads]
    tensors = (query, cache.to(cache_dtype or dtype), tables, torch.tensor(lengths, dtype=torch.int32))
    options = {"query_len": query_len, "kv_rank": kv_rank, "scale": width**-0.5, "cache_scale": cache_scale}
    expected = latent_decode_reference(*tensors, **options)
    tolerance = (64 if dtype == torch.float32 else 16) * torch.finfo(dtype).eps  # float32 is three TF32 on a GPU
    for separate_merge in (False, True):
        ours = latent_decode_triton(*tensors, ctas=ctas, separate_merge=separate_merge, **options)
        torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)
    tile = latent_tile(query_len * heads, width, query.element_size(), (cache_dtype or dtype).itemsize, H200)
    groups = -(-query_len * heads // tile.rows)
    if query.device.type == "cpu":
        assert not arrival_counters(query.device, groups * ctas).any(), "the next launch counts from 0"


@pytest.mark.parametrize("ctas", [1, 4])
@pytest.mark.parametrize("heads", [1, 16, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_latent_decode_all_heads_read_one_vector(heads: int, ctas: int, dtype: torch.dtype) -> None:
    """Heads beyond a tile's rows form row groups; in float32, groups of 16."""
    check(heads=heads, ctas=ctas, dtype=dtype)


@pytest.mark.parametrize("ctas", [1, 5])
@pytest.mark.parametrize(("query_len", "heads"), [(2, 4), (3, 8), (8, 3), (5, 16)])
def test_latent_decode_drafts_see_tokens_up_to_their_own(query_len: int, heads: int, ctas: int) -> None:
    check(lengths=[8, 65, 1100, 33, 514], query_len=query_len, heads=heads, ctas=ctas, dtype=torch.float16)


def test_split_without_visible_keys_of_a_row_has_no_weight() -> None:
    """The last tile of the second CTA contains only the newest key, which the older of two rows does not see."""
    check(lengths=[1025], query_len=2, ctas=3, dtype=torch.float16)
    check(lengths=[513, 1026], query_len=3, ctas=2)


@pytest.mark.parametrize("ctas", [1, 3])
@pytest.mark.parametrize("block_size", [8, 16, 32, 128])
def test_latent_decode_every_block_size(block_size: int, ctas: int) -> None:
    check(block_size=block_size, ctas=ctas, dtype=torch.float16)


@pytest.mark.parametrize(("kv_rank", "rotary"), [(512, 64), (10, 6), (48, 16), (100, 20)])
def test_latent_decode_widths_with_and_without_padding(kv_rank: int, rotary: int) -> None:
    check(lengths=[1100, 3], kv_rank=kv_rank, rotary=rotary, dtype=torch.float16, ctas=2)


@pytest.mark.parametrize("ctas", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_latent_decode_float8_cache_uses_scale(dtype: torch.dtype, ctas: int) -> None:
    check(dtype=dtype, cache_dtype=FLOAT8, cache_scale=0.5, ctas=ctas)


@pytest.mark.parametrize("lengths", [[0], [0, 0, 0], [0, 1030, 0], [1030, 0, 0, 0]])
def test_latent_decode_padding_rows_are_zeros(lengths: list[int]) -> None:
    check(lengths=lengths, ctas=3)


def test_latent_decode_merges_many_splits_in_steps() -> None:
    check(lengths=[5500, 3, 7000], heads=3, ctas=99, dtype=torch.float16)


def test_latent_decode_partially_filled_tiles() -> None:
    check(lengths=[1300, 0, 2], kv_rank=200, rotary=20, ctas=5, dtype=torch.float16, query_len=2)


def test_latent_merge_writes_only_split_sequences() -> None:
    """Results that need no merge stay as the first launch wrote them."""
    generator = torch.Generator().manual_seed(8)
    tensors = (
        torch.randn(3, 4, 32, generator=generator),
        torch.randn(81, 16, 1, 32, generator=generator),
        (torch.arange(80, dtype=torch.int32) + 1).repeat(3, 1),
        torch.tensor([1280, 60, 0], dtype=torch.int32),
    )
    with record_launches() as launches:
        latent_decode_triton(*tensors, query_len=1, kv_rank=24, scale=0.2, ctas=6, separate_merge=True)
    first, second = launches
    first.kernel[first.grid](**first.arguments, **first.options)
    output = second.arguments["output"]
    output[1:] = 7.0
    second.kernel[second.grid](**second.arguments, **second.options)
    expected = latent_decode_reference(*tensors, query_len=1, kv_rank=24, scale=0.2)
    torch.testing.assert_close(output[:1], expected[:1], rtol=1e-5, atol=1e-5)
    assert (output[1:] == 7.0).all()


@pytest.mark.parametrize(
    ("num_seqs", "ctas", "expected"), [(1, 2, True), (1, 1, False), (8, 33, True), (17, 33, False)]
)
def test_separate_merge_is_used_for_several_ctas_per_sequence(num_seqs: int, ctas: int, expected: bool) -> None:
    assert has_separate_merge(num_seqs, ctas) is expected


@pytest.mark.parametrize("separate_merge", [False, True])
def test_single_grid_serves_all_lengths(separate_merge: bool) -> None:
    """Replays as a captured graph does: only the lengths on the device change. Equal inputs give equal outputs."""
    generator = torch.Generator().manual_seed(8)
    cache = torch.randn(129, 16, 1, 32, generator=generator)
    tables = (torch.arange(128, dtype=torch.int32) + 1).repeat(3, 1)
    query, output = torch.randn(3, 4, 32, generator=generator), torch.empty(3, 4, 24)
    for lengths in ([1, 0, 0], [2048, 2048, 2048], [5, 2000, 0], [0, 0, 0], [2048, 1, 1]):
        tensors = (query, cache, tables, torch.tensor(lengths, dtype=torch.int32))
        expected = latent_decode_reference(*tensors, query_len=1, kv_rank=24, scale=0.2)
        results = []
        for _ in range(2):
            output.fill_(float("nan"))
            latent_decode_triton(
                *tensors, query_len=1, kv_rank=24, scale=0.2, ctas=4, output=output, separate_merge=separate_merge
            )
            torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
            results.append(output.clone())
        assert results[0].equal(results[1])
    with record_launches() as launches:
        for _ in range(2):
            latent_decode_triton(
                *tensors, query_len=1, kv_rank=24, scale=0.2, ctas=4, output=output, separate_merge=separate_merge
            )
    assert len({launch.grid for launch in launches}) == 1 + separate_merge


def test_latent_decode_rejects_wrong_number_of_rows() -> None:
    zeros = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="latent_decode: 3 rows are not 2 of each of 2 sequences"):
        latent_decode_triton(
            torch.zeros(3, 4, 32), torch.zeros(2, 8, 1, 32), zeros[:, None], zeros, query_len=2, kv_rank=24, scale=1.0
        )


@pytest.mark.parametrize("facts", [A100, L40, H200, B200])
@pytest.mark.parametrize("num_rows", [8, 16, 32, 128, 1024])
def test_all_ctas_are_resident_at_once(facts: DeviceFacts, num_rows: int) -> None:
    """Checked with the registers and shared memory of compiled tiles."""
    tile = latent_tile(num_rows, 576, 2, 2, facts)
    groups = -(-num_rows // tile.rows)
    ctas = latent_ctas(groups, tile, facts)
    shared = {(16, 32): 56 << 10, (32, 32): 75 << 10, (32, 64): 113 << 10, (64, 64): 217 << 10}[tile.rows, tile.keys]
    room = min(ctas_per_sm(248 if tile.num_warps == 4 else 255, shared, tile.num_warps), facts.shared_bytes // shared)
    assert 0 < ctas * groups <= max(room * facts.num_sms, groups)

"""paged_decode against float32 attention of one sequence at a time: whole and split sequences."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_benchmarks.aot.bounds import ctas_per_sm
from kernel_benchmarks.aot.cases import HEADS, Heads
from trimtab_kernels.launch.arrivals import arrival_counters
from trimtab_kernels.launch.device_facts import A100, B200, H200, L40, DeviceFacts
from trimtab_kernels.launch.jit import record_launches
from trimtab_kernels.paged_decode import (
    MAX_SPLITS,
    decode_ctas,
    decode_tile,
    paged_decode_reference,
    paged_decode_triton,
)

FLOAT8 = torch.float8_e4m3fn
LLAMA = Heads(32, 8, 128)
LENGTHS = [1, 65, 700, 0, 33]
"""With several CTAs, the long sequences are split, and short ones share CTAs with their splits."""


def check(
    *,
    lengths: list[int] = LENGTHS,
    heads: int = 4,
    kv_heads: int = 2,
    size: int = 32,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    ctas: int = 1,
    scale: float = 0.25,
    **options: float | torch.Tensor | None,
) -> None:
    """Compare with the reference. Every sequence's blocks are shuffled; rows beyond its length contain NaN."""
    generator = torch.Generator().manual_seed(5)
    counts = [-(-length // block_size) for length in lengths]
    order = (torch.randperm(sum(counts), generator=generator) + 1).to(torch.int32)
    tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    shape = (sum(counts) + 1, block_size, kv_heads, size)
    caches = [torch.randn(shape, generator=generator) for _ in range(2)]
    for row, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        first = sum(counts[:row])
        tables[row, :count] = order[first : first + count]
        if length % block_size:
            for cache in caches:
                cache[int(tables[row, count - 1]), length % block_size :] = float("nan")
    keys, values = (cache.to(cache_dtype or dtype) for cache in caches)
    query = torch.randn(len(lengths), heads + 1, size, generator=generator).to(dtype)[:, :heads]
    tensors = (query, keys, values, tables, torch.tensor(lengths, dtype=torch.int32))
    ours = paged_decode_triton(*tensors, scale=scale, ctas=ctas, **options)  # type: ignore[arg-type]
    expected = paged_decode_reference(*tensors, scale=scale, **options)  # type: ignore[arg-type]
    tolerance = (64 if dtype == torch.float32 else 16) * torch.finfo(dtype).eps  # float32 is three TF32 on a GPU
    torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)
    assert not arrival_counters(query.device, kv_heads * ctas).any(), "the next launch counts from 0"


@pytest.mark.parametrize("ctas", [1, 5])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 4, 16), (9, 3, 64), (6, 1, 10), (24, 1, 32)])
def test_paged_decode_heads_share_kv_head(heads: int, kv_heads: int, size: int, ctas: int) -> None:
    check(heads=heads, kv_heads=kv_heads, size=size, ctas=ctas)


@pytest.mark.parametrize("ctas", [1, 3, 8])
@pytest.mark.parametrize("block_size", [8, 16, 32, 128])
def test_paged_decode_every_block_size(block_size: int, ctas: int) -> None:
    check(block_size=block_size, ctas=ctas, dtype=torch.float16)


@pytest.mark.parametrize("size", [80, 128, 192, 256])
def test_paged_decode_head_sizes(size: int) -> None:
    check(lengths=[570, 3], size=size, dtype=torch.float16, scale=size**-0.5, ctas=4)


@pytest.mark.parametrize("ctas", [1, 5])
@pytest.mark.parametrize("window", [1, 5, 64, 1000])
def test_paged_decode_window_hides_older_keys(window: int, ctas: int) -> None:
    check(lengths=[150, 64, 900, 2, 0], window=window, ctas=ctas)


def counts(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("ctas", [1, 5])
@pytest.mark.parametrize("chunk_size", [1, 5, 64, 300, 1000])
def test_paged_decode_hides_keys_before_attention_chunk(chunk_size: int, ctas: int) -> None:
    """Chunks are counted from the start of the sequence, possibly long before the start of its table."""
    gone = counts(0, 16, 304, 2048, 0)
    check(lengths=[150, 64, 900, 2, 0], chunk_size=chunk_size, gone=gone, ctas=ctas)


@pytest.mark.parametrize("ctas", [1, 5])
def test_paged_decode_does_not_read_keys_before_chunk(ctas: int) -> None:
    """Their blocks may belong to another request."""
    caches = [torch.randn(40, 16, 2, 32) for _ in range(2)]
    for cache in caches:
        cache[:13] = float("nan")
    tables = torch.arange(40, dtype=torch.int32).unsqueeze(0)
    query, lengths = torch.randn(1, 4, 32), counts(500)
    tensors = (query, *caches, tables, lengths)
    ours = paged_decode_triton(*tensors, scale=0.25, chunk_size=300, gone=counts(92), ctas=ctas)
    begun = (query, *(cache[13:] for cache in caches), tables[:, :27], lengths - 208)
    torch.testing.assert_close(ours, paged_decode_reference(*begun, scale=0.25), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("wrong", "has_gone"), [({"chunk_size": 8}, False), ({}, True), ({"chunk_size": 8, "window": 4}, True)], ids=str
)
def test_paged_decode_rejects_chunks_without_gone(wrong: dict[str, Any], has_gone: bool) -> None:
    cache = torch.zeros(2, 8, 1, 16)
    if has_gone:
        wrong = wrong | {"gone": counts(0)}
    with pytest.raises(ValueError, match="pass the number of tokens before the table for each of the 1 sequences"):
        paged_decode_triton(torch.zeros(1, 1, 16), cache, cache, counts(1)[None], counts(3), scale=1.0, **wrong)


@pytest.mark.parametrize("ctas", [1, 5])
@pytest.mark.parametrize("window", [None, 30])
def test_paged_decode_sinks_add_to_softmax_denominator(window: int | None, ctas: int) -> None:
    sinks = torch.tensor([-2.0, 0.0, 1.0, 9.0])
    check(lengths=[150, 64, 900, 2, 0], window=window, ctas=ctas, sinks=sinks)


@pytest.mark.parametrize("ctas", [1, 5])
def test_paged_decode_soft_cap(ctas: int) -> None:
    check(scale=2.0, soft_cap=5.0, ctas=ctas)


@pytest.mark.parametrize("ctas", [1, 5])
@pytest.mark.parametrize("cache_dtype", [FLOAT8, torch.float8_e5m2])
@pytest.mark.parametrize("size", [10, 16, 32, 80, 128, 256])
def test_paged_decode_float8_cache_uses_scales(size: int, cache_dtype: torch.dtype, ctas: int) -> None:
    check(
        size=size, dtype=torch.float16, cache_dtype=cache_dtype, scale=size**-0.5, key_scale=0.5, value_scale=2.0,
        ctas=ctas,
    )  # fmt: skip


@pytest.mark.parametrize("cache_dtype", [FLOAT8, torch.float8_e5m2])
@pytest.mark.parametrize("options", [{"window": 64}, {"soft_cap": 5.0}, {"sinks": True}, {"heads": 64, "kv_heads": 1}])
def test_paged_decode_float8_cache_with_other_options(options: dict[str, Any], cache_dtype: torch.dtype) -> None:
    if "sinks" in options:
        options = {"sinks": torch.linspace(-1.0, 1.0, 4)}
    check(dtype=torch.float16, cache_dtype=cache_dtype, ctas=3, **options)


def test_paged_decode_float8_cache_rejects_odd_heads() -> None:
    with pytest.raises(ValueError, match="paged_decode: heads of 9 in a float8 cache"):
        check(size=9, dtype=torch.float16, cache_dtype=FLOAT8)


@pytest.mark.parametrize("facts", [A100, L40, H200])
@pytest.mark.parametrize(
    ("head_size", "itemsize"), [(64, 2), (128, 2), (192, 2), (256, 2), (128, 4), (256, 4), (64, 1), (128, 1), (256, 1)]
)
def test_paged_decode_tiles_fit_shared_memory(facts: DeviceFacts, head_size: int, itemsize: int) -> None:
    keys, stages = decode_tile(head_size, itemsize, facts)
    assert 2 * keys * stages * (1 << (head_size - 1).bit_length()) * itemsize < facts.shared_bytes


@pytest.mark.parametrize("ctas", [1, 7])
def test_paged_decode_lengths_around_block_tile_and_split(ctas: int) -> None:
    check(lengths=[0, 1, 15, 16, 17, 127, 128, 129, 255, 256, 257, 0, 1500], ctas=ctas)


@pytest.mark.parametrize("length", [0, 1, 16, 256, 257, 1500])
def test_paged_decode_single_sequence(length: int) -> None:
    check(lengths=[length], ctas=4)


@pytest.mark.parametrize("lengths", [[0], [0, 0, 0], [0, 513, 0], [513, 0, 0, 0, 0]])
def test_paged_decode_padding_rows_are_zeros(lengths: list[int]) -> None:
    check(lengths=lengths, ctas=4)


def test_paged_decode_more_sequences_than_read_at_once() -> None:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(0, 40, (600,), generator=generator).tolist()
    check(lengths=[*lengths, 900, 0, 5], heads=2, kv_heads=1, size=16, ctas=9)


def test_paged_decode_merges_many_splits_in_steps() -> None:
    check(lengths=[5500, 3, 7000], heads=3, kv_heads=1, size=128, ctas=99, dtype=torch.float16)


def launch_again(lengths: list[int], output: torch.Tensor, spoil: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (result, reference) for the same cache and tables, for any lengths."""
    generator = torch.Generator().manual_seed(8)
    caches = [torch.randn(129, 8, 2, 16, generator=generator) for _ in range(2)]
    if spoil:
        caches[0][70, 3, 1, 5] = float("nan")
    tables = (torch.arange(128, dtype=torch.int32) + 1).repeat(len(lengths), 1)
    query = torch.randn(len(lengths), 4, 16, generator=generator)
    tensors = (query, *caches, tables, torch.tensor(lengths, dtype=torch.int32))
    expected = paged_decode_reference(*tensors, scale=0.25)
    return paged_decode_triton(*tensors, scale=0.25, ctas=4, output=output), expected


def test_paged_decode_one_grid_serves_all_lengths() -> None:
    """Replays as a captured graph does: only the lengths on the device change."""
    output = torch.empty(3, 4, 16)
    for lengths in ([1, 0, 0], [1024, 1024, 1024], [5, 1000, 0], [0, 0, 0], [1024, 1, 1]):
        ours, expected = launch_again(lengths, output)
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    with record_launches() as launches:
        for lengths in ([1, 0, 0], [1024, 1024, 1024]):
            launch_again(lengths, output)
    assert len(launches) == 2
    assert len({launch.grid for launch in launches}) == 1


@pytest.mark.parametrize("lengths", [[1024, 200, 9], [600, 0, 1024]])
def test_paged_decode_nan_key_propagates_to_all_its_heads(lengths: list[int]) -> None:
    ours, _ = launch_again(lengths, torch.empty(3, 4, 16), spoil=True)
    reads_it = torch.tensor(lengths) > 69 * 8 + 3
    assert (ours[:, 2:].isnan().all(-1) == reads_it.to(ours.device)[:, None]).all()
    assert not ours[:, :2].isnan().any(), "the other kv head has none"


def test_paged_decode_equal_inputs_give_equal_outputs() -> None:
    first, _ = launch_again([1024, 77, 900], torch.empty(3, 4, 16))
    second, _ = launch_again([1024, 77, 900], torch.empty(3, 4, 16))
    assert torch.equal(first, second)


@pytest.mark.parametrize("facts", [A100, L40, H200, B200])
@pytest.mark.parametrize("is_float8", [False, True])
@pytest.mark.parametrize("head_size", [64, 128, 192, 256])
@pytest.mark.parametrize(("num_kv_heads", "group"), [(1, 8), (1, 32), (1, 64), (3, 3), (8, 4), (32, 1), (2000, 1)])
def test_paged_decode_all_ctas_are_resident_at_once(
    facts: DeviceFacts, num_kv_heads: int, group: int, head_size: int, is_float8: bool
) -> None:
    ctas, registers = decode_ctas(num_kv_heads, group, head_size, facts, is_float8=is_float8)
    has_three = is_float8 and facts in (H200, B200) and group <= 16 and head_size <= 128
    assert registers == (168 if has_three else None)
    most = (3 if has_three else 2) * facts.num_sms
    assert ctas == 1 or ctas * num_kv_heads <= most < (ctas + 1) * num_kv_heads
    assert ctas * num_kv_heads >= MAX_SPLITS, "a single sequence still has many readers"


@pytest.mark.parametrize("figures", ["aot.json", "aot-triton-3.6.json"])
def test_recorded_registers_allow_all_ctas_per_multiprocessor(figures: str) -> None:
    """Checked with the recorded figures of each compiler, which may differ by half in registers: with one CTA too many,
    all splits except a few would end in half the time.
    """
    entries = json.loads((Path(__file__).parents[2] / "docs" / "results" / figures).read_text())["kernels"]
    compiled = {entry["case"]: entry for entry in entries if entry["target"] == H200.capability}
    judged = [heads for heads in HEADS if f"paged_decode {heads.name}" in compiled]
    assert {LLAMA, *(heads for heads in HEADS if heads.cache_dtype == FLOAT8)} <= set(judged)
    for heads in judged:
        entry = compiled[f"paged_decode {heads.name}"]
        room = ctas_per_sm(entry["registers"], entry["shared_bytes"], entry["num_warps"]) * H200.num_sms
        group, is_float8 = heads.num_heads // heads.num_kv_heads, heads.cache_dtype.itemsize == 1
        ctas, _ = decode_ctas(heads.num_kv_heads, group, heads.size, H200, is_float8=is_float8)
        assert ctas * heads.num_kv_heads <= room, heads.name

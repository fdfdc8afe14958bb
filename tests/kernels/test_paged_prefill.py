"""paged_prefill against float32 attention of one sequence at a time. Triton's interpreter multiplies float16 and
float32 but not bfloat16; the ahead-of-time cases compile bfloat16.
"""

from dataclasses import dataclass

import pytest
import torch
from trimtab_kernels.launch.device_facts import A100, H200, L40, DeviceFacts
from trimtab_kernels.paged_prefill import paged_prefill_reference, paged_prefill_triton, prefill_config

FLOAT8 = torch.float8_e4m3fn


@dataclass
class Paged:
    """Sequences (tokens before, tokens now) in a cache whose blocks are shuffled and whose free rows contain NaN."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    query_starts: torch.Tensor


def a_batch(
    sequences: list[tuple[int, int]],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    size: int = 32,
    block_size: int = 8,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
) -> Paged:
    generator = torch.Generator().manual_seed(3)
    lengths = [before + now for before, now in sequences]
    counts = [-(-length // block_size) for length in lengths]
    ids = (torch.randperm(sum(counts), generator=generator) + 1).tolist()
    tables = torch.zeros(len(sequences), max(counts) + 1, dtype=torch.int32)
    caches = [torch.full((sum(counts) + 1, block_size, kv_heads, size), float("nan")) for _ in range(2)]
    for row, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        blocks = [ids.pop() for _ in range(count)]
        tables[row, :count] = torch.tensor(blocks, dtype=torch.int32)
        for cache in caches:
            real = torch.randn(length, kv_heads, size, generator=generator)
            for position in range(length):
                cache[blocks[position // block_size], position % block_size] = real[position]
    starts = torch.tensor([0, *[now for _, now in sequences]]).cumsum(0).to(torch.int32)
    query = torch.randn(int(starts[-1]), heads, size, generator=generator).to(dtype)
    keys, values = (cache.to(cache_dtype or dtype) for cache in caches)
    return Paged(query, keys, values, tables, torch.tensor(lengths, dtype=torch.int32), starts)


def tolerance(dtype: torch.dtype) -> float:
    """Return the tolerance. A float32 GEMM consists of three TF32 GEMMs on a GPU, which preserve about 21 bits."""
    return (64 if dtype == torch.float32 else 16) * torch.finfo(dtype).eps


def check(batch: Paged, *, scale: float = 0.25, **options: float | torch.Tensor | None) -> None:
    tensors = (batch.query, batch.key_cache, batch.value_cache, batch.block_tables, batch.seq_lens, batch.query_starts)
    longest = int(batch.query_starts.diff().max())
    ours = paged_prefill_triton(*tensors, max_query_len=longest, scale=scale, **options)  # type: ignore[arg-type]
    expected = paged_prefill_reference(*tensors, scale=scale, **options)  # type: ignore[arg-type]
    limit = tolerance(batch.query.dtype)
    torch.testing.assert_close(ours, expected, rtol=limit, atol=limit)


MIXES = [
    [(0, 1)],
    [(0, 7)],
    [(0, 65)],
    [(13, 5)],
    [(130, 33), (16, 16)],
    [(5, 1), (0, 17), (99, 1), (24, 9), (8, 1), (0, 1)],
]


@pytest.mark.parametrize("sequences", MIXES)
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 4, 16), (9, 3, 64), (6, 1, 10)])
def test_paged_prefill_any_mix_of_chunks_and_decodes(
    sequences: list[tuple[int, int]], heads: int, kv_heads: int, size: int
) -> None:
    check(a_batch(sequences, heads=heads, kv_heads=kv_heads, size=size))


@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_paged_prefill_every_block_size(block_size: int, dtype: torch.dtype) -> None:
    check(a_batch([(70, 9), (3, 1), (0, 20)], block_size=block_size, dtype=dtype))


@pytest.mark.parametrize("size", [80, 128, 192, 256])
def test_paged_prefill_pads_head_sizes(size: int) -> None:
    check(a_batch([(20, 9), (3, 1)], size=size, dtype=torch.float16), scale=size**-0.5)


@pytest.mark.parametrize("window", [1, 5, 64, 100, 1000])
def test_paged_prefill_window_hides_older_keys(window: int) -> None:
    check(a_batch([(150, 40), (2, 1), (0, 90)]), window=window)


@pytest.mark.parametrize("gone", [(0, 0, 0), (48, 0, 8), (1000, 2048, 96)])
@pytest.mark.parametrize("chunk_size", [1, 5, 64, 100, 1000])
def test_paged_prefill_hides_keys_before_attention_chunk(chunk_size: int, gone: tuple[int, ...]) -> None:
    """A step's rows may belong to several chunks, which are counted from the start of the sequence."""
    batch = a_batch([(150, 40), (2, 1), (0, 90)])
    check(batch, chunk_size=chunk_size, gone=torch.tensor(gone, dtype=torch.int32))


@pytest.mark.parametrize("has_sinks", [False, True], ids=["", "sinks"])
def test_paged_prefill_many_rows_in_one_and_two_chunks(has_sinks: bool) -> None:
    """Covers tiles visible to all rows of a block, tiles visible to some, and blocks in which another chunk starts."""
    batch = a_batch([(300, 150), (20, 200)], dtype=torch.float16)
    sinks = torch.tensor([-2.0, 0.0, 1.0, 9.0]) if has_sinks else None
    check(batch, chunk_size=256, gone=torch.tensor([16, 0], dtype=torch.int32), sinks=sinks)


def test_paged_prefill_soft_cap() -> None:
    check(a_batch([(70, 9), (0, 20)]), scale=2.0, soft_cap=5.0)


@pytest.mark.parametrize("window", [None, 30])
def test_paged_prefill_sinks_add_to_softmax_denominator(window: int | None) -> None:
    sinks = torch.tensor([-2.0, 0.0, 1.0, 9.0])
    check(a_batch([(150, 40), (2, 1), (0, 90)]), window=window, sinks=sinks)


@pytest.mark.parametrize("window", [None, 30])
def test_paged_prefill_float8_cache_uses_scales(window: int | None) -> None:
    batch = a_batch([(70, 9), (3, 1), (0, 20)], dtype=torch.float16, cache_dtype=FLOAT8)
    check(batch, key_scale=0.5, value_scale=2.0, window=window)


def test_paged_prefill_writes_only_own_rows_of_larger_output() -> None:
    batch = a_batch([(9, 4)])
    whole = torch.full((8, 4, 32), 7.0)
    paged_prefill_triton(
        batch.query,
        batch.key_cache,
        batch.value_cache,
        batch.block_tables,
        batch.seq_lens,
        batch.query_starts,
        max_query_len=4,
        scale=0.25,
        output=whole[2:6],
    )
    assert bool((whole[:2] == 7).all() and (whole[6:] == 7).all())
    assert not bool((whole[2:6] == 7).any())


@pytest.mark.parametrize("facts", [A100, L40, H200])
@pytest.mark.parametrize("head_size", [64, 80, 128, 192, 256])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_paged_prefill_tiles_fit_shared_memory(facts: DeviceFacts, head_size: int, itemsize: int) -> None:
    for group in (1, 3, 8, 16):
        for longest in (1, 4, 8192):
            config = prefill_config(head_size, group, longest, itemsize, facts)
            assert config.rows >= group
            row_bytes = max(16, 1 << (head_size - 1).bit_length()) * itemsize
            assert (2 * config.keys * config.num_stages + config.rows) * row_bytes <= facts.shared_bytes


def test_paged_prefill_rejects_mismatched_inputs() -> None:
    batch = a_batch([(9, 4)])
    tensors = (batch.key_cache, batch.value_cache, batch.block_tables, batch.seq_lens, batch.query_starts)
    with pytest.raises(ValueError, match="multiple of num_kv_heads"):
        paged_prefill_triton(batch.query[:, :3], *tensors, max_query_len=4, scale=1.0)
    with pytest.raises(ValueError, match="one row per sequence"):
        paged_prefill_triton(
            batch.query, *tensors[:2], batch.block_tables.long(), *tensors[3:], max_query_len=4, scale=1.0
        )

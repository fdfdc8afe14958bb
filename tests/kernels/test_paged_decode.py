"""paged_decode, single pass and split, against float32 attention of one sequence at a time (see test_paged_prefill)."""

import pytest
import torch
from trimtab_kernels.launch.device_facts import A100, H200, L40, DeviceFacts
from trimtab_kernels.paged_decode import decode_tile, num_splits, paged_decode_reference, paged_decode_triton

FLOAT8 = torch.float8_e4m3fn
LENGTHS = [1, 7, 64, 65, 200, 0, 33]


def check(
    *,
    lengths: list[int] = LENGTHS,
    heads: int = 4,
    kv_heads: int = 2,
    size: int = 32,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    splits: int = 1,
    scale: float = 0.25,
    **options: float | torch.Tensor | None,
) -> None:
    """Compute both ways. Every sequence's blocks are shuffled; rows beyond its length hold NaN."""
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
    ours = paged_decode_triton(*tensors, max_seq_len=max(lengths), scale=scale, splits=splits, **options)  # type: ignore[arg-type]
    expected = paged_decode_reference(*tensors, scale=scale, **options)  # type: ignore[arg-type]
    tolerance = (64 if dtype == torch.float32 else 16) * torch.finfo(dtype).eps  # float32 is three TF32 on a GPU
    torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 4, 16), (9, 3, 64), (6, 1, 10), (24, 1, 32)])
def test_heads_share_a_kv_head(heads: int, kv_heads: int, size: int, splits: int) -> None:
    check(heads=heads, kv_heads=kv_heads, size=size, splits=splits)


@pytest.mark.parametrize("splits", [1, 2, 8])
@pytest.mark.parametrize("block_size", [8, 16, 32, 128])
def test_every_block_size(block_size: int, splits: int) -> None:
    check(block_size=block_size, splits=splits, dtype=torch.float16)


@pytest.mark.parametrize("size", [80, 128, 192, 256])
def test_head_sizes(size: int) -> None:
    check(lengths=[70, 3], size=size, dtype=torch.float16, scale=size**-0.5, splits=2)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("window", [1, 5, 64, 1000])
def test_a_sliding_window_hides_older_keys(window: int, splits: int) -> None:
    check(lengths=[150, 64, 2, 0], window=window, splits=splits)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("window", [None, 30])
def test_sinks_take_their_part_of_the_softmax(window: int | None, splits: int) -> None:
    sinks = torch.tensor([-2.0, 0.0, 1.0, 9.0])
    check(lengths=[150, 64, 2, 0], window=window, splits=splits, sinks=sinks)


@pytest.mark.parametrize("splits", [1, 4])
def test_scores_are_softly_capped(splits: int) -> None:
    check(scale=2.0, soft_cap=5.0, splits=splits)


@pytest.mark.parametrize("splits", [1, 4])
def test_a_float8_cache_is_read_with_its_scales(splits: int) -> None:
    check(dtype=torch.float16, cache_dtype=FLOAT8, key_scale=0.5, value_scale=2.0, splits=splits)


@pytest.mark.parametrize(
    ("num_seqs", "kv_heads", "max_seq_len", "splits"),
    [
        (256, 8, 4096, 1),  # the batch alone fills the device
        (256, 8, 16384, 2),  # it does, but one program would read for too long
        (1, 8, 128, 1),  # too short to share
        (1, 8, 1024, 4),  # no split shorter than 256 tokens
        (1, 8, 131072, 64),  # never more than can be merged at once
        (32, 8, 8192, 8),  # as many as fill 132 multiprocessors eightfold
    ],
)
def test_the_form_follows_batch_and_context(num_seqs: int, kv_heads: int, max_seq_len: int, splits: int) -> None:
    assert num_splits(num_seqs, kv_heads, max_seq_len, H200) == splits


@pytest.mark.parametrize("facts", [A100, L40, H200])
@pytest.mark.parametrize(("head_size", "itemsize"), [(64, 2), (128, 2), (192, 2), (256, 2), (128, 4), (256, 4)])
def test_tiles_fit_the_shared_memory(facts: DeviceFacts, head_size: int, itemsize: int) -> None:
    keys, stages = decode_tile(head_size, itemsize, facts)
    assert 2 * keys * stages * (1 << (head_size - 1).bit_length()) * itemsize < facts.shared_bytes

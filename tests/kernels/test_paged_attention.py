"""paged_attention against one-sequence-at-a-time float32 attention, for any mix of decodes and chunks."""

import random
from itertools import pairwise

import pytest
import torch
import trimtab_kernels.paged_attention as kernel
from trimtab_kernels.paged_attention import (
    CAPPED_ROWS,
    attend,
    attend_reference,
    build_attention_metadata,
    first_of_run,
    merge_key_ranges,
    paged_attention,
    paged_attention_reference,
    plan_cpu_reads,
    plan_decode_groups,
)
from trimtab_kernels.reshape_and_cache import as_read, reshape_and_cache

pytestmark = pytest.mark.cpu
BLOCK_SIZE = 8
Sequence = tuple[int, int]  # (tokens before, tokens now)


def check_step(sequences: list[Sequence], *, heads: int = 6, kv_heads: int = 2, size: int = 16, in_rows: bool = False,
               dtype: torch.dtype = torch.float32, cache_dtype: torch.dtype | None = None,
               scales: tuple[float, float] = (1.0, 1.0), window: int | None = None,
               chunk_size: int | None = None, has_sinks: bool = False, from_sight: bool = False,
               softcap: float | None = None) -> None:  # fmt: skip
    """Compute a step in every way. Blocks are scattered over the cache, or consecutive. `from_sight`: tables start with
    the first block that the step's first token sees.
    """
    generator = torch.Generator().manual_seed(1)
    counts = [-(-(before + now) // BLOCK_SIZE) for before, now in sequences]
    ids = list(range(1, sum(counts) + 1))
    if not in_rows:
        random.Random(1).shuffle(ids)
    tables = [[ids.pop(0) for _ in range(count)] for count in counts]
    shape = (sum(counts) + 2, BLOCK_SIZE, kv_heads, size)
    stored = [torch.randn(shape, generator=generator).to(cache_dtype or dtype) for _ in range(2)]
    keys, values = (as_read(cache, dtype, scale) for cache, scale in zip(stored, scales, strict=True))
    order = sorted(range(len(sequences)), key=lambda i: (sequences[i][1] != 1, -sequences[i][0]))
    decodes = [(tables[i], sequences[i][0] + 1) for i in order if sequences[i][1] == 1]
    chunks = [(tables[i], *sequences[i]) for i in order if sequences[i][1] != 1]
    slots = [
        tables[i][position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        for i in order
        for position in range(sequences[i][0], sum(sequences[i]))
    ]
    gone = [0] * len(sequences)
    if from_sight:
        for i, (before, _) in enumerate(sequences):
            first_seen = 0 if window is None else max(0, before - window + 1)
            gone[i] = (first_seen if chunk_size is None else before // chunk_size * chunk_size) // BLOCK_SIZE
        decodes = [(tables[i][gone[i] :], sequences[i][0] + 1 - gone[i] * BLOCK_SIZE) for i in order[: len(decodes)]]
        cut = [(tables[i][gone[i] :], sequences[i][0] - gone[i] * BLOCK_SIZE) for i in order[len(decodes) :]]
        chunks = [(table, before, now) for (table, before), (_, _, now) in zip(cut, chunks, strict=True)]
    device = torch.device("cpu")
    metadata = build_attention_metadata(
        slots,
        decodes,
        chunks,
        block_size=BLOCK_SIZE,
        device=device,
        window=window,
        chunk_size=chunk_size,
        gone=[gone[i] * BLOCK_SIZE for i in order] if from_sight else (),
    )
    sinks = torch.randn(heads, generator=generator) if has_sinks else None
    query = torch.randn(len(slots), heads, size, generator=generator).to(dtype)
    new_keys, new_values = keys.flatten(0, 1)[slots], values.flatten(0, 1)[slots]
    scale = size**-0.5
    own = (query, new_keys, new_values, stored[0], stored[1])
    outputs = [
        paged_attention(*own, way, scale, sinks=sinks, softcap=softcap, key_scale=scales[0], value_scale=scales[1])
        for way in (metadata, plan_cpu_reads(metadata, heads, stored[0]))
    ]
    first = 0
    tolerance = 16 * torch.finfo(dtype).eps
    for i in order:
        before, now = sequences[i]
        rows = slice(first, first + now)
        expected = paged_attention_reference(
            query[rows], keys, values, tables[i], before, scale,
            window=window, chunk_size=chunk_size, sinks=sinks, softcap=softcap,
        )  # fmt: skip
        for output in outputs:
            torch.testing.assert_close(output[rows], expected, rtol=tolerance, atol=tolerance)
        first += now


MIXED: list[list[Sequence]] = [
    [(0, 1)],
    [(60, 1)],
    [(16, 1), (7, 1), (40, 1), (41, 1)],
    [(0, 33), (0, 8)],
    [(13, 5), (14, 5), (70, 5)],
    [(300, 20), (16, 16)],
    [(5, 1), (0, 47), (99, 1), (24, 9), (8, 1)],
    [(3, 700)],
]


@pytest.mark.parametrize("from_sight", [False, True])
@pytest.mark.parametrize("window", [1, 2, 8, 13, 64, 600])
@pytest.mark.parametrize("sequences", MIXED, ids=str)
def test_window_limits_visible_tokens(sequences: list[Sequence], window: int, from_sight: bool) -> None:
    check_step(sequences, window=window, from_sight=from_sight)


@pytest.mark.parametrize("from_sight", [False, True])
@pytest.mark.parametrize("chunk_size", [1, 8, 13, 64, 600])
@pytest.mark.parametrize("sequences", MIXED, ids=str)
def test_attention_chunks_limit_visible_tokens(sequences: list[Sequence], chunk_size: int, from_sight: bool) -> None:
    check_step(sequences, chunk_size=chunk_size, from_sight=from_sight)


@pytest.mark.parametrize("window", [None, 13, 600])
@pytest.mark.parametrize("sequences", MIXED, ids=str)
def test_sinks_add_to_softmax_denominator(sequences: list[Sequence], window: int | None) -> None:
    check_step(sequences, window=window, has_sinks=True)


@pytest.mark.parametrize("window", [None, 5, 40])
@pytest.mark.parametrize("sequences", MIXED, ids=str)
def test_soft_cap_is_applied_before_mask(sequences: list[Sequence], window: int | None) -> None:
    check_step(sequences, window=window, has_sinks=True, softcap=0.3)


def test_soft_cap_with_more_rows_than_computed_at_once() -> None:
    check_step([(70, CAPPED_ROWS + 50)], softcap=0.3)


def test_window_and_sinks_with_narrower_cache() -> None:
    check_step(MIXED[6], window=13, has_sinks=True, cache_dtype=torch.float8_e4m3fn, scales=(0.5, 2.0))
    check_step(MIXED[6], window=13, has_sinks=True, dtype=torch.bfloat16)


def test_long_window_is_read_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "GATHER_TOKENS", 64)
    monkeypatch.setattr(kernel, "MAX_PIECE_TOKENS", 24)
    check_step([(700, 90), (10, 50), (300, 1)][:2], window=200, from_sight=True)


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 4, 16), (9, 3, 64), (6, 1, 10)])
@pytest.mark.parametrize(
    "sequences",
    [
        [(0, 1)],
        [(6, 1)],
        [(16, 1), (7, 1), (40, 1)],
        [(0, 7)],
        [(0, 33), (0, 8)],
        [(13, 5)],
        [(300, 20), (16, 16)],
        [(5, 1), (0, 17), (99, 1), (24, 9), (8, 1)],
        [(0, 200), (70, 300), (9, 1)],
    ],
)
def test_paged_attention_any_mix_of_decodes_and_chunks(
    sequences: list[Sequence], heads: int, kv_heads: int, size: int
) -> None:
    check_step(sequences, heads=heads, kv_heads=kv_heads, size=size)


@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cache_of_another_dtype_uses_scales(cache_dtype: torch.dtype, dtype: torch.dtype) -> None:
    if cache_dtype != dtype:
        scales = (1.0, 1.0) if cache_dtype == torch.bfloat16 else (0.5, 2.0)
        check_step([(5, 1), (0, 17), (99, 1), (24, 9)], cache_dtype=cache_dtype, dtype=dtype, scales=scales)
        check_step([(50, 1)], in_rows=True, cache_dtype=cache_dtype, dtype=dtype, scales=scales)
        check_step([(40, 5), (17, 5), (16, 5)], cache_dtype=cache_dtype, dtype=dtype, scales=scales)


def test_new_tokens_are_rounded_to_cache_for_any_chunking() -> None:
    generator = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(24, 2, 16, generator=generator) for _ in range(3))
    caches = [torch.zeros(4, BLOCK_SIZE, 2, 16).to(torch.float8_e4m3fn) for _ in range(2)]
    reshape_and_cache(key, value, caches[0], caches[1], torch.arange(24), key_scale=0.5, value_scale=0.25)

    def attended(chunks: list[tuple[int, int]]) -> torch.Tensor:
        metadata = build_attention_metadata(
            list(range(24)),
            [],
            [([0, 1, 2], before, now) for before, now in chunks],
            block_size=BLOCK_SIZE,
            device=torch.device("cpu"),
        )
        return paged_attention(query, key, value, caches[0], caches[1], metadata, 0.25, key_scale=0.5, value_scale=0.25)

    torch.testing.assert_close(attended([(0, 24)]), attended([(0, 5), (5, 10), (15, 9)]), rtol=1e-5, atol=1e-5)


def test_short_chunks_of_equal_length_form_groups() -> None:
    check_step([(40, 5), (17, 5), (16, 5), (3, 5), (0, 5)])
    check_step([(70, 1), (9, 1), (40, 5), (39, 5), (30, 3), (8, 3), (200, 2), (90, 60)])
    check_step([(50, 4)], in_rows=True)
    chunks = [([1, 2], 9, 4), ([3], 4, 4), ([4], 0, 3), ([5, 6, 7], 0, 20), ([8], 1, 4)]
    metadata = build_attention_metadata([0] * 35, [], chunks, block_size=BLOCK_SIZE, device=torch.device("cpu"))
    assert [(g.first, g.last, g.num_tokens) for g in metadata.decode_groups] == [(0, 8, 4), (8, 11, 3), (31, 35, 4)]
    assert [(c.first, c.last) for c in metadata.chunks] == [(11, 31)]


def test_short_chunks_with_long_contexts_stay_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "GATHER_TOKENS", 32)
    check_step([(100, 3), (29, 3), (28, 3)])


def test_consecutive_blocks_are_read_in_place() -> None:
    check_step([(50, 1), (70, 12)], in_rows=True)


def test_long_contexts_are_merged_from_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "GATHER_TOKENS", 32)
    check_step([(100, 3), (64, 2), (129, 20)])


def test_long_decode_can_be_chunk_of_one_token() -> None:
    generator = torch.Generator().manual_seed(2)
    keys, values = (torch.randn(8, BLOCK_SIZE, 2, 16, generator=generator) for _ in range(2))
    table = [5, 2, 7, 1]
    slot = table[27 // BLOCK_SIZE] * BLOCK_SIZE + 27 % BLOCK_SIZE
    metadata = build_attention_metadata([slot], [], [(table, 27, 1)], block_size=BLOCK_SIZE, device=torch.device("cpu"))
    query = torch.randn(1, 4, 16, generator=generator)
    fresh = [cache.flatten(0, 1)[[slot]] for cache in (keys, values)]
    output = paged_attention(query, fresh[0], fresh[1], keys, values, metadata, 0.25)
    torch.testing.assert_close(output, paged_attention_reference(query, keys, values, table, 27, 0.25))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    check_step([(20, 1), (9, 1), (12, 10)], dtype=dtype)


def test_padding_rows_after_tokens_are_zero() -> None:
    cache = torch.randn(2, BLOCK_SIZE, 1, 4)
    metadata = build_attention_metadata([8], [([1], 1)], [], block_size=BLOCK_SIZE, device=torch.device("cpu"))
    query = torch.randn(4, 2, 4)
    output = paged_attention(query, query[:, :1], query[:, :1], cache, cache, metadata, 0.5)
    assert torch.equal(output[1:], torch.zeros(3, 2, 4))


def test_plain_torch_attention_gives_same_output_and_lse() -> None:
    query, key = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    mask = torch.zeros(1, 1, 1, 5)
    mask[..., 4] = float("-inf")
    for is_causal, given in ((True, None), (False, mask), (False, None)):
        output, lse = attend(query, key, key, scale=0.3, is_causal=is_causal, mask=given)
        expected, expected_lse = attend_reference(query, key, key, scale=0.3, is_causal=is_causal, mask=given)
        torch.testing.assert_close(output, expected)
        torch.testing.assert_close(lse, expected_lse)


def test_merge_key_ranges_equals_whole() -> None:
    query, key, value = (torch.randn(1, 2, 9, 8) for _ in range(3))
    whole, whole_lse = attend(query, key, value, scale=0.3)
    parts = [attend(query, key[:, :, part], value[:, :, part], scale=0.3) for part in (slice(0, 4), slice(4, 9))]
    merged, lse = merge_key_ranges(*parts[0], *parts[1])
    torch.testing.assert_close(merged, whole)
    torch.testing.assert_close(lse, whole_lse)


def test_decode_groups_limit_padding_and_gather() -> None:
    counts = [400, 390, 20, 19, 18, 1]
    boundaries = plan_decode_groups(counts, BLOCK_SIZE)
    assert boundaries[0] == 0
    assert boundaries[-1] == len(counts)
    assert 2 in boundaries, "short sequences are not padded to the long ones"
    for first, last in pairwise(boundaries):
        assert last - first == 1 or (last - first) * counts[first] * BLOCK_SIZE <= kernel.GATHER_TOKENS


def test_equal_lengths_form_one_group() -> None:
    assert plan_decode_groups([8] * 32, 16) == [0, 32]


@pytest.mark.parametrize(
    ("blocks", "first"), [([4], 4), ([4, 5, 6], 4), ([4, 6, 5], None), ([4, 6], None), ([6, 5], None)]
)
def test_first_of_run_requires_consecutive_blocks(blocks: list[int], first: int | None) -> None:
    assert first_of_run(blocks) == first


def test_paged_attention_rejects_indivisible_heads() -> None:
    cache = torch.zeros(2, BLOCK_SIZE, 2, 4)
    metadata = build_attention_metadata([8], [([1], 1)], [], block_size=BLOCK_SIZE, device=torch.device("cpu"))
    with pytest.raises(ValueError, match="multiple of num_kv_heads"):
        paged_attention(torch.ones(1, 3, 4), torch.ones(1, 2, 4), torch.ones(1, 2, 4), cache, cache, metadata, 0.5)

"""Attention of one new token per sequence over a paged KV cache: PagedAttention (Kwon et al. 2023, arXiv:2309.06180).

query         [num_seqs, num_heads, head_size]; all other arguments as in paged_prefill, one query row per sequence
seq_lens      [num_seqs] int32: tokens in the cache, including the new one; 0 marks a padding row, which yields zeros
y             like query

The key tiles of all sequences form one list, and each CTA of a kv head processes an equal split of it, independent of
sequence boundaries (like Stream-K for GEMMs: Osama et al. 2023, arXiv:2301.03598):
```
tiles       |--- sequence 0 ---|-- 1 --|- 2 -|------------ sequence 3 ------------|- 4 -|
CTAs        |  CTA 0      |  CTA 1      |  CTA 2      |  CTA 3      |  CTA 4      |  5  |
```
A sequence within one split is written directly. For a sequence that spans several splits, each CTA stores a partial
result, and the last CTA to finish merges them by log-sum-exp, in the same launch. CTAs read the lengths on the device,
so a captured graph stays balanced for any lengths, independent of the maximum length.
Splits are merged in the order of their keys, so equal inputs give equal outputs.
Memory-bound: 2 * sum(seq_lens) * num_kv_heads * head_size * cache itemsize bytes. Source: own.
"""

import torch

from trimtab_kernels.launch.arrivals import arrival_counters
from trimtab_kernels.launch.dependence import dependence, gdc_launch_dependents, gdc_wait
from trimtab_kernels.launch.device_facts import DeviceFacts, device_facts
from trimtab_kernels.launch.jit import cdiv, jit, kernel, next_power_of_2, tl
from trimtab_kernels.paged_prefill import (
    MIN_ROWS,
    apply_soft_cap,
    check_attention_shapes,
    check_chunks,
    paged_prefill_reference,
    score_scale,
    slots_of,
)

MIN_SPLIT_TOKENS, MAX_MIN_SPLIT_TOKENS, SPLIT_TOKENS_PER_HEAD = 64, 256, 16
"""Minimum tokens of a CTA's split: SPLIT_TOKENS_PER_HEAD for each query head of a kv head, within these limits. If
there are fewer splits than CTAs, latency matters more than the bytes of partial results: one sequence of 1,024 tokens
with a group of 4 takes 9.5 us on an H200 in splits of 64 tokens, and 12.7 us in splits of 256. The partial results of
large groups are as large as their keys."""
MAX_SPLITS = 64
"""Splits of a sequence at most: one CTA merges them all, while the others may have ended."""
MERGED_VALUES, MERGED_SPLITS = 8192, 16
"""Values (64 per thread) and splits that are read at once. More would take the registers of the third CTA."""
NUM_WARPS = 4
SEARCHED_LENGTHS = 256
"""Lengths that a CTA reads at once."""
CTAS_PER_SM = 2
"""With 128 KiB in flight, two CTAs read at 0.96 of the copy bandwidth on an H200. A third one would have to wait: a
thread takes 217 registers with triton 3.6 (144 with 3.9)."""
FLOAT8_CTAS_PER_SM, FLOAT8_REGISTERS = 3, 168
"""Conversions stall the CTAs of a float8 cache, so a third one helps; it fits with this register limit."""
EVEN_E4M3, ODD_E4M3 = (
    tl.constexpr(
        "{ .reg .b32 both; .reg .b16 low, high; "
        f"prmt.b32 both, $1, 0, {places}; mov.b32 {{low, high}}, both; cvt.rn.f16x2.e4m3x2 $0, low; }}"
    )
    for places in ("0x4420", "0x4431")
)
EVEN_E5M2, ODD_E5M2 = (tl.constexpr(f"prmt.b32 $0, $1, 0, {places};") for places in ("0x2404", "0x3414"))
"""Byte permutations of two registers: the bytes at even places, or at odd ones. float16 is e5m2 followed by eight more
bits."""
LARGE_GROUP, LARGE_HEAD, HUGE_GROUP = 16, 128, 32
"""Limits of the third CTA: larger groups and larger heads would lose too much with FLOAT8_REGISTERS, or exceed its
shared memory. Groups above HUGE_GROUP leave no room for a second CTA with tiles of 128 keys."""


def paged_decode_reference(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    chunk_size: int | None = None,
    gone: torch.Tensor | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> torch.Tensor:
    """Return the result of paged_prefill_reference with one query row per sequence."""
    starts = torch.arange(query.shape[0] + 1, dtype=torch.int32, device=query.device)
    return paged_prefill_reference(
        query,
        key_cache,
        value_cache,
        block_tables,
        seq_lens,
        starts,
        scale=scale,
        window=window,
        chunk_size=chunk_size,
        gone=gone,
        soft_cap=soft_cap,
        sinks=sinks,
        key_scale=key_scale,
        value_scale=value_scale,
    )


def decode_ctas(
    num_kv_heads: int, group: int, head_size: int, facts: DeviceFacts, *, is_float8: bool = False
) -> tuple[int, int | None]:
    """Return (CTAs per kv head, register limit per thread): as many CTAs as are resident at once, so that all splits
    end together.
    """
    fits = facts.has_hopper_shared_memory and group <= LARGE_GROUP and head_size <= LARGE_HEAD
    per_sm, registers = (FLOAT8_CTAS_PER_SM, FLOAT8_REGISTERS) if is_float8 and fits else (CTAS_PER_SM, None)
    return max(1, per_sm * facts.num_sms // num_kv_heads), registers


def decode_tile(head_size: int, itemsize: int, facts: DeviceFacts) -> tuple[int, int]:
    """Return (keys of a tile, stages of its pipeline). Keys and values of a tile take 32 KiB.

    A tile's address is read from the block table, so three stages keep one tile in flight and five keep two. On Hopper,
    two CTAs per multiprocessor keep 128 KiB in flight, and three with a float8 cache 192 KiB; Ada has room for one CTA
    each.
    """
    bytes_per_key = next_power_of_2(head_size) * itemsize
    keys = min(128, max(16, 16384 // bytes_per_key))
    return keys, 5 if facts.shared_bytes > 10 * keys * bytes_per_key else 3


@jit
def _by_assembler(pairs: tl.tensor, TEXT: tl.constexpr) -> tl.tensor:
    return tl.inline_asm_elementwise(TEXT, "=r,r", [pairs], dtype=tl.float16, is_pure=True, pack=2)


@jit
def _to_float16_pairs(pairs: tl.tensor, FLOAT8: tl.constexpr, BY_ASSEMBLER: tl.constexpr) -> tl.tensor:
    """Return (values at even places, values at odd places) in float16, which represents float8 exactly, from float8
    values read in pairs as 16 bits. Neighbours along the other axis then share a register, as the matrix units require;
    single bytes would have to be gathered from shared memory. The compiler's own conversion takes more instructions.
    """
    if BY_ASSEMBLER and FLOAT8.is_fp8e5():
        return _by_assembler(pairs, EVEN_E5M2), _by_assembler(pairs, ODD_E5M2)
    if BY_ASSEMBLER:
        return _by_assembler(pairs, EVEN_E4M3), _by_assembler(pairs, ODD_E4M3)
    even = (pairs & 0xFF).to(tl.uint8).to(FLOAT8, bitcast=True).to(tl.float16)
    return even, (pairs >> 8).to(tl.uint8).to(FLOAT8, bitcast=True).to(tl.float16)


@jit
def _load_query_pairs(places: tl.tensor, inside: tl.tensor, score_scale: tl.tensor) -> tl.tensor:
    """Return (queries at even places, queries at odd places, score_scale) for a float8 cache. Queries are divided by
    their largest value, so that they fit into float16.
    """
    even = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    odd = tl.load(places + 1, mask=inside, other=0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), 1), 0), 1e-30)
    return (even / largest).to(tl.float16), (odd / largest).to(tl.float16), score_scale * largest


@jit
def _tiles_of(
    lengths: tl.tensor, gone: tl.tensor, WINDOW: tl.constexpr, CHUNK: tl.constexpr, KEYS: tl.constexpr
) -> tl.tensor:
    """Return (first key of the first visible tile, number of tiles from it on). Tiles of an attention chunk start with
    the chunk, so all their keys are visible. A padding row counts as one tile, whose CTA writes its zeros.
    """
    first = lengths * 0
    if WINDOW is not None:
        first = tl.maximum(lengths - WINDOW, 0) // KEYS * KEYS
    if CHUNK is not None:
        first = tl.maximum((lengths - 1 + gone) // CHUNK * CHUNK - gone, 0)
    return first, tl.maximum(tl.cdiv(lengths - first, KEYS), 1)


@jit
def _tiles_of_rows(
    seq_lens: tl.tensor,
    gone: tl.tensor,
    first_row: tl.tensor,
    num_seqs: tl.tensor,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    KEYS: tl.constexpr,
    ROWS: tl.constexpr,
) -> tl.tensor:
    """Return the tiles of each sequence from first_row on; 0 after the last one."""
    rows = first_row + tl.arange(0, ROWS)
    lengths = tl.load(seq_lens + rows, mask=rows < num_seqs, other=0)
    moved = lengths
    if CHUNK is not None:
        moved = tl.load(gone + rows, mask=rows < num_seqs, other=0)
    _, tiles = _tiles_of(lengths, moved, WINDOW, CHUNK, KEYS)
    return tl.where(rows < num_seqs, tiles, 0)


@jit
def _split_size(
    seq_lens: tl.tensor,
    gone: tl.tensor,
    num_seqs: tl.tensor,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    KEYS: tl.constexpr,
    CTAS: tl.constexpr,
    MIN_TILES: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
) -> tl.tensor:
    """Return (tiles of all sequences, tiles of one CTA's split)."""
    total = 0
    longest = 0
    for first_row in tl.range(0, num_seqs, ROWS):
        tiles = _tiles_of_rows(seq_lens, gone, first_row, num_seqs, WINDOW, CHUNK, KEYS, ROWS)
        total += tl.sum(tiles, 0)
        longest = tl.maximum(longest, tl.max(tiles, 0))
    split_tiles = tl.maximum(tl.cdiv(total, CTAS), tl.cdiv(longest, MAX_SPLITS))
    return total, tl.maximum(split_tiles, MIN_TILES)


@jit
def _find_sequence(
    tile: tl.tensor,
    seq_lens: tl.tensor,
    gone: tl.tensor,
    num_seqs: tl.tensor,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    KEYS: tl.constexpr,
    ROWS: tl.constexpr,
) -> tl.tensor:
    """Return (sequence that contains this tile, tiles of the sequences before it)."""
    sequence = 0
    before = 0
    seen = 0
    for first_row in tl.range(0, num_seqs, ROWS):
        tiles = _tiles_of_rows(seq_lens, gone, first_row, num_seqs, WINDOW, CHUNK, KEYS, ROWS)
        ends = seen + tl.cumsum(tiles, 0)
        has_ended = (tiles > 0) & (ends <= tile)
        sequence += tl.sum(has_ended.to(tl.int32), 0)
        before = tl.maximum(before, tl.max(tl.where(has_ended, ends, 0), 0))
        seen += tl.sum(tiles, 0)
    return sequence, before


@jit
def _merge_splits(
    split_sums: tl.tensor,
    split_statistics: tl.tensor,
    first_split: tl.tensor,
    num_splits: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
) -> tl.tensor:
    """Return ([BLOCK_G, BLOCK_D] sums of weighted values, [BLOCK_G] totals of weights), merging SPLITS splits at a
    time. The first split is the second one of its CTA, and the others are the first ones of their CTAs: every second
    one from first_split + 1 on.
    """
    members = tl.arange(0, BLOCK_G)
    columns = tl.arange(0, BLOCK_D)
    in_head = columns < HEAD_SIZE
    sums = tl.zeros([BLOCK_G, BLOCK_D], dtype=tl.float32)
    highest = tl.full([BLOCK_G], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_G], dtype=tl.float32)
    for start in tl.range(0, num_splits, SPLITS):
        splits = start + tl.arange(0, SPLITS)
        is_real = (splits < num_splits)[:, None] & (members < GROUP)[None, :]
        rows = (first_split + tl.maximum(2 * splits - 1, 0))[:, None] * GROUP + members[None, :]
        split_highest = tl.load(split_statistics + 2 * rows, mask=is_real, other=float("-inf"))
        split_total = tl.load(split_statistics + 2 * rows + 1, mask=is_real, other=0.0)
        places = rows[:, :, None] * HEAD_SIZE + columns[None, None, :]
        split = tl.load(split_sums + places, mask=is_real[:, :, None] & in_head[None, None, :], other=0.0)
        new_highest = tl.maximum(highest, tl.max(split_highest, 0))
        finite = tl.where(new_highest == float("-inf"), 0.0, new_highest)  # rows without a head have no split
        weights = tl.exp2(split_highest - finite[None, :])
        decay = tl.exp2(highest - finite)
        total = total * decay + tl.sum(split_total * weights, 0)
        sums = sums * decay[:, None] + tl.sum(split * weights[:, :, None], 0)
        highest = new_highest
    return sums, total


@kernel("block_tables", "seq_lens", "gone", "num_seqs", "table_stride")
def _paged_decode(
    query: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    output: tl.tensor,
    sinks: tl.tensor,
    split_sums: tl.tensor,
    split_statistics: tl.tensor,
    arrivals: tl.tensor,
    block_tables: tl.tensor,
    seq_lens: tl.tensor,
    gone: tl.tensor,
    num_seqs: tl.tensor,
    table_stride: tl.tensor,
    query_stride: tl.tensor,
    output_stride: tl.tensor,
    score_scale: tl.tensor,
    value_scale: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_G: tl.constexpr,
    KEYS: tl.constexpr,
    CTAS: tl.constexpr,
    MIN_TILES: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    IN_PAIRS: tl.constexpr,
    BY_ASSEMBLER: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """CTA (kv head, split): neighbouring CTAs read the same blocks at the same time. DEPENDENT: the kernel may start
    before the previous kernel has ended.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    kv_head = tl.program_id(0)
    program = tl.program_id(1)
    places = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_D)
    heads = kv_head * GROUP + places
    in_head = columns < HEAD_SIZE
    in_group = places < GROUP
    inside = in_group[:, None] & in_head[None, :]
    halves = tl.arange(0, BLOCK_D // 2)
    in_half = halves < HEAD_SIZE // 2
    offsets = heads[:, None] * HEAD_SIZE + columns[None, :]
    num_tiles, split_tiles = _split_size(
        seq_lens, gone, num_seqs, WINDOW, CHUNK, KEYS, CTAS, MIN_TILES, MAX_SPLITS, ROWS
    )
    tile = program * split_tiles
    last_tile = tl.minimum(tile + split_tiles, num_tiles)
    sequence, before = _find_sequence(tile, seq_lens, gone, num_seqs, WINDOW, CHUNK, KEYS, ROWS)
    while tile < last_tile:
        row = sequence.to(tl.int64)
        length = tl.load(seq_lens + row)
        moved = length
        if CHUNK is not None:
            moved = tl.load(gone + row)
        first_seen, tiles = _tiles_of(length, moved, WINDOW, CHUNK, KEYS)
        stop = tl.minimum(before + tiles, last_tile)
        row_scale = score_scale
        if IN_PAIRS:
            query_places = query + row * query_stride + heads[:, None] * HEAD_SIZE + 2 * halves[None, :]
            even_queries, odd_queries, row_scale = _load_query_pairs(
                query_places, in_group[:, None] & in_half[None, :], score_scale
            )
        else:
            queries = tl.load(query + row * query_stride + offsets, mask=inside, other=0.0)
        table = block_tables + row * table_stride
        if IN_PAIRS:
            even_sums = tl.zeros([BLOCK_M, BLOCK_D // 2], dtype=tl.float32)
            odd_sums = tl.zeros([BLOCK_M, BLOCK_D // 2], dtype=tl.float32)
        else:
            accumulator = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
        highest = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        total = tl.zeros([BLOCK_M], dtype=tl.float32)
        if sinks is not None:  # as if its key were the first one
            own = tl.load(sinks + heads, mask=in_group, other=0.0) * 1.4426950408889634
            highest = tl.where(tile == before, own, highest)
            total += tl.where(tile == before, 1.0, 0.0)
        first = first_seen + (tile - before) * KEYS
        last = tl.minimum(first_seen + (stop - before) * KEYS, length)
        for start in tl.range(first, last, KEYS):
            positions = start + tl.arange(0, KEYS)
            is_seen = positions < length
            if WINDOW is not None:
                is_seen &= positions >= length - WINDOW
            slots = slots_of(table, positions, is_seen, BLOCK_SIZE, BY_MASK=True)
            slots = slots * (NUM_KV_HEADS * HEAD_SIZE) + kv_head * HEAD_SIZE
            if IN_PAIRS:
                cached = (slots // 2)[:, None] + halves[None, :]
                is_loaded = is_seen[:, None] & in_half[None, :]
                keys = tl.load(key_cache.to(tl.pointer_type(tl.uint16)) + cached, mask=is_loaded, other=0)
                values = tl.load(value_cache.to(tl.pointer_type(tl.uint16)) + cached, mask=is_loaded, other=0)
                even_keys, odd_keys = _to_float16_pairs(keys, key_cache.dtype.element_ty, BY_ASSEMBLER)
                scores = tl.dot(even_queries, tl.trans(even_keys), input_precision="tf32x3")
                scores = tl.dot(odd_queries, tl.trans(odd_keys), scores, input_precision="tf32x3") * row_scale
            else:
                cached = slots[:, None] + columns[None, :]
                is_loaded = is_seen[:, None] & in_head[None, :]
                keys = tl.load(key_cache + cached, mask=is_loaded, other=0.0)
                values = tl.load(value_cache + cached, mask=is_loaded, other=0.0)
                scores = tl.dot(queries, tl.trans(keys.to(queries.dtype)), input_precision="tf32x3") * row_scale
            if SOFT_CAP is not None:
                scores = apply_soft_cap(scores, SOFT_CAP) * 1.4426950408889634
            scores = tl.where(is_seen[None, :], scores, float("-inf"))
            # Every tile has a visible key, so the maximum is finite from the first tile on.
            new_highest = tl.maximum(highest, tl.max(scores, 1))
            weights = tl.exp2(scores - new_highest[:, None])
            decay = tl.exp2(highest - new_highest)
            total = total * decay + tl.sum(weights, 1)
            if IN_PAIRS:
                even_values, odd_values = _to_float16_pairs(values, value_cache.dtype.element_ty, BY_ASSEMBLER)
                halved = weights.to(tl.float16)
                even_sums = tl.dot(halved, even_values, even_sums * decay[:, None], input_precision="tf32x3")
                odd_sums = tl.dot(halved, odd_values, odd_sums * decay[:, None], input_precision="tf32x3")
            else:
                weights = weights.to(queries.dtype)
                accumulator = accumulator * decay[:, None]
                accumulator = tl.dot(weights, values.to(queries.dtype), accumulator, input_precision="tf32x3")
            highest = new_highest
        if IN_PAIRS:
            accumulator = tl.reshape(tl.join(even_sums, odd_sums), [BLOCK_M, BLOCK_D])
        first_cta = before // split_tiles
        num_splits = (before + tiles - 1) // split_tiles - first_cta + 1
        if num_splits == 1:
            result = accumulator * (value_scale / tl.where(total == 0.0, 1.0, total))[:, None]
            tl.store(output + row * output_stride + offsets, result.to(output.dtype.element_ty), mask=inside)
        else:
            # Each CTA has at most two partial results: of a sequence that started before its split, and of one that
            # continues after it.
            first_split = 2 * (kv_head * CTAS + first_cta) + 1
            split = 2 * (kv_head * CTAS + program) + (tile == before).to(tl.int32)
            split_rows = split * GROUP + places
            tl.store(split_sums + split_rows[:, None] * HEAD_SIZE + columns[None, :], accumulator, mask=inside)
            tl.store(split_statistics + 2 * split_rows, highest, mask=in_group)
            tl.store(split_statistics + 2 * split_rows + 1, total, mask=in_group)
            # All threads store before one of them increments the counter; the last CTA reads after it has seen the full
            # count.
            tl.debug_barrier()
            counter = arrivals + kv_head * CTAS + first_cta
            if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == num_splits - 1:
                sums, totals = _merge_splits(
                    split_sums, split_statistics, first_split, num_splits, GROUP, HEAD_SIZE, BLOCK_G, BLOCK_D, SPLITS
                )
                members = tl.arange(0, BLOCK_G)
                merged = sums * (value_scale / tl.where(totals == 0.0, 1.0, totals))[:, None]
                target = output + row * output_stride + (kv_head * GROUP + members)[:, None] * HEAD_SIZE
                is_real = (members < GROUP)[:, None] & in_head[None, :]
                tl.store(target + columns[None, :], merged.to(output.dtype.element_ty), mask=is_real)
                tl.store(counter, 0)  # for the next launch
        tile = stop
        before += tiles
        sequence += 1


def paged_decode_triton(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    chunk_size: int | None = None,
    gone: torch.Tensor | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    output: torch.Tensor | None = None,
    ctas: int | None = None,
    facts: DeviceFacts | None = None,
) -> torch.Tensor:
    """Launch the kernel. `ctas` per kv head overrides the default.

    Raises:
        ValueError: shapes do not match.
    """
    check_attention_shapes("paged_decode", query, key_cache, block_tables, seq_lens)
    check_chunks("paged_decode", chunk_size, gone, seq_lens, window)
    num_seqs, num_heads, head_size = query.shape
    block_size, num_kv_heads = key_cache.shape[1:3]
    group = num_heads // num_kv_heads
    output = torch.empty_like(query) if output is None else output
    if num_seqs == 0:
        return output
    facts = facts or device_facts(query.device)
    is_float8 = key_cache.element_size() == 1
    most, registers = decode_ctas(num_kv_heads, group, head_size, facts, is_float8=is_float8)
    ctas = ctas or most
    in_pairs = is_float8 and query.element_size() == 2
    if in_pairs and head_size % 2:
        raise ValueError(f"paged_decode: heads of {head_size} in a float8 cache, which is read two values at a time")
    keys, stages = decode_tile(head_size, 1 if in_pairs and group <= HUGE_GROUP else query.element_size(), facts)
    min_tiles = cdiv(min(MAX_MIN_SPLIT_TOKENS, max(MIN_SPLIT_TOKENS, SPLIT_TOKENS_PER_HEAD * group)), keys)
    # Upper bound given by the block tables.
    most_tiles = num_seqs * max(1, cdiv(block_tables.shape[1] * block_size, keys))
    # A matrix instruction sums over at least 16 values; for pairs, over half of a head.
    block_d = max(2 * MIN_ROWS if in_pairs else MIN_ROWS, next_power_of_2(head_size))
    block_g = next_power_of_2(group)
    splits = torch.empty(num_kv_heads * 2 * ctas, group, head_size, dtype=torch.float32, device=query.device)
    statistics = torch.empty(num_kv_heads * 2 * ctas, group, 2, dtype=torch.float32, device=query.device)
    _paged_decode[(num_kv_heads, min(ctas, cdiv(most_tiles, min_tiles)))](
        query,
        key_cache,
        value_cache,
        output,
        sinks,
        splits,
        statistics,
        arrival_counters(query.device, num_kv_heads * ctas),
        block_tables,
        seq_lens,
        gone,
        num_seqs,
        block_tables.stride(0),
        query.stride(0),
        output.stride(0),
        score_scale(scale, key_scale, soft_cap),
        value_scale,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_SIZE=head_size,
        BLOCK_SIZE=block_size,
        BLOCK_D=block_d,
        BLOCK_M=max(MIN_ROWS, block_g),
        BLOCK_G=block_g,
        KEYS=keys,
        CTAS=ctas,
        MIN_TILES=min_tiles,
        MAX_SPLITS=MAX_SPLITS,
        SPLITS=min(MERGED_SPLITS, max(1, MERGED_VALUES // (block_g * block_d))),
        ROWS=SEARCHED_LENGTHS,
        WINDOW=window,
        CHUNK=chunk_size,
        SOFT_CAP=soft_cap,
        IN_PAIRS=in_pairs,
        BY_ASSEMBLER=query.device.type != "cpu",
        num_warps=NUM_WARPS,
        num_stages=stages,
        **({} if registers is None else {"maxnreg": registers}),
        **dependence(query.device, facts),
    )
    return output

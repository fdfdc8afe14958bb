"""Attention over a paged KV cache, for any mix of decodes and prefill chunks.

query                   [num_tokens, num_heads, head_size]                 fp32 | bf16 | fp16
key, value              [num_tokens, num_kv_heads, head_size]              of this step, already written to the cache
key_cache, value_cache  [num_blocks, block_size, num_kv_heads, head_size], possibly of another dtype (float8: times
                        key_scale, value_scale); then this step's keys and values are rounded to it, too
y                       [num_tokens, num_heads, head_size]
Query head h reads kv head h // (num_heads // num_kv_heads). Softmax statistics are fp32.

The batch contains decodes first, grouped so that padding stays small, then one chunk after another:
```
tokens   |- decode group 0 -|- decode group 1 -|---- chunk 0 ----|-- chunk 1 --|
```
- A decode group gathers its blocks to [sequences, length, kv heads, head size] and runs one attention call in which the
query heads of a kv head are the rows. A group gathers at most GATHER_TOKENS tokens. On the CPU in float32, it reads
them in place instead (decode_attention_cpu).
- Consecutive short chunks of equal length, such as drafts to verify, form groups as well: their tokens are additional
rows, and a mask hides later tokens.
- A chunk attends causally to its own new keys (no gather, no mask), and to the cached tokens before it in slices of
GATHER_TOKENS; the results are merged by log-sum-exp (Dao 2023, arXiv:2307.08691). Neither a mask nor a gather grows
with the context, and the workspace is bounded. Long chunks use GEMMs (prefill_attention_cpu), short ones torch's flash
kernel.
- Blocks that are consecutive in the cache are read in place.
- With a window, each token sees the last `window` tokens, including itself. Block tables then start at the first key
that the step's first token sees, so a mask hides at most one block. A chunk is cut into pieces shorter than the window;
each piece is a chunk, and a mask is needed only for the tokens before it.
- With attention chunks, each token sees only its own chunk of positions (Llama 4). The step's part of each attention
chunk is a sequence, whose block table starts with the chunk; `skip` are the tokens before it in its first block.
- Sinks, one number per head, are weights in the softmax without a value (gpt-oss): exp(sink) is added to the sum of the
scores' exponentials. They are applied at the end, by the log-sum-exp.
- A soft cap changes every score to cap * tanh(score / cap) before masking (Gemma 2); attention is then plain torch, a
few rows at a time.
This is the CPU path. On CUDA, the step uses the Triton kernels, which read the cache by block tables (paged_batch).
Memory-bound for decodes: 2 * sum(lengths) * num_kv_heads * head_size * itemsize bytes per layer. Source: own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch

from trimtab_kernels.decode_attention_cpu import ReadPattern, decode_attention_cpu, plan_reads
from trimtab_kernels.native.batch import NativeBatch, build_native_batch
from trimtab_kernels.paged_batch import PagedBatch, attend_paged_batch, attend_paged_batch_reference, build_paged_batch
from trimtab_kernels.prefill_attention_cpu import can_multiply, prefill_attention_cpu
from trimtab_kernels.reshape_and_cache import as_read, as_stored

GATHER_TOKENS = 4096
"""Tokens gathered at once: keys and values of a few MiB, which stay in the last-level cache between copy and use."""
MAX_PADDING = 0.25
"""Maximum fraction of padding in a decode group: a second call costs more than reading that much more."""
MIN_GROUP_PADDING_BLOCKS = 32
"""Padding blocks that are always allowed: reading them is cheaper than another call."""
MAX_PIECE_TOKENS = 512
"""Tokens of a chunk's piece with a window: the mask of the tokens before it has one row per token."""
CAPPED_ROWS = 256
"""Rows whose soft-capped scores are in memory at once: as many as there are keys for each, several times over."""
MAX_GROUPED_TOKENS = 16
"""Tokens of a chunk that may join a group: the mask has tokens * length entries per sequence."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Tokens [first, last) of the batch, `num_tokens` per sequence, whose block tables are padded to one length.

    blocks [num_sequences * blocks_per_sequence] int64; mask [num_sequences, 1, num_tokens, length] is 0 or -inf, None
    when all sequences have exactly `length` tokens, the newest one here. `run` is the first block of a single sequence
    whose blocks are in a row. `reads` is there where the group can read the cache without a gather.
    """

    first: int
    last: int
    length: int
    blocks: torch.Tensor
    mask: torch.Tensor | None
    run: int | None
    num_tokens: int = 1
    reads: ReadPattern | None = None


@dataclass(frozen=True, slots=True)
class PrefixSlice:
    """`length` tokens of a sequence in `blocks`, or in place from block `run` on."""

    length: int
    blocks: torch.Tensor
    run: int | None
    mask: torch.Tensor | None = None
    """[1, 1, tokens of the chunk, length]: 0, or -inf outside the window; None if every token sees all keys."""
    skip: int = 0
    """Leading tokens that no token of the chunk sees."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [first, last) of the batch are one sequence's; `prefix` are the cached tokens before them, in slices.

    A long decode is a chunk of one token.
    """

    first: int
    last: int
    prefix: tuple[PrefixSlice, ...]


Attend = Callable[[torch.Tensor, PagedBatch, torch.Tensor], torch.Tensor]
"""One layer's attention, of a query and a batch, into an output with the query's shape."""


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """What attention needs to know about a step; built once and read by every layer. slot_mapping [num_tokens] int64.

    num_tokens counts the real tokens: rows from there on are padding and their output is undefined. In a captured step
    it counts the rows of the graph, of which those with a negative slot are padding (`is_padded`).
    """

    num_tokens: int
    slot_mapping: torch.Tensor
    decode_groups: tuple[DecodeGroup, ...]
    chunks: tuple[Chunk, ...]
    paged: PagedBatch | None = None
    """The step for the Triton kernels: on CUDA, where there are neither groups nor chunks."""
    native: NativeBatch | None = None
    """The step for the compiled CPU layers; then there are neither groups nor chunks."""
    is_padded: bool = False
    """True if some slots are negative: their keys and values are not written."""
    outside: Callable[[torch.Tensor, Attend], torch.Tensor] | None = None
    """Computes the layer's attention from the query outside of the graph that is being captured."""
    window: int | None = None
    """Number of tokens that each token sees, including itself; None if it sees all before it."""
    chunk_size: int | None = None
    """Size of the attention chunks, if the step uses the Triton kernels."""


def max_decode_tokens(device: torch.device) -> int:
    """Return the longest context whose decode is grouped with others; a longer one is a chunk of one token. The CPU
    gathers keys; the Triton kernels read them in place, up to the range of int32 positions.
    """
    return (1 << 31) - 1 if device.type == "cuda" else GATHER_TOKENS


def plan_decode_groups(num_blocks: list[int], block_size: int) -> list[int]:
    """Cut block counts, descending or nearly so, into groups; returns the boundaries, [0, ..., len(num_blocks)].

    A group is padded to its longest sequence. It ends when its padding would pass MAX_PADDING, or its gather
    GATHER_TOKENS.
    """
    boundaries, used, widest = [0], 0, 0
    for index, blocks in enumerate(num_blocks):
        first = boundaries[-1]
        widest = max(widest, blocks)
        padded = (index + 1 - first) * widest
        padding = padded - used - blocks
        too_padded = padding > max(MAX_PADDING * padded, MIN_GROUP_PADDING_BLOCKS)
        if index > first and (too_padded or padded * block_size > GATHER_TOKENS):
            boundaries.append(index)
            used, widest = 0, blocks
        used += blocks
    return [*boundaries, len(num_blocks)]


def first_of_run(blocks: list[int]) -> int | None:
    """Return the first block if all are consecutive in the cache, otherwise None."""
    if blocks[-1] - blocks[0] != len(blocks) - 1 or any(b - a != 1 for a, b in pairwise(blocks)):
        return None
    return blocks[0]


def build_attention_metadata(
    slots: list[int],
    decodes: list[tuple[list[int], int]],
    chunks: list[tuple[list[int], int, int]],
    *,
    block_size: int,
    device: torch.device,
    is_native: bool = False,
    window: int | None = None,
    chunk_size: int | None = None,
    gone: Sequence[int] = (),
) -> AttentionMetadata:
    """Plan a step.

    decodes: (block table, context length with the new token), longest first, one token each, at most GATHER_TOKENS
    long. chunks: (block table, tokens before, tokens now). `slots`: one per real token, in this order. is_native: the
    compiled CPU layers, which support no window, will run it. With a window, tables and lengths may start at the first
    key that the first token sees; with attention chunks of chunk_size they may, too, and `gone` then counts the tokens
    before each table (empty: none).
    """
    slot_mapping = torch.tensor(slots, dtype=torch.int64, device=device)
    if device.type == "cuda":
        moved = None if chunk_size is None else gone or [0] * (len(decodes) + len(chunks))
        paged = build_paged_batch(decodes, chunks, block_size=block_size, device=device, gone=moved)
        return AttentionMetadata(paged.num_tokens, slot_mapping, (), (), paged, window=window, chunk_size=chunk_size)
    if is_native:
        assert window is None
        assert chunk_size is None
        native = build_native_batch(decodes, chunks, block_size=block_size)
        return AttentionMetadata(len(slots), slot_mapping, (), (), native=native)
    groups: list[DecodeGroup] = []
    planned: list[Chunk] = []
    skips = [0] * (len(decodes) + len(chunks))
    if chunk_size is not None:
        decodes, chunks, skips = _split_by_attention_chunk(decodes, chunks, gone or skips, chunk_size, block_size)
    first = _append_groups(groups, decodes, skips, 1, 0, block_size, window, device)
    skips = skips[len(decodes) :]
    index = 0
    while index < len(chunks):
        short = _count_short_chunks(chunks, index, block_size)
        if short:
            num_tokens = chunks[index][2]
            sequences = [(table, before + now) for table, before, now in chunks[index : index + short]]
            own_skips = skips[index : index + short]
            first = _append_groups(groups, sequences, own_skips, num_tokens, first, block_size, window, device)
            index += short
            continue
        table, before, now = chunks[index]
        for start, end in _cut_into_pieces(before, before + now, window):
            prefix = tuple(_prefix_slices(table, start, end, skips[index], block_size, window, device))
            planned.append(Chunk(first, first + end - start, prefix))
            first += end - start
        index += 1
    return AttentionMetadata(first, slot_mapping, tuple(groups), tuple(planned), window=window)


def _split_by_attention_chunk(
    decodes: list[tuple[list[int], int]],
    chunks: list[tuple[list[int], int, int]],
    gone: Sequence[int],
    chunk_size: int,
    block_size: int,
) -> tuple[list[tuple[list[int], int]], list[tuple[list[int], int, int]], list[int]]:
    """Cut the step at the boundaries of attention chunks, so that tokens see all tokens before them; each piece gets
    the table of its own chunk. The third result is the number of tokens of another chunk in the first block of each.
    ```
    positions   |-- chunk of positions --|-- chunk of positions --|
    blocks      |     |     |     |     |     |     |     |
    a step                       |- piece -|-- piece --|           the second piece's table starts with the fifth block
    ```
    """
    cut_decodes, pieces, skips = [], [], []
    for (table, length), before_table in zip(decodes, gone[: len(decodes)], strict=True):
        own = _chunk_of(length - 1, before_table, chunk_size)
        first, skip = divmod(max(0, own[0]), block_size)
        cut_decodes.append((table[first:], length - first * block_size))
        skips.append(skip)
    for (table, before, now), before_table in zip(chunks, gone[len(decodes) :], strict=True):
        start, end = before, before + now
        while start < end:
            own = _chunk_of(start, before_table, chunk_size)
            first, skip = divmod(max(0, own[0]), block_size)
            stop = min(end, own[1])
            pieces.append((table[first:], start - first * block_size, stop - start))
            skips.append(skip)
            start = stop
    return cut_decodes, pieces, skips


def _chunk_of(place: int, before_table: int, chunk_size: int) -> tuple[int, int]:
    """Return [first, last) of the attention chunk that contains a place. All three are counted from the start of the
    table, which is before_table tokens into the sequence; the chunk may start before it.
    """
    first = (place + before_table) // chunk_size * chunk_size - before_table
    return first, first + chunk_size


def plan_cpu_reads(metadata: AttentionMetadata, num_heads: int, cache: torch.Tensor) -> AttentionMetadata:
    """The same step, for a float32 cache on the CPU: its groups of single tokens will read the cache in place.

    cache: any layer's keys or values. Other devices and dtypes get their metadata back.
    """
    if cache.device.type != "cpu" or cache.dtype != torch.float32:
        return metadata
    groups = tuple(replace(group, reads=_plan_group(group, num_heads, cache.shape)) for group in metadata.decode_groups)
    return replace(metadata, decode_groups=groups)


def _plan_group(group: DecodeGroup, num_heads: int, cache_shape: torch.Size) -> ReadPattern | None:
    """Plan the reads of one group; None for several tokens per sequence, and if a profiling step reads one block
    repeatedly: a sparse row cannot have more places than the matrix has columns.
    """
    if group.num_tokens > 1 or group.length > cache_shape[:3].numel():
        return None
    num_sequences = group.last - group.first
    mask = None if group.mask is None else group.mask.view(num_sequences, 1, group.length)
    return plan_reads(group.blocks.view(num_sequences, -1), group.length, mask, num_heads, cache_shape)


def _count_short_chunks(chunks: list[tuple[list[int], int, int]], index: int, block_size: int) -> int:
    """Return the number of chunks from `index` on that can be grouped: few tokens, equally many in each, and a
    non-increasing number of blocks.
    """
    num_tokens = chunks[index][2]
    if not 1 < num_tokens <= MAX_GROUPED_TOKENS:
        return 0
    most = GATHER_TOKENS // block_size
    for number, (_, before, now) in enumerate(chunks[index:]):
        blocks = -(-(before + now) // block_size)
        if now != num_tokens or blocks > most:
            return number
        most = blocks
    return len(chunks) - index


def _append_groups(
    groups: list[DecodeGroup],
    sequences: list[tuple[list[int], int]],
    skips: list[int],
    num_tokens: int,
    first: int,
    block_size: int,
    window: int | None,
    device: torch.device,
) -> int:
    """Append groups of sequences (block table, length with the new tokens), longest first, each with `num_tokens` new
    tokens; the first one is token `first` of the batch. Returns the token after the last one.
    """
    counts = [-(-length // block_size) for _, length in sequences]
    for begin, end in pairwise(plan_decode_groups(counts, block_size)) if sequences else ():
        part = slice(begin, end)
        group = _group(sequences[part], counts[part], skips[part], num_tokens, first, block_size, window, device)
        groups.append(group)
        first = group.last
    return first


def _group(
    sequences: list[tuple[list[int], int]],
    counts: list[int],
    skips: list[int],
    num_tokens: int,
    first: int,
    block_size: int,
    window: int | None,
    device: torch.device,
) -> DecodeGroup:
    """Pad block tables with the sequence's own last block, so that padding never touches unmapped memory."""
    width = max(counts)
    lengths = [length for _, length in sequences]
    length = width * block_size
    mask = None
    if len(sequences) == 1:
        length = lengths[0]
    if len(sequences) > 1 or num_tokens > 1 or any(skips) or (window is not None and length > window):
        positions = torch.arange(length, device=device)
        newest = torch.arange(1 - num_tokens, 1, device=device)
        seen = torch.tensor(lengths, device=device).view(-1, 1, 1, 1) + newest.view(-1, 1)
        mask = torch.zeros(seen.shape[:3] + positions.shape, device=device)
        mask.masked_fill_(positions >= seen, float("-inf"))
        if window is not None:
            mask.masked_fill_(positions < seen - window, float("-inf"))
        if any(skips):
            mask.masked_fill_(positions < torch.tensor(skips, device=device).view(-1, 1, 1, 1), float("-inf"))
    blocks: list[int] = []
    for (table, _), count in zip(sequences, counts, strict=True):
        blocks += table[:count]
        blocks += [table[count - 1]] * (width - count)
    run = first_of_run(blocks) if len(sequences) == 1 else None
    last = first + len(sequences) * num_tokens
    ids = torch.tensor(blocks, dtype=torch.int64, device=device)
    return DecodeGroup(first, last, length, ids, mask, run, num_tokens)


def _cut_into_pieces(start: int, end: int, window: int | None) -> list[tuple[int, int]]:
    """Cut a chunk's tokens [start, end) so that all tokens of a piece see each other and the token before the piece."""
    if window is None:
        return [(start, end)]
    step = max(1, min(window - 1, MAX_PIECE_TOKENS))
    return [(first, min(first + step, end)) for first in range(start, end, step)]


def _prefix_slices(
    table: list[int], start: int, end: int, skip: int, block_size: int, window: int | None, device: torch.device
) -> list[PrefixSlice]:
    """Return the earlier tokens that tokens [start, end) of a sequence see, in slices of whole blocks. None of them
    sees the first `skip` tokens (fewer than a block).
    """
    if start <= skip:
        return []
    slices = []
    step = GATHER_TOKENS // block_size
    begin = 0 if window is None else max(0, start - window + 1) // block_size
    for first in range(begin, -(-start // block_size), step):
        length = min(GATHER_TOKENS, start - first * block_size)
        blocks = table[first : first + -(-length // block_size)]
        tensor = torch.tensor(blocks, dtype=torch.int64, device=device)
        mask = None
        if window is not None and first * block_size < end - window:
            seen_from = torch.arange(start, end, device=device).unsqueeze(1) - window + 1
            positions = torch.arange(first * block_size, first * block_size + length, device=device)
            mask = torch.zeros(end - start, length, device=device)
            mask = mask.masked_fill_(positions < seen_from, float("-inf")).view(1, 1, end - start, length)
        slices.append(PrefixSlice(length, tensor, first_of_run(blocks), mask, skip if first == 0 else 0))
    return slices if window is None or window > 1 else []


def paged_attention_reference(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: list[int],
    start: int,
    scale: float,
    *,
    window: int | None = None,
    chunk_size: int | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Compute one sequence in float32: tokens [start, start + len(query)) against all cached tokens up to each."""
    num_tokens, num_heads, _ = query.shape
    end = start + num_tokens
    group = num_heads // key_cache.shape[2]
    keys = key_cache[block_table].flatten(0, 1)[:end].repeat_interleave(group, dim=1).float()
    values = value_cache[block_table].flatten(0, 1)[:end].repeat_interleave(group, dim=1).float()
    scores = torch.einsum("qhd,khd->hqk", query.float(), keys) * scale
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    rows = torch.arange(start, end, device=query.device).unsqueeze(1)
    hidden = torch.arange(end, device=query.device) > rows
    if window is not None:
        hidden |= torch.arange(end, device=query.device) <= rows - window
    if chunk_size is not None:
        hidden |= torch.arange(end, device=query.device) < rows // chunk_size * chunk_size
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat([sinks.float().view(-1, 1, 1).expand(-1, num_tokens, 1), scores], dim=-1)
    weights = scores.softmax(dim=-1)[..., -end:]
    return torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)


def attend_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    is_causal: bool = False,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `attend` in plain torch and float32, for every device."""
    scores = torch.matmul(query.float(), key.float().transpose(-1, -2)) * scale
    if mask is not None:
        scores = scores + mask
    if is_causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).triu_(1)
        scores = scores.masked_fill(future, float("-inf"))
    lse = scores.logsumexp(dim=-1)
    output = torch.matmul((scores - lse.unsqueeze(-1)).exp(), value.float())
    return output.to(query.dtype), lse


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    is_causal: bool = False,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense attention with its log-sum-exp. query [b, h, rows, d]; key, value [b, h, length, d], any strides.

    Returns ([b, h, rows, d], [b, h, rows] float32). CPU: torch's flash kernel.
    """
    if query.device.type == "cpu":
        output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale
        )
        return output, lse
    return attend_reference(query, key, value, scale=scale, is_causal=is_causal, mask=mask)


def attend_capped(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    softcap: float,
    is_causal: bool = False,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `attend` with soft-capped scores. With is_causal the rows are the keys' last tokens, in order; each sees
    the keys up to itself.
    """
    rows, length = query.shape[-2], key.shape[-2]
    outputs, lses = [], []
    for first in range(0, rows, CAPPED_ROWS):
        last = min(first + CAPPED_ROWS, rows)
        seen = length - rows + last if is_causal else length
        scores = torch.matmul(query[..., first:last, :].float(), key[..., :seen, :].float().transpose(-1, -2))
        scores = scores.mul_(scale / softcap).tanh_().mul_(softcap)
        if mask is not None:
            scores = scores + (mask if mask.shape[-2] == 1 else mask[..., first:last, :])
        if is_causal:
            own = torch.arange(first, last, device=query.device).unsqueeze(1) + length - rows
            scores.masked_fill_(torch.arange(seen, device=query.device) > own, float("-inf"))
        lse = scores.logsumexp(dim=-1)
        largest = lse.masked_fill(lse == float("-inf"), 0.0).unsqueeze(-1)  # a row may see none of these keys
        outputs.append(torch.matmul(scores.sub_(largest).exp_(), value[..., :seen, :].float()))
        lses.append(lse)
    return torch.cat(outputs, dim=-2).to(query.dtype), torch.cat(lses, dim=-1)


def merge_key_ranges(
    output: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge the attention over two disjoint key ranges. Shapes as `attend` returns."""
    merged = torch.logaddexp(lse, other_lse)
    left = (lse - merged).exp().unsqueeze(-1)
    right = (other_lse - merged).exp().unsqueeze(-1)
    return (output * left + other * right).to(output.dtype), merged


def add_sinks(output: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Add sinks to attention that was computed without. output [..., d]; lse, sinks broadcast to [...]."""
    return (output * torch.sigmoid(lse - sinks).unsqueeze(-1)).to(output.dtype)


@dataclass(frozen=True, slots=True)
class ScaledCache:
    """A cache that is read in another dtype than it is stored in."""

    stored: torch.Tensor
    dtype: torch.dtype
    scale: float

    @property
    def shape(self) -> torch.Size:
        return self.stored.shape


Cache = torch.Tensor | ScaledCache


def _read_blocks(cache: Cache, blocks: torch.Tensor, run: int | None) -> torch.Tensor:
    """Return [num_blocks, block_size, kv heads, head size] of these blocks: in place if they are consecutive, otherwise
    gathered.
    """
    if isinstance(cache, ScaledCache):
        return as_read(_read_blocks(cache.stored, blocks, run), cache.dtype, cache.scale)
    if run is not None:
        return cache[run : run + blocks.shape[0]]
    return torch.index_select(cache, 0, blocks)


def _attend_decodes(
    query: torch.Tensor,
    key_cache: Cache,
    value_cache: Cache,
    group: DecodeGroup,
    scale: float,
    sinks: torch.Tensor | None,
    softcap: float | None,
) -> torch.Tensor:
    """Return [tokens, heads, head size]. The heads of one kv head are the rows of one attention call."""
    reads = group.reads if softcap is None else None
    if reads is not None and isinstance(key_cache, torch.Tensor) and isinstance(value_cache, torch.Tensor):
        rows = query[group.first : group.last]
        return decode_attention_cpu(rows, key_cache, value_cache, reads, scale, sinks=sinks)
    attend_rows = attend if softcap is None else partial(attend_capped, softcap=softcap)
    _, num_heads, head_size = query.shape
    num_kv_heads, m = key_cache.shape[2], group.num_tokens
    n, heads, mask = (group.last - group.first) // m, num_heads // num_kv_heads, group.mask
    keys = _read_blocks(key_cache, group.blocks, group.run).view(n, -1, num_kv_heads, head_size)[:, : group.length]
    values = _read_blocks(value_cache, group.blocks, group.run).view(n, -1, num_kv_heads, head_size)[:, : group.length]
    if m == 1:
        rows = query[group.first : group.last].view(n, num_kv_heads, heads, head_size)
        output, lse = attend_rows(rows, keys.transpose(1, 2), values.transpose(1, 2), scale=scale, mask=mask)
        if sinks is not None:
            output = add_sinks(output, lse, sinks.view(num_kv_heads, heads))
        return output.reshape(n, num_heads, head_size)
    # With several tokens per sequence, rows are (head, token), and the token mask is the same for every head.
    rows = query[group.first : group.last].view(n, m, num_kv_heads, heads, head_size).permute(0, 2, 3, 1, 4)
    rows = rows.reshape(n, num_kv_heads, heads * m, head_size)
    assert mask is not None
    mask = mask.repeat(1, 1, heads, 1)
    output, lse = attend_rows(rows, keys.transpose(1, 2), values.transpose(1, 2), scale=scale, mask=mask)
    if sinks is not None:
        output = add_sinks(output, lse, sinks.view(num_kv_heads, heads).repeat_interleave(m, dim=1))
    output = output.reshape(n, num_kv_heads, heads, m, head_size).permute(0, 3, 1, 2, 4)
    return output.reshape(n * m, num_heads, head_size).contiguous()


def _attend_chunk(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: Cache,
    value_cache: Cache,
    chunk: Chunk,
    scale: float,
    sinks: torch.Tensor | None,
    softcap: float | None,
) -> torch.Tensor:
    """Return [chunk tokens, heads, head size]. kv heads are the batch dimension, so that their query heads share one
    view.
    """
    num_heads, head_size = query.shape[1:]
    num_kv_heads = key.shape[1]
    tokens = slice(chunk.first, chunk.last)
    m, group = chunk.last - chunk.first, num_heads // num_kv_heads
    rows = query[tokens]

    def part(
        keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None = None, *, is_causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend over some keys [length, kv heads, d]: return [kv heads, group, m, d] and its log-sum-exp."""
        if mask is None and softcap is None and can_multiply(rows, keys.shape[0]):
            wants_lse = bool(chunk.prefix) or sinks is not None
            return prefill_attention_cpu(rows, keys, values, scale=scale, is_causal=is_causal, wants_lse=wants_lse)
        shared = [t.transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1) for t in (keys, values)]  # no copy
        by_head = rows.view(m, num_kv_heads, group, head_size).permute(1, 2, 0, 3)
        if softcap is not None:
            return attend_capped(by_head, *shared, scale=scale, softcap=softcap, is_causal=is_causal, mask=mask)
        return attend(by_head, *shared, scale=scale, is_causal=is_causal, mask=mask)

    output, lse = part(key[tokens], value[tokens], is_causal=True)
    for cached in chunk.prefix:
        seen = slice(cached.skip, cached.length)
        keys = _read_blocks(key_cache, cached.blocks, cached.run).flatten(0, 1)[seen]
        values = _read_blocks(value_cache, cached.blocks, cached.run).flatten(0, 1)[seen]
        output, lse = merge_key_ranges(output, lse, *part(keys, values, cached.mask, is_causal=False))
    if sinks is not None:
        output = add_sinks(output, lse, sinks.view(num_kv_heads, group, 1))
    return output.permute(2, 0, 1, 3).reshape(m, num_heads, head_size)


def paged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
    *,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> torch.Tensor:
    """Return the attention of a step; sinks [num_heads] float32.

    Raises:
        ValueError: shapes do not match, or a soft cap on CUDA, whose kernels support none.
    """
    if softcap is not None and query.is_cuda:
        raise ValueError("paged_attention: soft-capped scores are supported on the CPU only")
    if query.shape[1] % key_cache.shape[2] or query.shape[2] != key_cache.shape[3]:
        raise ValueError(
            f"paged_attention: query {list(query.shape)} does not fit the cache {list(key_cache.shape)}: "
            f"num_heads must be a multiple of num_kv_heads, and head_size equal"
        )
    attend = partial(
        attend_paged_batch if query.is_cuda else attend_paged_batch_reference,
        window=metadata.window,
        chunk_size=metadata.chunk_size,
        sinks=sinks,
        key_scale=key_scale,
        value_scale=value_scale,
    )
    if metadata.outside is not None:
        return metadata.outside(
            query, lambda rows, batch, y: attend(rows, key_cache, value_cache, batch, scale, output=y)
        )
    if metadata.paged is not None:
        return attend(query, key_cache, value_cache, metadata.paged, scale)
    if key_cache.dtype == query.dtype:
        return _attend_step(query, key, value, key_cache, value_cache, metadata, scale, sinks, softcap)
    dtype = query.dtype
    return _attend_step(
        query,
        as_read(as_stored(key, key_cache.dtype, key_scale), dtype, key_scale),
        as_read(as_stored(value, value_cache.dtype, value_scale), dtype, value_scale),
        ScaledCache(key_cache, dtype, key_scale),
        ScaledCache(value_cache, dtype, value_scale),
        metadata,
        scale,
        sinks,
        softcap,
    )


def _attend_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: Cache,
    value_cache: Cache,
    metadata: AttentionMetadata,
    scale: float,
    sinks: torch.Tensor | None,
    softcap: float | None,
) -> torch.Tensor:
    """Compute the step on the CPU: group by group, chunk by chunk."""
    groups, chunks = metadata.decode_groups, metadata.chunks
    if len(groups) == 1 and not chunks and metadata.num_tokens == query.shape[0]:
        return _attend_decodes(query, key_cache, value_cache, groups[0], scale, sinks, softcap)
    output = torch.empty_like(query)
    for group in groups:
        output[group.first : group.last] = _attend_decodes(query, key_cache, value_cache, group, scale, sinks, softcap)
    for chunk in chunks:
        attended = _attend_chunk(query, key, value, key_cache, value_cache, chunk, scale, sinks, softcap)
        output[chunk.first : chunk.last] = attended
    output[metadata.num_tokens :] = 0
    return output

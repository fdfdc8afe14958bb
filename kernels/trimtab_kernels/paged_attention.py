"""Attention over a paged KV cache, for any mix of decodes and prefill chunks.

query                   [num_tokens, num_heads, head_size]                 fp32 | bf16 | fp16
key, value              [num_tokens, num_kv_heads, head_size]              this step's; already written to the cache
key_cache, value_cache  [num_blocks, block_size, num_kv_heads, head_size], perhaps of another dtype (float8: times
                        key_scale, value_scale); then this step's keys and values count as rounded by it, too
y                       [num_tokens, num_heads, head_size]
Query head h reads kv head h // (num_heads // num_kv_heads). Softmax statistics are fp32.

The batch is laid out as decodes first, grouped so that padding stays small, then one chunk after another:
```
tokens   |- decode group 0 -|- decode group 1 -|---- chunk 0 ----|-- chunk 1 --|
```
- A decode group gathers its blocks to [sequences, length, kv heads, head size] and runs one attention call in which
  the query heads of a kv head are the rows. A group's gather is at most GATHER_TOKENS long. On the CPU in float32 it
  reads them in place instead (decode_attention_cpu).
- Short chunks of equally many tokens in a row, such as drafts to be verified, form groups as well: their tokens are
  rows beside the heads, and a mask keeps each from seeing those after it.
- A chunk attends causally to its own fresh keys (no gather, no mask), and to the cached tokens before it in slices of
  GATHER_TOKENS; the parts are merged by their log-sum-exp (Dao 2023, arXiv:2307.08691). So neither a mask nor a
  gather grows with the context, and the workspace is bounded. Long chunks go by matrix products
  (prefill_attention_cpu), short ones through torch's flash kernel.
- Blocks that lie in a row in the cache are read in place.
- Under a window each token sees the last `window` tokens, itself included. Block tables then begin where the step's
  first token sees, so that a mask hides a block's worth at most; a chunk is cut into pieces shorter than the window,
  each a chunk of its own, of which a mask hides only what it sees of the tokens before it.
- Where positions are cut into chunks, of which each token sees its own (Llama 4), what a step has of each chunk is a
  sequence of its own, whose block table begins where that chunk does; `skip` are the tokens before it in its block.
- Sinks, one number per head, are weights in the softmax that no value has (gpt-oss): exp(sink) beside the sum of the
  scores' exponentials. They are put in at the end, by the log-sum-exp.
- A soft cap bends every score to cap * tanh(score / cap) before it is masked (Gemma 2); then attention is plain torch,
  a few rows at a time.
That is the CPU. On CUDA the step goes to the Triton kernels, which read the cache by block tables (paged_batch).
Bound by memory for decodes: 2 * sum(lengths) * num_kv_heads * head_size * itemsize bytes per layer. Source: own.
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
"""Part of a decode group that may be padding: a second call costs more than reading that much too much."""
MIN_GROUP_PADDING_BLOCKS = 32
"""Padding blocks that are always allowed: reading them is cheaper than another call."""
MAX_PIECE_TOKENS = 512
"""Tokens of a chunk's piece under a window: the mask of what they see before it is as high as they are many."""
CAPPED_ROWS = 256
"""Rows whose softly capped scores are there at once: as many as there are keys for each, and several times over."""
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
    """[1, 1, tokens of the chunk, length]: 0, or -inf where a window ends; None: every token sees all of it."""
    skip: int = 0
    """So many of the tokens no token sees."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [first, last) of the batch are one sequence's; `prefix` are the cached tokens before them, in slices.

    A long decode is a chunk of one token.
    """

    first: int
    last: int
    prefix: tuple[PrefixSlice, ...]


Attend = Callable[[torch.Tensor, PagedBatch, torch.Tensor], torch.Tensor]
"""One layer's attention: of a query and a batch, into an output like the query."""


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
    """The step as the Triton kernels take it: on CUDA, where there are neither groups nor chunks."""
    native: NativeBatch | None = None
    """The step as the compiled layers take it, then the same."""
    is_padded: bool = False
    """Some slots are negative: their keys and values are not written."""
    outside: Callable[[torch.Tensor, Attend], torch.Tensor] | None = None
    """Takes the query and does the layer's attention itself: outside of the graph that is being captured."""
    window: int | None = None
    """How many tokens each token sees, itself included; None: all before it."""
    chunk_size: int | None = None
    """Of the chunks of positions that each token sees its own of, where a step goes to the Triton kernels."""


def max_decode_tokens(device: torch.device) -> int:
    """The longest context whose decode is grouped with others; a longer one is a chunk of one token. The CPU gathers
    keys; the Triton kernels read them in place, up to what an int32 position can say."""
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
    """The first block when all follow one another in the cache, else None."""
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
    """Plan a step. decodes: (block table, context length with the new token), longest first, one token each, at most
    GATHER_TOKENS long; chunks: (block table, tokens before, tokens now). `slots`: one per real token, in this order.
    is_native: the compiled layers of the CPU will take it, which know no window. Under a window tables and lengths may
    begin where the first of the tokens sees; so they may where positions are cut into chunks of chunk_size, and `gone`
    then counts the tokens before each table (empty: none anywhere).
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
        decodes, chunks, skips = _cut_to_chunks(decodes, chunks, gone or skips, chunk_size, block_size)
    first = _add_groups(groups, decodes, skips, 1, 0, block_size, window, device)
    skips = skips[len(decodes) :]
    index = 0
    while index < len(chunks):
        short = _short_chunks(chunks, index, block_size)
        if short:
            num_tokens = chunks[index][2]
            sequences = [(table, before + now) for table, before, now in chunks[index : index + short]]
            own_skips = skips[index : index + short]
            first = _add_groups(groups, sequences, own_skips, num_tokens, first, block_size, window, device)
            index += short
            continue
        table, before, now = chunks[index]
        for start, end in _pieces(before, before + now, window):
            prefix = tuple(_prefix_slices(table, start, end, skips[index], block_size, window, device))
            planned.append(Chunk(first, first + end - start, prefix))
            first += end - start
        index += 1
    return AttentionMetadata(first, slot_mapping, tuple(groups), tuple(planned), window=window)


def _cut_to_chunks(
    decodes: list[tuple[list[int], int]],
    chunks: list[tuple[list[int], int, int]],
    gone: Sequence[int],
    chunk_size: int,
    block_size: int,
) -> tuple[list[tuple[list[int], int]], list[tuple[list[int], int, int]], list[int]]:
    """The same step as tokens that see all before them: cut where chunks of positions end, each piece with the table of
    its own chunk. The third are the tokens of another chunk in the first block of each.
    ```
    positions   |-- chunk of positions --|-- chunk of positions --|
    blocks      |     |     |     |     |     |     |     |
    a step                       |- piece -|-- piece --|           the second piece's table begins with the fifth block
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
    """[first, last) of the chunk of positions that a place lies in. All three are counted from where the table begins,
    which is before_table tokens into the sequence; the chunk may begin before it."""
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
    """None for several tokens per sequence, and where a profiling step reads one block over and over: a sparse row
    cannot have more places than the matrix has columns."""
    if group.num_tokens > 1 or group.length > cache_shape[:3].numel():
        return None
    num_sequences = group.last - group.first
    mask = None if group.mask is None else group.mask.view(num_sequences, 1, group.length)
    return plan_reads(group.blocks.view(num_sequences, -1), group.length, mask, num_heads, cache_shape)


def _short_chunks(chunks: list[tuple[list[int], int, int]], index: int, block_size: int) -> int:
    """How many chunks from `index` on can be grouped: equally many tokens each, few; not growing blocks."""
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


def _add_groups(
    groups: list[DecodeGroup],
    sequences: list[tuple[list[int], int]],
    skips: list[int],
    num_tokens: int,
    first: int,
    block_size: int,
    window: int | None,
    device: torch.device,
) -> int:
    """Append groups of sequences (block table, length with the new tokens), longest first, of `num_tokens` new tokens
    each, which begin at token `first` of the batch. Returns where they end."""
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


def _pieces(start: int, end: int, window: int | None) -> list[tuple[int, int]]:
    """A chunk's tokens [start, end), cut so that all of a piece see each other, and all see the token before it."""
    if window is None:
        return [(start, end)]
    step = max(1, min(window - 1, MAX_PIECE_TOKENS))
    return [(first, min(first + step, end)) for first in range(start, end, step)]


def _prefix_slices(
    table: list[int], start: int, end: int, skip: int, block_size: int, window: int | None, device: torch.device
) -> list[PrefixSlice]:
    """What tokens [start, end) of a sequence see of those before them, in slices of whole blocks; none of them sees the
    first `skip`, fewer than a block has."""
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
    """One sequence, float32, no tricks: tokens [start, start + len(query)) against all cached tokens up to each."""
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
    """`attend` in plain torch and float32, for every device."""
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
    """`attend` with scores that are softly capped. With is_causal the rows are the keys' last tokens, in their order;
    each sees those up to itself."""
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
        largest = lse.masked_fill(lse == float("-inf"), 0.0).unsqueeze(-1)  # a row may see nothing of these keys
        outputs.append(torch.matmul(scores.sub_(largest).exp_(), value[..., :seen, :].float()))
        lses.append(lse)
    return torch.cat(outputs, dim=-2).to(query.dtype), torch.cat(lses, dim=-1)


def merge_parts(
    output: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of two disjoint key ranges, from the attention over each. Shapes as `attend` returns."""
    merged = torch.logaddexp(lse, other_lse)
    left = (lse - merged).exp().unsqueeze(-1)
    right = (other_lse - merged).exp().unsqueeze(-1)
    return (output * left + other * right).to(output.dtype), merged


def with_sinks(output: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Attention with sinks beside the keys, from that without. output [..., d]; lse, sinks broadcast to [...]."""
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
    """[num_blocks, block_size, kv heads, head size] of these blocks: in place when they lie in a row, else gathered."""
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
    """[tokens, heads, head size]. The heads of one kv head are the rows of one attention call."""
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
            output = with_sinks(output, lse, sinks.view(num_kv_heads, heads))
        return output.reshape(n, num_heads, head_size)
    # Several tokens per sequence: rows are (head, token), and the mask of the tokens holds for every head.
    rows = query[group.first : group.last].view(n, m, num_kv_heads, heads, head_size).permute(0, 2, 3, 1, 4)
    rows = rows.reshape(n, num_kv_heads, heads * m, head_size)
    assert mask is not None
    mask = mask.repeat(1, 1, heads, 1)
    output, lse = attend_rows(rows, keys.transpose(1, 2), values.transpose(1, 2), scale=scale, mask=mask)
    if sinks is not None:
        output = with_sinks(output, lse, sinks.view(num_kv_heads, heads).repeat_interleave(m, dim=1))
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
    """[chunk tokens, heads, head size]. kv heads are the batch dimension, so that their query heads share one view."""
    num_heads, head_size = query.shape[1:]
    num_kv_heads = key.shape[1]
    tokens = slice(chunk.first, chunk.last)
    m, group = chunk.last - chunk.first, num_heads // num_kv_heads
    rows = query[tokens]

    def part(
        keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None = None, *, is_causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows over some keys [length, kv heads, d]: [kv heads, group, m, d] and its log-sum-exp."""
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
        output, lse = merge_parts(output, lse, *part(keys, values, cached.mask, is_causal=False))
    if sinks is not None:
        output = with_sinks(output, lse, sinks.view(num_kv_heads, group, 1))
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
    """Attention of a step; sinks [num_heads] float32. Raises ValueError where shapes do not fit, and for a soft cap on
    CUDA, whose kernels have none."""
    if softcap is not None and query.is_cuda:
        raise ValueError("paged_attention: scores are softly capped on the CPU alone")
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
    """On the CPU: group by group, chunk by chunk."""
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

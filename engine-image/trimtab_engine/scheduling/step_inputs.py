"""The inputs of one step as plain values, sent unchanged to every rank of an engine. Pure."""

from collections.abc import Iterator

import msgspec

from trimtab_engine.multimodal.items import MultiModalItem
from trimtab_engine.scheduling.batch import ScheduledSequence
from trimtab_engine.scheduling.encoder_cache import key_of, spans_between
from trimtab_engine.scheduling.request import Request

Unknown = tuple[int, Request, int]
"""(index in token_ids, request, position) of a token that the step in flight samples; token_ids holds 0 there."""


class StepShape(msgspec.Struct, array_like=True, frozen=True):
    """Shape of a step that selects its CUDA graph. `tokens_per_sequence` is set if all sequences have equally many
    tokens, else None. `has_items`: embeddings of images or videos are used; tokens_per_sequence is then None.
    `has_adapters`: some tokens belong to requests with an adapter.
    """

    num_tokens: int
    tokens_per_sequence: int | None
    has_items: bool = False
    has_adapters: bool = False


class GroupInputs(msgspec.Struct, array_like=True):
    """KV that the layers of one KV group read and write. decodes: (block table, context length with the new token);
    chunks: (block table, tokens before, tokens now). Block tables may be longer than needed. If blocks were freed
    before a window, tables and counts start after them.
    """

    decodes: list[tuple[list[int], int]]
    chunks: list[tuple[list[int], int, int]]

    def slots(self, block_size: int) -> list[int]:
        """Return the KV cache slot of each token's keys and values, in token order."""
        slots = [table[(n - 1) // block_size] * block_size + (n - 1) % block_size for table, n in self.decodes]
        for table, start, count in self.chunks:
            slots += [table[p // block_size] * block_size + p % block_size for p in range(start, start + count)]
        return slots


class StepInputs(msgspec.Struct, array_like=True):
    """The batch in token order: decodes first, longest first, then one chunk after another. token_ids and positions
    have one entry per token. `sampled` are the tokens whose logits are needed, in the order of the scheduled sequences.
    `groups`: one entry per KV group, at least one.
    """

    token_ids: list[int]
    positions: list[int]
    sampled: list[int]
    groups: list[GroupInputs]
    scored: list[tuple[int, int, int]] = []
    """(index in token_ids, next prompt token, number of top tokens) of every token whose logits score the next prompt
    token, in the order of the scheduled sequences.
    """
    agreed: StepShape | None = None
    """Agreement of data-parallel ranks in lockstep: minimum number of rows including padding, whether all steps are
    uniform, and whether any has adapters. None if the core runs its step independently.
    """
    axes: list[list[int]] = []
    """Positions over time, height and width, each with an entry per token; none: all three are `positions`."""
    displaced: list[bytes] = []
    """Keys of embeddings to drop, before anything is computed."""
    missing: list[tuple[bytes, MultiModalItem]] = []
    """Images and videos to compute then, each with the key by which its embeddings are kept."""
    placed: list[tuple[int, int, bytes, int]] = []
    """(index in token_ids, number of tokens, key, first row) of tokens whose embeddings come from cached items."""
    pooled: list[tuple[int, int]] = []
    """(index in token_ids, number of tokens) per run of tokens whose hidden states are summed, in the order of the
    scheduled sequences.
    """
    adapters: list[tuple[int, int, int]] = []
    """(index in token_ids, number of tokens, slot) of tokens to which an adapter applies."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def rope_positions(self) -> list[int] | list[list[int]]:
        """Return RoPE positions: one per token, or one list per axis."""
        return self.axes or self.positions

    @property
    def num_sampled(self) -> int:
        return len(self.sampled)

    @property
    def shape(self) -> StepShape:
        """Return the shape that selects the step's graph, equal on all ranks that compute it together. A step is
        uniform if it has decodes only, or chunks of one length only.
        """
        if self.agreed is not None:
            return self.agreed
        num_tokens, decodes, chunks = len(self.token_ids), self.groups[0].decodes, self.groups[0].chunks
        has_adapters = bool(self.adapters)
        if self.placed:
            return StepShape(num_tokens, None, has_items=True, has_adapters=has_adapters)
        if not chunks:
            return StepShape(num_tokens, 1 if decodes else None, has_adapters=has_adapters)
        longest = chunks[0][2]
        is_uniform = not decodes and all(now == longest for _, _, now in chunks)
        return StepShape(num_tokens, longest if is_uniform else None, has_adapters=has_adapters)

    def gone(self, group: GroupInputs) -> list[int]:
        """Return the number of tokens freed before each table of a group, decodes first and then chunks."""
        before = [position + 1 - length for position, (_, length) in zip(self.positions, group.decodes, strict=False)]
        index = len(group.decodes)
        for _, start, count in group.chunks:
            before.append(self.positions[index] - start)
            index += count
        return before

    def written_slots(self, block_size: int) -> Iterator[int]:
        """Yield the slots of all groups that the step writes. Computed on demand."""
        return (slot for group in self.groups for slot in group.slots(block_size))


NO_INPUTS = StepInputs([], [], [], [GroupInputs([], [])])


def flatten(
    sequences: list[ScheduledSequence],
    *,
    block_size: int,
    max_decode_tokens: int,
    num_groups: int = 1,
    with_items: bool = False,
    with_adapters: bool = False,
) -> tuple[StepInputs, list[Unknown]]:
    """Lay out a batch for `num_groups` KV groups.

    A decode whose context exceeds max_decode_tokens becomes a chunk of one token. Chunks of equal length are adjacent,
    longest context first, so that attention can group them.

    Args:
        with_items: The model computes images and videos, and some prompts may contain them.
        with_adapters: Some requests may have an adapter.
    """
    with_items = with_items and any(s.request.spans for s in sequences)
    with_adapters = with_adapters and any(s.request.adapter is not None for s in sequences)
    is_special = num_groups > 1 or with_items or with_adapters
    if sequences and not is_special and _are_plain_decodes(sequences, max_decode_tokens):
        return _flatten_decodes(sequences, block_size)
    decodes: list[tuple[ScheduledSequence, int, int]] = []  # with its first row and the number of its rows
    chunks: list[tuple[ScheduledSequence, int, int]] = []
    num_rows = 0
    for sequence in sequences:
        own_rows = num_sampled(sequence) if sequence.draft_token_ids else int(sequence.samples)
        is_decode = sequence.num_tokens == 1 and sequence.start < max_decode_tokens
        (decodes if is_decode else chunks).append((sequence, num_rows, own_rows))
        num_rows += own_rows
    decodes.sort(key=lambda entry: -entry[0].start)
    chunks.sort(key=lambda entry: (entry[0].num_tokens, -entry[0].start))
    token_ids: list[int] = []
    positions: list[int] = []
    sampled = [0] * num_rows
    unknown: list[Unknown] = []
    first_index: dict[int, int] = {}
    for sequence, first_row, own_rows in (*decodes, *chunks):
        request, start, count = sequence.request, sequence.start, sequence.num_tokens
        if request.sampling.prompt_logprobs is not None or request.pooling is not None:
            first_index[id(sequence)] = len(token_ids)
        if sequence.draft_token_ids:
            token_ids += _with_drafts(sequence)
        elif count > 1:
            token_ids += request.token_ids[start : start + count]
        elif start < len(request.token_ids):
            token_ids.append(request.token_ids[start])
        else:
            unknown.append((len(token_ids), request, start))
            token_ids.append(0)
        if count == 1:
            positions.append(start)
        else:
            positions += range(start, start + count)
        sampled[first_row : first_row + own_rows] = range(len(token_ids) - own_rows, len(token_ids))
    short, long = [entry[0] for entry in decodes], [entry[0] for entry in chunks]
    groups = [_group_inputs(group, short, long, block_size) for group in range(num_groups)]
    inputs = StepInputs(token_ids, positions, sampled, groups)
    if with_items:
        _add_items(inputs, [entry[0] for entry in (*decodes, *chunks)])
    if with_adapters:
        inputs.adapters = _adapters_of([*short, *long])
    if first_index:
        inputs.scored = [entry for s in sequences if id(s) in first_index for entry in _scored(s, first_index[id(s)])]
        found = [(s, pooled) for s in sequences if (pooled := pooled_tokens(s)) is not None]
        inputs.pooled = [(first_index[id(s)] + position - s.start, count) for s, (position, count) in found]
    return inputs, unknown


def in_token_order(sequences: list[ScheduledSequence], *, max_decode_tokens: int) -> list[ScheduledSequence]:
    """Return the sequences in the order of flatten()'s tokens."""
    decodes: list[ScheduledSequence] = []
    chunks: list[ScheduledSequence] = []
    for sequence in sequences:
        is_decode = sequence.num_tokens == 1 and sequence.start < max_decode_tokens
        (decodes if is_decode else chunks).append(sequence)
    decodes.sort(key=lambda sequence: -sequence.start)
    chunks.sort(key=lambda sequence: (sequence.num_tokens, -sequence.start))
    return [*decodes, *chunks]


def _add_items(inputs: StepInputs, sequences: list[ScheduledSequence]) -> None:
    """Set the positions over time, height and width (if the model uses them) and the placeholder tokens of the
    sequences.
    """
    has_axes = any(s.request.rope is not None for s in sequences)
    inputs.axes = [[], [], []] if has_axes else []
    index = 0
    for s in sequences:
        end = s.start + s.num_tokens
        rope, own = s.request.rope, list(range(s.start, end))
        if has_axes:
            places = (own, own, own) if rope is None else rope.between(s.start, end)
            for axis, place in zip(inputs.axes, places, strict=True):
                axis.extend(place)
        for span in spans_between(s.request.spans, s.start, end):
            first, last = max(s.start, span.offset), min(end, span.end)
            key = key_of(s.request, span.item)
            inputs.placed.append((index + first - s.start, last - first, key, first - span.offset))
        index += s.num_tokens


def _adapters_of(sequences: list[ScheduledSequence]) -> list[tuple[int, int, int]]:
    """Return the token runs of the sequences, in this order, to which an adapter applies."""
    found: list[tuple[int, int, int]] = []
    index = 0
    for s in sequences:
        if s.request.adapter is not None:
            found.append((index, s.num_tokens, s.request.adapter.slot))
        index += s.num_tokens
    return found


def _are_plain_decodes(sequences: list[ScheduledSequence], max_decode_tokens: int) -> bool:
    """Return True if each sequence computes only its newest token and needs only the next one."""
    for s in sequences:
        if s.num_tokens != 1 or not s.samples or s.draft_token_ids or s.start >= max_decode_tokens:
            return False
        if not s.request.is_plain and s.request.scores_prompt:
            return False
    return True


def _flatten_decodes(sequences: list[ScheduledSequence], block_size: int) -> tuple[StepInputs, list[Unknown]]:
    """Lay out a decode-only step, by far the most frequent one, column by column."""
    starts = [s.start for s in sequences]
    order = sorted(range(len(starts)), key=starts.__getitem__, reverse=True)
    positions = [starts[place] for place in order]
    requests = [sequences[place].request for place in order]
    sampled = [0] * len(order)
    for index, place in enumerate(order):
        sampled[place] = index
    token_ids = [0] * len(order)
    unknown: list[Unknown] = []
    for index, (request, position) in enumerate(zip(requests, positions, strict=True)):
        if position < len(request.token_ids):
            token_ids[index] = request.token_ids[position]
        else:
            unknown.append((index, request, position))
    decodes = [
        (request.block_tables[0], position + 1 - request.num_out_of_window[0] * block_size)
        for request, position in zip(requests, positions, strict=True)
    ]
    return StepInputs(token_ids, positions, sampled, [GroupInputs(decodes, [])]), unknown


def _group_inputs(
    group: int, decodes: list[ScheduledSequence], chunks: list[ScheduledSequence], block_size: int
) -> GroupInputs:
    """Return one group's tables and lengths, for sequences in token order."""
    short = [
        (s.request.block_tables[group], s.start + 1 - s.request.num_out_of_window[group] * block_size) for s in decodes
    ]
    long = [
        (s.request.block_tables[group], s.start - s.request.num_out_of_window[group] * block_size, s.num_tokens)
        for s in chunks
    ]
    return GroupInputs(short, long)


def num_sampled(sequence: ScheduledSequence) -> int:
    """Return how many of the sequence's tokens get logits: the newest one and every draft among them."""
    if not sequence.samples:
        return 0
    if not sequence.draft_token_ids:
        return 1
    num_drafts = sequence.start + sequence.num_tokens - sequence.request.num_tokens
    return min(sequence.num_tokens, 1 + max(0, num_drafts))


def _with_drafts(sequence: ScheduledSequence) -> list[int]:
    """Return the token ids of the sequence, the last of which are drafts."""
    own, start = sequence.request.token_ids, sequence.start
    end = start + sequence.num_tokens
    return own[start:end] + sequence.draft_token_ids[max(0, start - len(own)) : max(0, end - len(own))]


def num_scored(sequence: ScheduledSequence) -> int:
    """Return how many of the sequence's tokens score the next prompt token: those before the prompt's last one, if
    prompt logprobs were requested.
    """
    request = sequence.request
    if not request.scores_prompt:
        return 0
    return max(0, min(sequence.start + sequence.num_tokens, request.num_prompt_tokens - 1) - sequence.start)


def pooled_tokens(sequence: ScheduledSequence) -> tuple[int, int] | None:
    """Return (position, count) of the sequence's tokens whose hidden states are pooled. None if there are none."""
    pooling = sequence.request.pooling
    if pooling is None:
        return None
    if pooling.needs_all_tokens:
        return sequence.start, sequence.num_tokens
    return (sequence.request.num_prompt_tokens - 1, 1) if sequence.ends_pooling else None


def _scored(sequence: ScheduledSequence, first_index: int) -> list[tuple[int, int, int]]:
    request, start = sequence.request, sequence.start
    likely = request.sampling.prompt_logprobs or 0
    return [(first_index + i, request.token_ids[start + i + 1], likely) for i in range(num_scored(sequence))]

"""One step as plain values: what every rank of an engine computes from. Pure, so that it can be sent as it is."""

import msgspec

from trimtab_engine.batch import ScheduledSequence
from trimtab_engine.request import Request

Unknown = tuple[int, Request, int]
"""(index in token_ids, request, position): a token that the step in flight samples; 0 stands in for it."""


class StepInputs(msgspec.Struct, array_like=True):
    """The batch in the order of its tokens: decodes first, longest first, then one chunk after another.

    token_ids, positions and slots (of the KV cache) have one entry per token. `sampled` are the tokens whose logits are
    wanted, in the order of the scheduled sequences. decodes: (block table, context length with the new token); chunks:
    (block table, tokens before, tokens now). Block tables may be longer than needed.
    """

    token_ids: list[int]
    positions: list[int]
    slots: list[int]
    sampled: list[int]
    decodes: list[tuple[list[int], int]]
    chunks: list[tuple[list[int], int, int]]
    scored: list[tuple[int, int, int]] = []
    """(index in token_ids, next token of the prompt, how many likely tokens) of every token whose logits are to judge
    the next one, in the order of the scheduled sequences."""


def flatten(
    sequences: list[ScheduledSequence], *, block_size: int, max_decode_tokens: int
) -> tuple[StepInputs, list[Unknown]]:
    """Lay out a batch. A decode whose context passes max_decode_tokens is a chunk of one token."""
    decodes: list[tuple[ScheduledSequence, int | None]] = []
    chunks: list[tuple[ScheduledSequence, int | None]] = []
    num_rows = 0
    for sequence in sequences:
        row = num_rows if sequence.samples else None
        num_rows += sequence.samples
        is_decode = sequence.num_tokens == 1 and sequence.start < max_decode_tokens
        (decodes if is_decode else chunks).append((sequence, row))
    decodes.sort(key=lambda entry: -entry[0].start)
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    sampled = [0] * num_rows
    unknown: list[Unknown] = []
    first_index: dict[int, int] = {}
    for sequence, row in (*decodes, *chunks):
        request, start, count = sequence.request, sequence.start, sequence.num_tokens
        blocks = request.block_ids
        if request.sampling.prompt_logprobs is not None:
            first_index[id(sequence)] = len(token_ids)
        if count == 1:
            if start < len(request.token_ids):
                token_ids.append(request.token_ids[start])
            else:
                unknown.append((len(token_ids), request, start))
                token_ids.append(0)
            positions.append(start)
            slots.append(blocks[start // block_size] * block_size + start % block_size)
        else:
            token_ids += request.token_ids[start : start + count]
            positions += range(start, start + count)
            slots += [blocks[p // block_size] * block_size + p % block_size for p in range(start, start + count)]
        if row is not None:
            sampled[row] = len(token_ids) - 1
    inputs = StepInputs(
        token_ids,
        positions,
        slots,
        sampled,
        [(sequence.request.block_ids, sequence.start + 1) for sequence, _ in decodes],
        [(sequence.request.block_ids, sequence.start, sequence.num_tokens) for sequence, _ in chunks],
    )
    if first_index:
        inputs.scored = [entry for s in sequences if id(s) in first_index for entry in _scored(s, first_index[id(s)])]
    return inputs, unknown


def num_scored(sequence: ScheduledSequence) -> int:
    """How many of its tokens judge the next token of the prompt: those before the prompt's last one, if asked for."""
    request = sequence.request
    if request.sampling.prompt_logprobs is None:
        return 0
    return max(0, min(sequence.start + sequence.num_tokens, request.num_prompt_tokens - 1) - sequence.start)


def _scored(sequence: ScheduledSequence, first_index: int) -> list[tuple[int, int, int]]:
    request, start = sequence.request, sequence.start
    likely = request.sampling.prompt_logprobs or 0
    return [(first_index + i, request.token_ids[start + i + 1], likely) for i in range(num_scored(sequence))]

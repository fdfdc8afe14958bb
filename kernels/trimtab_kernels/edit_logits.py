"""Per-request edits of logits before sampling: biases, penalties and bans. The penalties are apply_penalties', counted
on the device, so that a token is penalised before the host has seen it.

logits       [num_rows, vocab_size] fp32, changed in place
table        [num_table_rows, width >= vocab_size] int32, two kinds of rows:
             biases  the bits of an fp32 per token, added to its logit (-inf: never chosen)
             counts  2 * times in the output + 1 if the token is in the prompt
edited       [num_edits] int32: rows of logits, each one once
bias_rows    [num_edits] int32: its row of biases, or -1      count_rows likewise, of counts
presence, frequency, repetition   [num_edits] fp32

```
y = x + bias
token seen (count > 0):      y > 0 ? y / repetition : y * repetition
in the output (count > 1):   y - (frequency * times + presence)
```
A ban is a row of logits, a token, and optionally a condition: last_tokens[source] equals `needed`. Source -1: always.
bans         [num_bans] int32 each: rows, tokens, sources, needed;   last_tokens int64

Memory-bound: a row of logits read and written, and its rows of the table read, 4 bytes per token each. Source: own.
"""

import torch

from trimtab_kernels.launch.jit import cdiv, kernel, next_power_of_2, tl

BLOCK_TOKENS = 2048
"""Tokens of one CTA: 16 per thread with 4 warps, in 16-byte loads."""
BLOCK_BANS = 128
"""Bans of one CTA, one per thread. There are few: their cost is the launch."""
NONE = -1
"""No row of the table, or no source."""


def edit_logits_reference(
    logits: torch.Tensor,
    table: torch.Tensor,
    edited: torch.Tensor,
    bias_rows: torch.Tensor,
    count_rows: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    repetition: torch.Tensor,
) -> None:
    """Compute one row at a time, rounded as apply_penalties rounds."""
    table = table[:, : logits.shape[1]]
    values = zip(edited, bias_rows, count_rows, presence, frequency, repetition, strict=True)
    for row, bias_row, count_row, present, frequent, repeated in values:
        x = logits[row]
        if bias_row >= 0:
            x = x + table[bias_row].view(torch.float32)
        if count_row >= 0:
            counts = table[count_row]
            x = torch.where(counts > 0, torch.where(x > 0, x / repeated, x * repeated), x)
            times = (counts >> 1).float()
            x = torch.where(counts > 1, x - (times * frequent + present), x)
        logits[row] = x


def ban_tokens_reference(
    logits: torch.Tensor,
    rows: torch.Tensor,
    tokens: torch.Tensor,
    sources: torch.Tensor,
    needed: torch.Tensor,
    last_tokens: torch.Tensor,
) -> None:
    """Apply all bans at once."""
    holds = (sources < 0) | (last_tokens[sources.clamp_min(0).long()] == needed)
    logits[rows[holds].long(), tokens[holds].long()] = float("-inf")


@kernel("vocab_size")
def _edit_logits(
    logits: tl.tensor,
    table: tl.tensor,
    edited: tl.tensor,
    bias_rows: tl.tensor,
    count_rows: tl.tensor,
    presence: tl.tensor,
    frequency: tl.tensor,
    repetition: tl.tensor,
    vocab_size: tl.tensor,
    logits_stride: tl.tensor,
    table_stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """CTA (edit, block of tokens)."""
    edit = tl.program_id(0)
    row = tl.load(edited + edit).to(tl.int64)
    bias_row = tl.load(bias_rows + edit).to(tl.int64)
    count_row = tl.load(count_rows + edit).to(tl.int64)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < vocab_size
    x = tl.load(logits + row * logits_stride + tokens, mask=inside, other=0.0)
    # A missing row is read with length 0.
    num_biases = tl.where(bias_row >= 0, vocab_size, 0)
    bias = tl.load(table + bias_row * table_stride + tokens, mask=tokens < num_biases, other=0)
    x += bias.to(tl.float32, bitcast=True)
    num_counts = tl.where(count_row >= 0, vocab_size, 0)
    counts = tl.load(table + count_row * table_stride + tokens, mask=tokens < num_counts, other=0)
    repeated = tl.load(repetition + edit)
    # IEEE division instead of an approximate reciprocal: a penalty of 1 changes nothing.
    x = tl.where(counts > 0, tl.where(x > 0, tl.div_rn(x, tl.zeros([BLOCK], tl.float32) + repeated), x * repeated), x)
    due = (counts >> 1).to(tl.float32) * tl.load(frequency + edit) + tl.load(presence + edit)
    x = tl.where(counts > 1, x - due, x)
    tl.store(logits + row * logits_stride + tokens, x, mask=inside)


@kernel("rows", "tokens", "sources", "needed", "num_bans")
def _ban_tokens(
    logits: tl.tensor,
    rows: tl.tensor,
    tokens: tl.tensor,
    sources: tl.tensor,
    needed: tl.tensor,
    last_tokens: tl.tensor,
    num_bans: tl.tensor,
    logits_stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Apply one block of bans. Two bans of one token write the same value, so their order does not matter."""
    bans = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = bans < num_bans
    source = tl.load(sources + bans, mask=inside, other=-1)
    last = tl.load(last_tokens + source, mask=inside & (source >= 0), other=0)
    wanted = tl.load(needed + bans, mask=inside, other=0)
    holds = inside & ((source < 0) | (last == wanted))
    row = tl.load(rows + bans, mask=inside, other=0).to(tl.int64)
    token = tl.load(tokens + bans, mask=inside, other=0)
    tl.store(logits + row * logits_stride + token, tl.full([BLOCK], float("-inf"), tl.float32), mask=holds)


def edit_logits_triton(
    logits: torch.Tensor,
    table: torch.Tensor,
    edited: torch.Tensor,
    bias_rows: torch.Tensor,
    count_rows: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    repetition: torch.Tensor,
) -> None:
    """Launch the kernel. Shapes must have been checked."""
    vocab_size = logits.shape[1]
    block = min(BLOCK_TOKENS, next_power_of_2(vocab_size))
    _edit_logits[(edited.shape[0], cdiv(vocab_size, block))](
        logits,
        table,
        edited,
        bias_rows,
        count_rows,
        presence,
        frequency,
        repetition,
        vocab_size,
        logits.stride(0),
        table.stride(0),
        BLOCK=block,
        num_warps=4,
    )


def ban_tokens_triton(
    logits: torch.Tensor,
    rows: torch.Tensor,
    tokens: torch.Tensor,
    sources: torch.Tensor,
    needed: torch.Tensor,
    last_tokens: torch.Tensor,
) -> None:
    """Launch the kernel. Shapes must have been checked."""
    num_bans = rows.shape[0]
    _ban_tokens[(cdiv(num_bans, BLOCK_BANS),)](
        logits, rows, tokens, sources, needed, last_tokens, num_bans, logits.stride(0), BLOCK=BLOCK_BANS, num_warps=4
    )


def edit_logits(
    logits: torch.Tensor,
    table: torch.Tensor,
    edited: torch.Tensor,
    bias_rows: torch.Tensor,
    count_rows: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    repetition: torch.Tensor,
) -> None:
    """Edit the logits in place.

    Raises:
        ValueError: shapes or dtypes do not match.
    """
    values = (bias_rows, count_rows, presence, frequency, repetition)
    fits = logits.dim() == table.dim() == 2 and table.shape[1] >= logits.shape[1]
    if not fits or logits.dtype != torch.float32 or table.dtype != torch.int32 or logits.stride(1) != 1:
        raise ValueError(
            f"edit_logits: logits is {list(logits.shape)} {logits.dtype}, table {list(table.shape)} {table.dtype}; "
            f"logits must be [num_rows, vocab_size] float32, table [num_table_rows, vocab_size or more] int32"
        )
    if any(value.shape != edited.shape for value in values):
        raise ValueError(
            f"edit_logits: {list(edited.shape)} rows are edited, but bias_rows, count_rows, presence, frequency and "
            f"repetition are {[list(value.shape) for value in values]}; all must be alike"
        )
    if not edited.numel():
        return
    if logits.is_cuda:
        edit_logits_triton(logits, table, edited, *values)
    else:
        edit_logits_reference(logits, table, edited, *values)


def ban_tokens(
    logits: torch.Tensor,
    rows: torch.Tensor,
    tokens: torch.Tensor,
    sources: torch.Tensor,
    needed: torch.Tensor,
    last_tokens: torch.Tensor,
) -> None:
    """Set the logit of every token whose ban applies to -inf, in place.

    Raises:
        ValueError: shapes do not match.
    """
    if any(value.shape != rows.shape or value.dtype != torch.int32 for value in (tokens, sources, needed)):
        raise ValueError(
            f"ban_tokens: {list(rows.shape)} rows are given, but tokens, sources and needed are "
            f"{[(list(value.shape), value.dtype) for value in (tokens, sources, needed)]}; all must be int32 and alike"
        )
    if not rows.numel():
        return
    if logits.is_cuda:
        ban_tokens_triton(logits, rows, tokens, sources, needed, last_tokens)
    else:
        ban_tokens_reference(logits, rows, tokens, sources, needed, last_tokens)

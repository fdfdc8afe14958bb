"""Low-rank adapters beside a product: rows whose request has an adapter get what it adds (LoRA: Hu et al. 2021,
arXiv:2106.09685; many adapters in one batch: Chen et al. 2023, arXiv:2310.18547).

x      [num_rows, k], rows may lie apart
down   [num_slots, rank, k]      up   [num_slots, n, rank], with the scale in it
slots  [num_rows] int32: whose factors a row takes; -1: none's
y      [num_rows, n], changed in place, rows may lie apart

```
y[row] += up[slots[row]] (down[slots[row]] x[row])
```
Two launches, which read their slots on the device, so that a graph holds them whatever adapters its replays have:

```
shrink   parts[slice, row, :] = down x, over some of the columns       program (16 or 64 rows, slice of k, ranks)
expand   y += up (sum of the slices)                                   program (16 or 64 rows, 128 outputs)
```
A program takes one slot of its rows after the other and leaves the others' out of the product. Rows of a prompt have
one slot, so that it is one product; programs whose rows have none end at once. The sums of slices are added up in their
order: equal inputs give equal outputs. Sums are float32, and what lies between the factors is rounded to their dtype.
The rank is that of the largest adapter; what a smaller one lacks is zeros.
Bound by memory: the factors of each slot, once for every 16 rows. Source: own.
"""

import torch

from trimtab_kernels.launch.device_facts import DeviceFacts, device_facts
from trimtab_kernels.launch.jit import cdiv, kernel, next_power_of_2, tl

NONE = -1
"""The slot of rows without an adapter."""
RANK_STEP = 16
"""Ranks are multiples of it: the narrow side of a product of the matrix units."""
FEW_ROWS, MANY_ROWS = 16, 64
"""Of a program: decodes have a slot each, and rows of prompts one together."""
COLUMNS, OUTPUTS, MAX_RANKS = 128, 128, 64
MIN_SLICE = 512
"""Columns: four tiles, so that loads are ahead of products."""


def lora_reference(
    y: torch.Tensor, x: torch.Tensor, down: torch.Tensor, up: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    """One row at a time, in float32."""
    wide = y.float().clone()
    for row, slot in enumerate(slots.tolist()):
        if slot != NONE:
            wide[row] += up[slot].float() @ (down[slot].float() @ x[row].float())
    return wide


def lora_cpu(
    y: torch.Tensor, x: torch.Tensor, down: torch.Tensor, up: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    """One slot at a time. Returns y."""
    for slot in sorted(set(slots.tolist()) - {NONE}):
        rows = (slots == slot).nonzero().flatten()
        y.index_add_(0, rows, (x[rows] @ down[slot].t()) @ up[slot].t())
    return y


@kernel("num_rows", "slots")
def _lora_shrink(
    x: tl.tensor,
    down: tl.tensor,
    slots: tl.tensor,
    parts: tl.tensor,
    num_rows: tl.tensor,
    x_stride: tl.tensor,
    K: tl.constexpr,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANKS: tl.constexpr,
    SLICE: tl.constexpr,
) -> None:
    """Program (rows, slice of k, ranks). What rows without an adapter get is 0, or nothing."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    own_slice = tl.program_id(1)
    ranks = tl.program_id(2) * RANKS + tl.arange(0, RANKS)
    own = tl.load(slots + rows, mask=rows < num_rows, other=-1)
    slot = tl.max(own, 0)
    if slot >= 0:
        first = own_slice * SLICE
        last = tl.minimum(first + SLICE, K)
        sums = tl.zeros([ROWS, RANKS], dtype=tl.float32)
        x_rows = x + rows[:, None].to(tl.int64) * x_stride
        while slot >= 0:
            factor = down + slot.to(tl.int64) * (RANK * K) + ranks[:, None] * K
            for start in tl.range(first, last, COLUMNS):
                columns = start + tl.arange(0, COLUMNS)
                inside = (columns < last)[None, :]
                own_x = tl.load(x_rows + columns[None, :], mask=(own == slot)[:, None] & inside, other=0.0)
                weights = tl.load(factor + columns[None, :], mask=(ranks < RANK)[:, None] & inside, other=0.0)
                sums = tl.dot(own_x, tl.trans(weights), sums, input_precision="tf32x3")
            slot = tl.max(tl.where(own < slot, own, -1), 0)
        places = (own_slice * num_rows + rows).to(tl.int64)[:, None] * RANK + ranks[None, :]
        tl.store(parts + places, sums, mask=(rows < num_rows)[:, None] & (ranks < RANK)[None, :])


@kernel("num_rows", "slots")
def _lora_expand(
    parts: tl.tensor,
    up: tl.tensor,
    slots: tl.tensor,
    y: tl.tensor,
    num_rows: tl.tensor,
    y_stride: tl.tensor,
    N: tl.constexpr,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    RANKS: tl.constexpr,
    SLICES: tl.constexpr,
) -> None:
    """Program (rows, outputs)."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    outputs = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    own = tl.load(slots + rows, mask=rows < num_rows, other=-1)
    slot = tl.max(own, 0)
    if slot >= 0:
        sums = tl.zeros([ROWS, OUTPUTS], dtype=tl.float32)
        while slot >= 0:
            factor = up + slot.to(tl.int64) * (N * RANK) + outputs[:, None] * RANK
            for start in tl.range(0, RANK, RANKS):
                ranks = start + tl.arange(0, RANKS)
                is_own = (own == slot)[:, None] & (ranks < RANK)[None, :]
                between = tl.zeros([ROWS, RANKS], dtype=tl.float32)
                for part in tl.range(SLICES):
                    places = (part * num_rows + rows).to(tl.int64)[:, None] * RANK + ranks[None, :]
                    between += tl.load(parts + places, mask=is_own, other=0.0)
                inside = (outputs < N)[:, None] & (ranks < RANK)[None, :]
                weights = tl.load(factor + ranks[None, :], mask=inside, other=0.0)
                sums = tl.dot(between.to(weights.dtype), tl.trans(weights), sums, input_precision="tf32x3")
            slot = tl.max(tl.where(own < slot, own, -1), 0)
        places = y + rows[:, None].to(tl.int64) * y_stride + outputs[None, :]
        is_real = (own >= 0)[:, None] & (outputs < N)[None, :]
        sums += tl.load(places, mask=is_real, other=0.0).to(tl.float32)
        tl.store(places, sums.to(y.dtype.element_ty), mask=is_real)


def slices_of(num_programs: int, k: int, facts: DeviceFacts) -> int:
    """Into how many k is cut, so that programs fill the device: a power of two, as a kernel is compiled for each."""
    most = max(1, min(k // MIN_SLICE, facts.num_sms // max(num_programs, 1)))
    return 1 << (most.bit_length() - 1)


def lora_triton(
    y: torch.Tensor,
    x: torch.Tensor,
    down: torch.Tensor,
    up: torch.Tensor,
    slots: torch.Tensor,
    *,
    facts: DeviceFacts | None = None,
) -> torch.Tensor:
    """Launch the kernels. Returns y. Raises ValueError where shapes or dtypes do not fit."""
    _check(y, x, down, up, slots)
    (num_rows, k), n, rank = x.shape, up.shape[1], up.shape[2]
    if not num_rows:
        return y
    own_rows, num_warps = (FEW_ROWS, 4) if num_rows <= MANY_ROWS * FEW_ROWS else (MANY_ROWS, 8)
    ranks = min(MAX_RANKS, next_power_of_2(rank))
    tiles, rank_blocks = cdiv(num_rows, own_rows), cdiv(rank, ranks)
    slices = slices_of(tiles * rank_blocks, k, facts or device_facts(x.device))
    parts = torch.empty(slices, num_rows, rank, dtype=torch.float32, device=x.device)
    _lora_shrink[(tiles, slices, rank_blocks)](
        x,
        down,
        slots,
        parts,
        num_rows,
        x.stride(0),
        K=k,
        RANK=rank,
        ROWS=own_rows,
        COLUMNS=COLUMNS,
        RANKS=ranks,
        SLICE=cdiv(cdiv(k, slices), COLUMNS) * COLUMNS,
        num_warps=num_warps,
        num_stages=3,
    )
    _lora_expand[(tiles, cdiv(n, OUTPUTS))](
        parts,
        up,
        slots,
        y,
        num_rows,
        y.stride(0),
        N=n,
        RANK=rank,
        ROWS=own_rows,
        OUTPUTS=OUTPUTS,
        RANKS=ranks,
        SLICES=slices,
        num_warps=num_warps,
        num_stages=1,  # more, and triton 3.6 writes to registers that a product under way still reads
    )
    return y


def add_lora(y: torch.Tensor, x: torch.Tensor, down: torch.Tensor, up: torch.Tensor, slots: torch.Tensor) -> None:
    """Add to each row what its adapter does."""
    (lora_triton if x.is_cuda else lora_cpu)(y, x, down, up, slots)


def _check(y: torch.Tensor, x: torch.Tensor, down: torch.Tensor, up: torch.Tensor, slots: torch.Tensor) -> None:
    (num_rows, k), (num_slots, n, rank) = x.shape, up.shape
    fits = down.shape == (num_slots, rank, k) and y.shape == (num_rows, n) and slots.shape == (num_rows,)
    fits = fits and rank > 0 and rank % RANK_STEP == 0 and slots.dtype == torch.int32
    fits = fits and down.is_contiguous() and up.is_contiguous() and x.stride(1) == 1 and y.stride(1) == 1
    if not fits or not x.dtype == down.dtype == up.dtype == y.dtype:
        raise ValueError(
            f"lora: x is {list(x.shape)} {x.dtype}, down {list(down.shape)} {down.dtype}, up {list(up.shape)} "
            f"{up.dtype}, y {list(y.shape)} {y.dtype}, slots {list(slots.shape)} {slots.dtype}; they must be [rows, k],"
            f" [slots, rank, k], [slots, n, rank] and [rows, n] of one dtype, ranks in steps of {RANK_STEP}, and slots "
            f"[rows] int32"
        )

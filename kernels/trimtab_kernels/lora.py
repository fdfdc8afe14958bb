"""Low-rank adapters added to a GEMM's output, for rows whose request has an adapter (LoRA: Hu et al. 2021,
arXiv:2106.09685; many adapters in one batch: Chen et al. 2023, arXiv:2310.18547).

x      [num_rows, k], any row stride
down   [num_slots, rank, k]      up   [num_slots, n, rank], including the scale
slots  [num_rows] int32: adapter slot of each row; -1: no adapter
y      [num_rows, n], changed in place, any row stride

```
y[row] += up[slots[row]] (down[slots[row]] x[row])
```
Two launches, which read their slots on the device, so that a captured graph works for any adapters:

```
shrink   splits[slice, row, :] = down x, over some of the columns      CTA (16 or 64 rows, slice of k, ranks)
expand   y += up (sum of the slices)                                   CTA (16 or 64 rows, 128 outputs)
```
A CTA processes its rows' slots one after the other and masks the rows of other slots. Rows of a prompt have one slot,
so that they are one GEMM; CTAs whose rows have no adapter end at once. The sums of slices are added up in order: equal
inputs give equal outputs. Sums are float32; the intermediate is rounded to the factors' dtype. The rank is the largest
adapter's; smaller ones are padded with zeros.
Memory-bound: the factors of each slot, once for every 16 rows. Source: own.
"""

import torch

from trimtab_kernels.launch.device_facts import DeviceFacts, device_facts
from trimtab_kernels.launch.jit import cdiv, kernel, next_power_of_2, tl

NONE = -1
"""The slot of rows without an adapter."""
RANK_STEP = 16
"""Ranks are multiples of it: the narrow side of a matrix unit instruction."""
FEW_ROWS, MANY_ROWS = 16, 64
"""Rows of a CTA: decodes have a slot each, rows of prompts share one."""
COLUMNS, OUTPUTS, MAX_RANKS = 128, 128, 64
MIN_SLICE = 512
"""Columns: four tiles, so that loads run ahead of the multiplications."""


def lora_reference(
    y: torch.Tensor, x: torch.Tensor, down: torch.Tensor, up: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    """Compute one row at a time, in float32."""
    wide = y.float().clone()
    for row, slot in enumerate(slots.tolist()):
        if slot != NONE:
            wide[row] += up[slot].float() @ (down[slot].float() @ x[row].float())
    return wide


def lora_cpu(
    y: torch.Tensor, x: torch.Tensor, down: torch.Tensor, up: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    """Compute one slot at a time. Returns y."""
    for slot in sorted(set(slots.tolist()) - {NONE}):
        rows = (slots == slot).nonzero().flatten()
        y.index_add_(0, rows, (x[rows] @ down[slot].t()) @ up[slot].t())
    return y


@kernel("num_rows", "slots")
def _lora_shrink(
    x: tl.tensor,
    down: tl.tensor,
    slots: tl.tensor,
    splits: tl.tensor,
    num_rows: tl.tensor,
    x_stride: tl.tensor,
    K: tl.constexpr,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANKS: tl.constexpr,
    SLICE: tl.constexpr,
) -> None:
    """CTA (rows, slice of k, ranks). Rows without an adapter get 0 or are not written."""
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
        tl.store(splits + places, sums, mask=(rows < num_rows)[:, None] & (ranks < RANK)[None, :])


@kernel("num_rows", "slots")
def _lora_expand(
    splits: tl.tensor,
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
    """CTA (rows, outputs)."""
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
                for split in tl.range(SLICES):
                    places = (split * num_rows + rows).to(tl.int64)[:, None] * RANK + ranks[None, :]
                    between += tl.load(splits + places, mask=is_own, other=0.0)
                inside = (outputs < N)[:, None] & (ranks < RANK)[None, :]
                weights = tl.load(factor + ranks[None, :], mask=inside, other=0.0)
                sums = tl.dot(between.to(weights.dtype), tl.trans(weights), sums, input_precision="tf32x3")
            slot = tl.max(tl.where(own < slot, own, -1), 0)
        places = y + rows[:, None].to(tl.int64) * y_stride + outputs[None, :]
        is_real = (own >= 0)[:, None] & (outputs < N)[None, :]
        sums += tl.load(places, mask=is_real, other=0.0).to(tl.float32)
        tl.store(places, sums.to(y.dtype.element_ty), mask=is_real)


def slices_of(num_programs: int, k: int, facts: DeviceFacts) -> int:
    """Return the number of slices of k that fills the device with CTAs: a power of two, because a kernel is compiled
    for each.
    """
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
    """Launch the kernels. Returns y.

    Raises:
        ValueError: shapes or dtypes do not match.
    """
    _check(y, x, down, up, slots)
    (num_rows, k), n, rank = x.shape, up.shape[1], up.shape[2]
    if not num_rows:
        return y
    own_rows, num_warps = (FEW_ROWS, 4) if num_rows <= MANY_ROWS * FEW_ROWS else (MANY_ROWS, 8)
    ranks = min(MAX_RANKS, next_power_of_2(rank))
    tiles, rank_blocks = cdiv(num_rows, own_rows), cdiv(rank, ranks)
    slices = slices_of(tiles * rank_blocks, k, facts or device_facts(x.device))
    splits = torch.empty(slices, num_rows, rank, dtype=torch.float32, device=x.device)
    _lora_shrink[(tiles, slices, rank_blocks)](
        x,
        down,
        slots,
        splits,
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
        splits,
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
        num_stages=1,  # with more, triton 3.6 writes to registers that an asynchronous instruction still reads
    )
    return y


def add_lora(y: torch.Tensor, x: torch.Tensor, down: torch.Tensor, up: torch.Tensor, slots: torch.Tensor) -> None:
    """Add each row's adapter output to y."""
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

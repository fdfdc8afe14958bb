"""Products of few rows, with what stands before and behind them in a layer: one launch where there were two or three.

x         [num_rows <= 16, k] 16 bits wide, rows may lie apart
weight    [n, k]; gated: [2 n, k], gate above up
norm      [k]: x is RMS-normalised by it first;  bias [n], or [2 n]
residual  [num_rows, n]: what comes out is added to it in place, and nothing is returned
y         [num_rows, n]

```
y = norm(x) Wᵀ + b          before attention          (norm + product)
y = silu(gate) * up         of the two halves of it   (norm + product + gate)
residual += x Wᵀ + b        behind attention and MLP  (product + residual)
```
So a layer takes six launches: these (twice the last), rotation with the KV cache, attention. The factor of a row's norm
comes behind the product, because rows are whole only then: sum(w * v) / rms instead of sum(w * (v / rms)).
k is split over programs until they fill the device. Each leaves its sums, and the one that comes last adds them up, in
the order of the slices: equal inputs give equal outputs, and it is one launch.
Bound by memory: the weights, once. Source: own.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from trimtab_kernels.launch.arrivals import arrival_counters
from trimtab_kernels.launch.dependence import dependence, gdc_launch_dependents, gdc_wait
from trimtab_kernels.launch.device_facts import DeviceFacts, device_facts
from trimtab_kernels.launch.jit import cdiv, jit, kernel, tl
from trimtab_kernels.rms_norm import rms_norm_reference

MAX_ROWS = 16
"""The narrow side of a product of the matrix units."""
OUTPUTS, COLUMNS, STAGES = 64, 128, 4
"""Of a tile of weights, 16 KiB: three are under way while one is multiplied."""
PROGRAMS_PER_SM = 2
MIN_SLICE = 512
PREFETCHED_LINES = tl.constexpr(8)
"""Of 128 bytes of each output of a program that has been started ahead: 64 KiB, four tiles."""
SLICE_OVERHEAD = 256
"""What beginning and ending a slice costs, in columns of its weights; a guess that no GPU has judged."""


@dataclass(frozen=True, slots=True)
class Split:
    """`outputs` and columns of one program, and how many programs share a tile of outputs."""

    outputs: int
    tiles: int
    slice_columns: int
    slices: int


def split_of(n: int, k: int, *, is_gated: bool, facts: DeviceFacts) -> Split:
    """Slices of k so that the last round of programs is full and slices are long."""
    outputs = OUTPUTS // 2 if is_gated else OUTPUTS
    tiles, at_once = cdiv(n, outputs), PROGRAMS_PER_SM * facts.num_sms

    def columns(slices: int) -> int:
        return cdiv(cdiv(k, slices), COLUMNS) * COLUMNS

    def cost(slices: int) -> int:
        return cdiv(tiles * slices, at_once) * (columns(slices) + SLICE_OVERHEAD)

    best = min(range(1, max(1, k // MIN_SLICE) + 1), key=cost)
    return Split(outputs, tiles, columns(best), cdiv(k, columns(best)))


def few_rows_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    bias: torch.Tensor | None = None,
    is_gated: bool = False,
) -> torch.Tensor:
    """What is computed, in float32: what goes to the residual is added by whoever asks."""
    wide = x.float() if norm is None else rms_norm_reference(x.float(), norm.float(), eps)
    y = F.linear(wide, weight.float(), None if bias is None else bias.float())
    if is_gated:
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    return y


@jit
def _weights_at(
    weight: tl.tensor,
    outputs: tl.tensor,
    columns: tl.tensor,
    last: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tl.tensor:
    """A tile of weights: whole in the middle of the matrix."""
    inside = (outputs < N)[:, None] & (columns < last)[None, :]
    return tl.load(weight + outputs[:, None].to(tl.int64) * K + columns[None, :], mask=inside, other=0.0)


@jit
def _prefetch(
    weight: tl.tensor,
    outputs: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    LINES: tl.constexpr,
) -> None:
    """A slice's first weights into the L2 cache, LINES lines of 128 bytes of each output; nothing waits for them."""
    width: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth
    columns = tl.minimum(first + tl.arange(0, LINES) * width, last - 1)
    places = weight + tl.minimum(outputs, N - 1)[:, None].to(tl.int64) * K + columns[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [places], dtype=tl.int32, is_pure=False, pack=1
    )


@jit
def _summed_slices(
    parts: tl.tensor,
    first: tl.tensor,
    rows: tl.tensor,
    num_rows: tl.tensor,
    OUTPUTS: tl.constexpr,
    SLICES: tl.constexpr,
) -> tl.tensor:
    """[OUTPUTS, rows] of all slices from `first` on, in their order."""
    outputs = tl.arange(0, OUTPUTS)
    places = rows[None, :] * OUTPUTS + outputs[:, None]
    is_real = (rows < num_rows)[None, :] & (outputs >= 0)[:, None]
    size = rows.shape[0] * OUTPUTS
    sums = tl.load(parts + first * size + places, mask=is_real, other=0.0)
    for part in tl.range(1, SLICES):
        sums += tl.load(parts + (first + part) * size + places, mask=is_real, other=0.0)
    return sums


@kernel("num_rows")
def _few_rows(
    x: tl.tensor,
    weight: tl.tensor,
    norm: tl.tensor,
    bias: tl.tensor,
    residual: tl.tensor,
    y: tl.tensor,
    parts: tl.tensor,
    up_parts: tl.tensor,
    squares: tl.tensor,
    arrivals: tl.tensor,
    num_rows: tl.tensor,
    x_stride: tl.tensor,
    eps: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    IS_GATED: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    SLICE: tl.constexpr,
    SLICES: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Program (tile of outputs, slice of k). DEPENDENT: it may begin before the kernel before it has ended."""
    tile = tl.program_id(0)
    own_slice = tl.program_id(1)
    outputs = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    if DEPENDENT:
        gdc_launch_dependents()
        own_last = tl.minimum(own_slice * SLICE + SLICE, K)
        _prefetch(weight, outputs, own_slice * SLICE, own_last, N, K, PREFETCHED_LINES)
        if IS_GATED:
            _prefetch(weight + N * K, outputs, own_slice * SLICE, own_last, N, K, PREFETCHED_LINES)
        gdc_wait()
    rows = tl.arange(0, ROWS)
    is_row = rows < num_rows
    sums = tl.zeros([OUTPUTS, ROWS], dtype=tl.float32)
    up_sums = tl.zeros([OUTPUTS, ROWS], dtype=tl.float32)
    square_sums = tl.zeros([ROWS], dtype=tl.float32)
    first = own_slice * SLICE
    last = tl.minimum(first + SLICE, K)
    for start in tl.range(first, last, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        is_column = columns < last
        tile_of_x = tl.load(
            x + rows[:, None] * x_stride + columns[None, :], mask=is_row[:, None] & is_column[None, :], other=0.0
        )
        weights = _weights_at(weight, outputs, columns, last, N, K, COLUMNS)
        if norm is not None:
            wide = tile_of_x.to(tl.float32)
            square_sums += tl.sum(wide * wide, 1)
            factor = tl.load(norm + columns, mask=is_column, other=0.0)
            tile_of_x = (wide * factor.to(tl.float32)[None, :]).to(tile_of_x.dtype)
        transposed = tl.trans(tile_of_x)
        sums = tl.dot(weights, transposed, sums, input_precision="tf32x3")
        if IS_GATED:
            ups = _weights_at(weight + N * K, outputs, columns, last, N, K, COLUMNS)
            up_sums = tl.dot(ups, transposed, up_sums, input_precision="tf32x3")
    is_last = True
    if SLICES > 1:
        own = (tile * SLICES + own_slice).to(tl.int64)
        inside = is_row[None, :] & (outputs >= 0)[:, None]
        left = own * (ROWS * OUTPUTS) + rows[None, :] * OUTPUTS + tl.arange(0, OUTPUTS)[:, None]
        tl.store(parts + left, sums, mask=inside)
        if IS_GATED:
            tl.store(up_parts + left, up_sums, mask=inside)
        if norm is not None:
            tl.store(squares + own * ROWS + rows, square_sums)
        # All threads have stored before one tells of it, and whoever hears it reads what was stored before.
        tl.debug_barrier()
        is_last = tl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu") == SLICES - 1
    if is_last:
        if SLICES > 1:
            before = (tile * SLICES).to(tl.int64)
            sums = _summed_slices(parts, before, rows, num_rows, OUTPUTS, SLICES)
            if IS_GATED:
                up_sums = _summed_slices(up_parts, before, rows, num_rows, OUTPUTS, SLICES)
            if norm is not None:
                square_sums = tl.load(squares + before * ROWS + rows)
                for part in tl.range(1, SLICES):
                    square_sums += tl.load(squares + (before + part) * ROWS + rows)
            tl.store(arrivals + tile, 0)  # for the next launch
        if norm is not None:
            factors = tl.rsqrt(square_sums / K + eps)
            sums *= factors[None, :]
            up_sums *= factors[None, :]
        is_output = outputs < N
        if bias is not None:
            sums += tl.load(bias + outputs, mask=is_output, other=0.0).to(tl.float32)[:, None]
            if IS_GATED:
                up_sums += tl.load(bias + N + outputs, mask=is_output, other=0.0).to(tl.float32)[:, None]
        if IS_GATED:
            sums = sums / (1.0 + tl.exp(-sums)) * up_sums
        is_real = is_output[:, None] & is_row[None, :]
        places = rows[None, :] * N + outputs[:, None]
        if residual is not None:
            sums += tl.load(residual + places, mask=is_real, other=0.0).to(tl.float32)
            tl.store(residual + places, sums.to(residual.dtype.element_ty), mask=is_real)
        else:
            tl.store(y + places, sums.to(y.dtype.element_ty), mask=is_real)


def few_rows_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    bias: torch.Tensor | None = None,
    is_gated: bool = False,
    residual: torch.Tensor | None = None,
    facts: DeviceFacts | None = None,
) -> torch.Tensor:
    """Launch the kernel. Returns y, or the residual. Raises ValueError where shapes or dtypes do not fit."""
    num_rows, k = x.shape
    n = weight.shape[0] // 2 if is_gated else weight.shape[0]
    _check(x, weight, norm, bias, residual, n)
    y = torch.empty(num_rows, n, dtype=x.dtype, device=x.device) if residual is None else residual
    if not num_rows:
        return y
    split = split_of(n, k, is_gated=is_gated, facts=facts or device_facts(x.device))

    def floats(*shape: int) -> torch.Tensor:
        return torch.empty(split.tiles * split.slices, MAX_ROWS, *shape, dtype=torch.float32, device=x.device)

    _few_rows[(split.tiles, split.slices)](
        x,
        weight,
        norm,
        bias,
        residual,
        None if residual is not None else y,
        floats(split.outputs),
        floats(split.outputs) if is_gated else None,
        floats(),
        arrival_counters(x.device, split.tiles),
        num_rows,
        x.stride(0),
        eps,
        N=n,
        K=k,
        IS_GATED=is_gated,
        OUTPUTS=split.outputs,
        COLUMNS=COLUMNS,
        ROWS=MAX_ROWS,
        SLICE=split.slice_columns,
        SLICES=split.slices,
        num_warps=4,
        num_stages=STAGES,
        **dependence(x.device, facts),
    )
    return y


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    norm: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    n: int,
) -> None:
    num_rows, k = x.shape
    fits = num_rows <= MAX_ROWS and weight.shape[1] == k and weight.dtype == x.dtype and x.stride(1) == 1
    fits = fits and (norm is None or norm.shape == (k,)) and (bias is None or bias.shape == weight.shape[:1])
    if residual is not None:
        fits = fits and residual.shape == (num_rows, n) and residual.dtype == x.dtype and residual.is_contiguous()
    if not fits or not weight.is_contiguous():
        raise ValueError(
            f"few_rows: x is {list(x.shape)} {x.dtype}, weight {list(weight.shape)} {weight.dtype}; x must be "
            f"[{MAX_ROWS} rows at most, k], weight [n, k] of its dtype and contiguous, a norm [k], a bias [n], a "
            f"residual [rows, n] likewise"
        )

"""Small-M fused GEMM for up to 16 rows, with a norm prologue, a gate, or a residual epilogue: one launch instead of two
or three.

x         [num_rows <= 16, k] 16 bits wide, rows may lie apart
weight    [n, k]; gated: [2 n, k], gate above up
norm      [k]: x is RMS-normalised by it first;  bias [n], or [2 n]
residual  [num_rows, n]: the result is added to it in place, and the residual is returned
y         [num_rows, n]

```
y = norm(x) Wᵀ + b          before attention          (norm + GEMM)
y = silu(gate) * up         for gate and up           (norm + GEMM + gate)
residual += x Wᵀ + b        after attention and MLP   (GEMM + residual)
```
A layer takes six launches: these three (the last one twice), rotation with the KV cache write, and attention. The
factor of a row's norm is applied after the GEMM, when the whole row has been read: sum(w * v) / rms instead of sum(w *
(v / rms)).
A gated tile contains equally many rows of the gate's and of up's weights, so one GEMM computes both.
k is split over CTAs until they fill the device (split-K). Each CTA stores its partial sums, and the last one to finish
adds them up in the order of the slices: equal inputs give equal outputs, in one launch.
Memory-bound: the weights are read once. Source: own.
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
"""The narrow side of a matrix unit instruction."""
MIN_SLICE = 512
PREFETCHED_LINES = tl.constexpr(8)
"""Lines of 128 bytes that a CTA started ahead of time prefetches from each row of its tile: 64 KiB (four tiles), gated
128 KiB."""
SLICE_OVERHEAD = 256
"""Cost of starting and finishing a slice, in columns of its weights. An estimate; it was not measured separately."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """Tile shape of the weights, pipeline stages and CTAs per multiprocessor. With 64 x 128 and four stages, three
    tiles of 16 KiB are in flight while one is multiplied. `by_warps` computes x times the tile with single-warp
    instructions; otherwise the tile times x is one warp-group instruction.
    """

    rows: int = 64
    columns: int = 128
    stages: int = 4
    ctas_per_sm: int = 2
    num_warps: int = 4
    by_warps: bool = False


TILING = Tiling()
"""For devices with less shared memory per block than Hopper."""
PLAIN, NORMED = Tiling(64, 128, 6, 1), Tiling(64, 128, 3, 3)
GATED = Tiling(128, 128, 3, 2, num_warps=8, by_warps=True)
"""The fastest of more than 30 tilings on an H200, for the shapes of Llama-3.1-8B: without a norm, with one, and gated.
"""


def tiling_of(*, has_norm: bool, is_gated: bool, facts: DeviceFacts) -> Tiling:
    """Return the tiling for a GEMM."""
    if not facts.has_hopper_shared_memory:
        return TILING
    return GATED if is_gated else NORMED if has_norm else PLAIN


@dataclass(frozen=True, slots=True)
class Split:
    """Split of a GEMM over CTAs: outputs and columns of one CTA, and the number of CTAs that share a tile of
    outputs.
    """

    outputs: int
    tiles: int
    slice_columns: int
    slices: int


def split_of(n: int, k: int, *, is_gated: bool, facts: DeviceFacts, tiling: Tiling) -> Split:
    """Choose the number of k slices so that the last wave of CTAs is full and slices stay long."""
    outputs = tiling.rows // 2 if is_gated else tiling.rows
    tiles, at_once = cdiv(n, outputs), tiling.ctas_per_sm * facts.num_sms

    def columns(slices: int) -> int:
        return cdiv(cdiv(k, slices), tiling.columns) * tiling.columns

    def cost(slices: int) -> int:
        return cdiv(tiles * slices, at_once) * (columns(slices) + SLICE_OVERHEAD)

    best = min(range(1, max(1, k // MIN_SLICE) + 1), key=cost)
    return Split(outputs, tiles, columns(best), cdiv(k, columns(best)))


def skinny_gemm_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    bias: torch.Tensor | None = None,
    is_gated: bool = False,
) -> torch.Tensor:
    """Return the GEMM in float32, without the residual: the caller adds it."""
    wide = x.float() if norm is None else rms_norm_reference(x.float(), norm.float(), eps)
    y = F.linear(wide, weight.float(), None if bias is None else bias.float())
    if is_gated:
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    return y


@jit
def _prefetch(
    weight: tl.tensor,
    weight_rows: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    K: tl.constexpr,
    LINES: tl.constexpr,
) -> None:
    """Prefetch a slice's first weights into the L2 cache, LINES lines of 128 bytes per row, without waiting."""
    width: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth
    columns = tl.minimum(first + tl.arange(0, LINES) * width, last - 1)
    places = weight + weight_rows[:, None].to(tl.int64) * K + columns[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [places], dtype=tl.int32, is_pure=False, pack=1
    )


@jit
def _load_columns(places: tl.tensor, columns: tl.tensor, last: tl.tensor, IS_WHOLE: tl.constexpr) -> tl.tensor:
    """Load `places`; columns after the last one are 0 if tiles are not whole."""
    if IS_WHOLE:
        return tl.load(places)
    return tl.load(places, mask=columns < last, other=0.0)


@jit
def _sum_slices(
    split_sums: tl.tensor,
    first: tl.tensor,
    rows: tl.tensor,
    num_rows: tl.tensor,
    TILE: tl.constexpr,
    SLICES: tl.constexpr,
) -> tl.tensor:
    """Return [TILE, rows]: the sum of all slices from `first` on, added in order."""
    own = tl.arange(0, TILE)
    places = rows[None, :] * TILE + own[:, None]
    is_real = (rows < num_rows)[None, :] & (own >= 0)[:, None]
    size = rows.shape[0] * TILE
    sums = tl.load(split_sums + first * size + places, mask=is_real, other=0.0)
    for slice_index in tl.range(1, SLICES):
        sums += tl.load(split_sums + (first + slice_index) * size + places, mask=is_real, other=0.0)
    return sums


@kernel("num_rows")
def _skinny_gemm(
    x: tl.tensor,
    weight: tl.tensor,
    norm: tl.tensor,
    bias: tl.tensor,
    residual: tl.tensor,
    y: tl.tensor,
    split_sums: tl.tensor,
    squares: tl.tensor,
    arrivals: tl.tensor,
    num_rows: tl.tensor,
    x_stride: tl.tensor,
    eps: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    IS_GATED: tl.constexpr,
    BY_WARPS: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    SLICE: tl.constexpr,
    SLICES: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """CTA (tile of TILE rows of weights, slice of k). DEPENDENT: the kernel may start before the previous kernel has
    ended.
    """
    tile = tl.program_id(0)
    own_slice = tl.program_id(1)
    own = tl.arange(0, TILE)
    outputs = tile * TILE + own
    if IS_GATED:
        outputs = tile * (TILE // 2) + own % (TILE // 2)
    weight_rows = tl.minimum(outputs, N - 1)
    if IS_GATED:
        weight_rows += (own // (TILE // 2)) * N
    first = own_slice * SLICE
    last = tl.minimum(first + SLICE, K)
    if DEPENDENT:
        gdc_launch_dependents()
        _prefetch(weight, weight_rows, first, last, K, PREFETCHED_LINES)
        gdc_wait()
    rows = tl.arange(0, ROWS)
    is_row = rows < num_rows
    sums = tl.zeros([ROWS, TILE], dtype=tl.float32) if BY_WARPS else tl.zeros([TILE, ROWS], dtype=tl.float32)
    # Reduced over columns after the loop: inside it, threads would wait for each other.
    wide_squares = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    # Rows of weights or x after the last one are read from the last row and never stored.
    row_starts = weight_rows[:, None].to(tl.int64) * K
    x_rows = tl.minimum(rows, num_rows - 1)[:, None] * x_stride
    # Loaded one tile ahead explicitly: no asynchronous copy moves such narrow rows, and a load that must be waited for
    # costs more than a tile.
    next_factor = tl.zeros([COLUMNS], dtype=tl.float32)
    if norm is not None:
        next_factor = _load_columns(norm + first + tl.arange(0, COLUMNS), first + tl.arange(0, COLUMNS), K, False)
    for start in tl.range(first, last, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        weights = _load_columns(weight + row_starts + columns[None, :], columns[None, :], last, K % COLUMNS == 0)
        tile_of_x = _load_columns(x + x_rows + columns[None, :], columns[None, :], last, K % COLUMNS == 0)
        if norm is not None:
            wide = tile_of_x.to(tl.float32)
            wide_squares += wide * wide
            factor = next_factor
            next_factor = _load_columns(norm + columns + COLUMNS, columns + COLUMNS, K, False)
            tile_of_x = (wide * factor.to(tl.float32)[None, :]).to(tile_of_x.dtype)
        if BY_WARPS:
            sums = tl.dot(tile_of_x, tl.trans(weights), sums, input_precision="tf32x3")
        else:
            sums = tl.dot(weights, tl.trans(tile_of_x), sums, input_precision="tf32x3")
    if BY_WARPS:
        sums = tl.trans(sums)
    square_sums = tl.sum(wide_squares, 1)
    is_last = True
    if SLICES > 1:
        slice_index = (tile * SLICES + own_slice).to(tl.int64)
        left = slice_index * (ROWS * TILE) + rows[None, :] * TILE + own[:, None]
        tl.store(split_sums + left, sums, mask=is_row[None, :] & (own >= 0)[:, None])
        if norm is not None:
            tl.store(squares + slice_index * ROWS + rows, square_sums)
        # All threads store before one of them increments the counter; the last CTA reads after it has seen the full
        # count.
        tl.debug_barrier()
        is_last = tl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu") == SLICES - 1
    if is_last:
        if SLICES > 1:
            before = (tile * SLICES).to(tl.int64)
            sums = _sum_slices(split_sums, before, rows, num_rows, TILE, SLICES)
            if norm is not None:
                square_sums = tl.load(squares + before * ROWS + rows)
                for other in tl.range(1, SLICES):
                    square_sums += tl.load(squares + (before + other) * ROWS + rows)
            tl.store(arrivals + tile, 0)  # for the next launch
        if norm is not None:
            sums *= tl.rsqrt(square_sums / K + eps)[None, :]
        if bias is not None:
            sums += tl.load(bias + weight_rows).to(tl.float32)[:, None]
        results = sums
        written = outputs
        if IS_GATED:
            gate, up = tl.split(tl.permute(tl.reshape(sums, [2, TILE // 2, ROWS]), (1, 2, 0)))
            results = gate / (1.0 + tl.exp(-gate)) * up
            written = tile * (TILE // 2) + tl.arange(0, TILE // 2)
        is_real = (written < N)[:, None] & is_row[None, :]
        places = rows[None, :] * N + written[:, None]
        if residual is not None:
            results += tl.load(residual + places, mask=is_real, other=0.0).to(tl.float32)
            tl.store(residual + places, results.to(residual.dtype.element_ty), mask=is_real)
        else:
            tl.store(y + places, results.to(y.dtype.element_ty), mask=is_real)


def skinny_gemm_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    bias: torch.Tensor | None = None,
    is_gated: bool = False,
    residual: torch.Tensor | None = None,
    facts: DeviceFacts | None = None,
    tiling: Tiling | None = None,
) -> torch.Tensor:
    """Launch the kernel and return y, or the residual.

    Raises:
        ValueError: shapes or dtypes do not match.
    """
    num_rows, k = x.shape
    n = weight.shape[0] // 2 if is_gated else weight.shape[0]
    _check(x, weight, norm, bias, residual, n)
    y = torch.empty(num_rows, n, dtype=x.dtype, device=x.device) if residual is None else residual
    if not num_rows:
        return y
    facts = facts or device_facts(x.device)
    tiling = tiling or tiling_of(has_norm=norm is not None, is_gated=is_gated, facts=facts)
    split = split_of(n, k, is_gated=is_gated, facts=facts, tiling=tiling)

    def floats(*shape: int) -> torch.Tensor:
        return torch.empty(split.tiles * split.slices, MAX_ROWS, *shape, dtype=torch.float32, device=x.device)

    _skinny_gemm[(split.tiles, split.slices)](
        x,
        weight,
        norm,
        bias,
        residual,
        None if residual is not None else y,
        floats(tiling.rows),
        floats(),
        arrival_counters(x.device, split.tiles),
        num_rows,
        x.stride(0),
        eps,
        N=n,
        K=k,
        IS_GATED=is_gated,
        BY_WARPS=tiling.by_warps,
        TILE=tiling.rows,
        COLUMNS=tiling.columns,
        ROWS=MAX_ROWS,
        SLICE=split.slice_columns,
        SLICES=split.slices,
        num_warps=tiling.num_warps,
        num_stages=tiling.stages,
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
            f"skinny_gemm: x is {list(x.shape)} {x.dtype}, weight {list(weight.shape)} {weight.dtype}; x must be "
            f"[{MAX_ROWS} rows at most, k], weight [n, k] of its dtype and contiguous, a norm [k], a bias [n], a "
            f"residual [rows, n] likewise"
        )

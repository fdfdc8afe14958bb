"""w8a8_block_fp8 of many tokens for Hopper with warp specialisation: a producer warp issues tile copies by the tensor
memory accelerator; two consumer groups of four warps multiply 64 of a tile's 128 rows each, by 256 columns. The kernel
is persistent: one CTA per multiprocessor takes one tile after another, so that the next tile is copied while the last
one is written.

Inputs, output and reference are w8a8_block_fp8's: 1024 tokens or more, K a multiple of 128 (see `is_supported`). The
sums of a step (128 columns of K) leave the matrix unit before they are scaled and added in float32, half a tile's width
at a time: sums of 128 columns and partial sums of 128 use all registers of a thread. While one group scales and adds,
the other multiplies.

```
producer   A0 B0  A1 B1  A2 B2 ...            into STAGES buffers, across tile boundaries
group 0    lo add hi add | lo add hi add ...  lo, hi: the left and the right half of the columns
group 1     lo add hi add | lo ...
```
Compute-bound, as w8a8_block_fp8; tiles twice as wide read three quarters of the bytes per FLOP. Source: own; the
assignment of roles follows DeepGEMM's description (github.com/deepseek-ai/DeepGEMM).
"""

import torch

from trimtab_kernels.launch.device_facts import HOPPER, DeviceFacts, device_facts
from trimtab_kernels.launch.gluon import (
    WARPS_OF_GROUP,
    copy_from_descriptor,
    gl,
    gluon_jit,
    gluon_kernel,
    hopper,
    mbarrier,
    tensor_descriptor,
)
from trimtab_kernels.launch.jit import cdiv, tl

MIN_TOKENS = 1024
ROWS, HALF, STEP = 128, 128, 128
"""Rows of a tile, half its columns, and the columns of K that are summed in the matrix unit."""
STAGES, GROUP_M = 4, 8
PRODUCER_REGISTERS, GROUP_REGISTERS = 24, 240


def is_supported(num_tokens: int, k: int, facts: DeviceFacts) -> bool:
    """Return True if this kernel supports the GEMM."""
    return facts.capability == HOPPER and num_tokens >= MIN_TOKENS and k % STEP == 0


@gluon_jit
def _place_of(tile: tl.tensor, num_rows: tl.tensor, num_columns: tl.tensor, GROUP_M: gl.constexpr) -> tl.tensor:
    """Return (row tile, column tile): GROUP_M rows at a time, column by column, as in w8a8_block_fp8."""
    per_group = GROUP_M * num_columns
    first = tile // per_group * GROUP_M
    height = gl.minimum(num_rows - first, GROUP_M)
    return first + tile % per_group % height, tile % per_group // height


@gluon_jit
def _produce(
    a_box: tl.tensor,
    b_box: tl.tensor,
    a_tiles: tl.tensor,
    b_tiles: tl.tensor,
    full: tl.tensor,
    empty: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    STEPS: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
) -> None:
    """Producer: load the tiles of all steps of all of the CTA's tiles."""
    HALF_ROWS: gl.constexpr = a_box.block_shape[0]
    HALF_COLUMNS: gl.constexpr = b_box.block_shape[0]
    STEP: gl.constexpr = a_box.block_shape[1]
    done = num_rows * 0
    for tile in range(gl.program_id(0), num_rows * num_columns, gl.num_programs(0)):
        row_tile, column_tile = _place_of(tile, num_rows, num_columns, GROUP_M)
        for step in range(STEPS):
            stage = done % STAGES
            mbarrier.wait(empty.index(stage), ((done // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), 2 * (HALF_ROWS + HALF_COLUMNS) * STEP)
            for half in gl.static_range(2):
                row = row_tile * (2 * HALF_ROWS) + half * HALF_ROWS
                column = column_tile * (2 * HALF_COLUMNS) + half * HALF_COLUMNS
                copy_from_descriptor(a_box, [row, step * STEP], full.index(stage), a_tiles.index(2 * stage + half))
                copy_from_descriptor(b_box, [column, step * STEP], full.index(stage), b_tiles.index(2 * stage + half))
            done += 1


@gluon_jit
def _write(
    y: tl.tensor, sums: tl.tensor, rows: tl.tensor, first_column: tl.tensor, num_tokens: tl.tensor, N: gl.constexpr
) -> None:
    """Write half of a group's tile; a thread has adjacent pairs."""
    columns = first_column + gl.arange(0, sums.shape[1], layout=gl.SliceLayout(0, sums.type.layout))
    places = rows.to(gl.int64)[:, None] * N + columns[None, :]
    gl.store(y + places, sums.to(y.dtype.element_ty), mask=(rows < num_tokens)[:, None] & (columns < N)[None, :])


@gluon_jit
def _consume(
    y: tl.tensor,
    a_scales: tl.tensor,
    b_scales: tl.tensor,
    a_tiles: tl.tensor,
    b_tiles: tl.tensor,
    full: tl.tensor,
    empty: tl.tensor,
    num_tokens: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    ME: gl.constexpr,
    N: gl.constexpr,
    STEPS: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
) -> None:
    """Consumer: group ME's rows of all of the CTA's tiles."""
    HALF_ROWS: gl.constexpr = a_tiles.shape[1]
    HALF_COLUMNS: gl.constexpr = b_tiles.shape[1]
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF_COLUMNS, 32])
    done = num_rows * 0
    for tile in range(gl.program_id(0), num_rows * num_columns, gl.num_programs(0)):
        row_tile, column_tile = _place_of(tile, num_rows, num_columns, GROUP_M)
        rows = row_tile * (2 * HALF_ROWS) + ME * HALF_ROWS + gl.arange(0, HALF_ROWS, layout=gl.SliceLayout(1, SUMS))
        is_row = rows < num_tokens
        scale_rows = a_scales + rows * STEPS
        # Weights after the last row have no scales, and their outputs are not written.
        left_scales = b_scales + column_tile * 2 * STEPS
        right_scales = b_scales + gl.minimum(column_tile * 2 + 1, (N - 1) // HALF_COLUMNS) * STEPS
        left_sums = gl.zeros([HALF_ROWS, HALF_COLUMNS], gl.float32, SUMS)
        right_sums = gl.zeros([HALF_ROWS, HALF_COLUMNS], gl.float32, SUMS)
        # One set of registers for all steps: the next one waits until this one is added.
        product = gl.zeros([HALF_ROWS, HALF_COLUMNS], gl.float32, SUMS)
        scale = gl.load(scale_rows, mask=is_row, other=0.0)
        left_scale = gl.load(left_scales)
        right_scale = gl.load(right_scales)
        for step in range(STEPS):
            stage = done % STAGES
            mbarrier.wait(full.index(stage), (done // STAGES) & 1)
            mine = a_tiles.index(2 * stage + ME)
            left = b_tiles.index(2 * stage).permute([1, 0])
            under_way = hopper.warpgroup_mma(mine, left, product, use_acc=False, is_async=True)
            # The next step's scales are loaded meanwhile.
            following = gl.minimum(step + 1, STEPS - 1)
            next_scale = gl.load(scale_rows + following, mask=is_row, other=0.0)
            next_left = gl.load(left_scales + following)
            next_right = gl.load(right_scales + following)
            product = hopper.warpgroup_mma_wait(0, deps=[under_way])
            left_sums += product * (scale * left_scale)[:, None]
            right = b_tiles.index(2 * stage + 1).permute([1, 0])
            under_way = hopper.warpgroup_mma(mine, right, product, use_acc=False, is_async=True)
            product = hopper.warpgroup_mma_wait(0, deps=[under_way])
            mbarrier.arrive(empty.index(stage), count=1)
            right_sums += product * (scale * right_scale)[:, None]
            scale = next_scale
            left_scale = next_left
            right_scale = next_right
            done += 1
        _write(y, left_sums, rows, column_tile * (2 * HALF_COLUMNS), num_tokens, N)
        _write(y, right_sums, rows, column_tile * (2 * HALF_COLUMNS) + HALF_COLUMNS, num_tokens, N)


@gluon_kernel("num_tokens", consumer_groups=2)
def _w8a8_block_fp8_gluon(
    a_box: tl.tensor,
    a_scales: tl.tensor,
    b_box: tl.tensor,
    b_scales: tl.tensor,
    y: tl.tensor,
    num_tokens: tl.tensor,
    N: gl.constexpr,
    STEPS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
    REGISTERS: gl.constexpr,
) -> None:
    """CTA p takes the tiles p, p + num_ctas, ..."""
    HALF_ROWS: gl.constexpr = a_box.block_shape[0]
    HALF_COLUMNS: gl.constexpr = b_box.block_shape[0]
    STEP: gl.constexpr = a_box.block_shape[1]
    num_rows = (num_tokens + BLOCK_M - 1) // BLOCK_M
    num_columns = num_rows * 0 + (N + 2 * HALF_COLUMNS - 1) // (2 * HALF_COLUMNS)
    MATRIX: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    a_tiles = gl.allocate_shared_memory(a_box.dtype, [2 * STAGES, HALF_ROWS, STEP], MATRIX)
    b_tiles = gl.allocate_shared_memory(b_box.dtype, [2 * STAGES, HALF_COLUMNS, STEP], MATRIX)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    hopper.fence_async_shared()
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_consume, (
                y, a_scales, b_scales, a_tiles, b_tiles, full, empty, num_tokens, num_rows, num_columns,
                FIRST, N, STEPS, STAGES, GROUP_M,
            )),
            (_consume, (
                y, a_scales, b_scales, a_tiles, b_tiles, full, empty, num_tokens, num_rows, num_columns,
                SECOND, N, STEPS, STAGES, GROUP_M,
            )),
            (_produce, (a_box, b_box, a_tiles, b_tiles, full, empty, num_rows, num_columns, STEPS, STAGES, GROUP_M)),
        ],
        [4, 1],
        REGISTERS,
    )  # fmt: skip


def w8a8_block_fp8_gluon(
    a: torch.Tensor,
    a_scales: torch.Tensor,
    b: torch.Tensor,
    b_scales: torch.Tensor,
    dtype: torch.dtype,
    *,
    facts: DeviceFacts | None = None,
) -> torch.Tensor:
    """Launch the kernel for a supported GEMM. Shapes must have been checked; everything is contiguous."""
    num_tokens, k = a.shape
    n = b.shape[0]
    y = torch.empty(num_tokens, n, dtype=dtype, device=a.device)
    facts = facts or device_facts(a.device)
    tiles = cdiv(num_tokens, ROWS) * cdiv(n, 2 * HALF)
    _w8a8_block_fp8_gluon[(min(tiles, facts.num_sms),)](
        tensor_descriptor(a, [num_tokens, k], [k, 1], [ROWS // 2, STEP]),
        a_scales,
        tensor_descriptor(b, [n, k], [k, 1], [HALF, STEP]),
        b_scales,
        y,
        num_tokens,
        N=n,
        STEPS=k // STEP,
        BLOCK_M=ROWS,
        STAGES=STAGES,
        GROUP_M=GROUP_M,
        REGISTERS=(GROUP_REGISTERS, PRODUCER_REGISTERS),
        num_warps=WARPS_OF_GROUP,
    )
    return y

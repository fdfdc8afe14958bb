"""GEMM of float8 weights and float8 activations with block scales:  y = (a * a_scales) @ (b * b_scales)^T.

x         [num_tokens, K]               bf16 | fp16 | fp32, the activations before quantisation
a         [num_tokens, K]               float8_e4m3fn
a_scales  [num_tokens, ceil(K / 128)]   fp32: one per token and group of 128
b         [N, K]                        float8_e4m3fn, the weights
b_scales  [ceil(N/128), ceil(K/128)]    fp32: one per block of 128 x 128
y         [num_tokens, N]               requested dtype

Quantisation: scale = max|x| of the group / 448, a = x / scale, clamped; NaN stays NaN. A step of 128 columns is summed
by the matrix unit, then scaled and added in fp32 (DeepSeek-V3, arXiv:2412.19437, section 3.3), so the unit's narrow
accumulator never sees more than 128 terms.

Few tokens need many CTAs to read the weights at full speed: SPLIT_K CTAs then share the sum over K of a tile. Each
stores its partial sums, and the last one to finish adds them up in the order of the splits: equal inputs give equal
outputs, in one launch. Launch configurations are measured per shape and GPU by `python -m trimtab_kernels.tune`.
Memory-bound for few tokens (N * K bytes), compute-bound for many (2 * num_tokens * N * K FLOPs). Source: own.
"""

import torch

from trimtab_kernels.launch.arrivals import arrival_counters
from trimtab_kernels.launch.backends import kernel_backends
from trimtab_kernels.launch.device_facts import DeviceFacts, device_facts
from trimtab_kernels.launch.gemm_config import GemmConfig, block_fp8_config
from trimtab_kernels.launch.jit import cdiv, jit, kernel, next_power_of_2, tl
from trimtab_kernels.reshape_and_cache import FLOAT8, FLOAT8_MAX, clamp_to_float8
from trimtab_kernels.w8a8_block_fp8_gluon import is_supported, w8a8_block_fp8_gluon

GROUP = 128  # values of one activation scale, and side of a block of weights
SMALLEST_SCALE = 1e-10  # for a group of zeros: keeps the division finite


def quantize_groups_reference(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (a, a_scales) in plain torch."""
    rows, columns = x.shape
    groups = cdiv(columns, GROUP)
    padded = torch.zeros(rows, groups * GROUP, device=x.device)
    padded[:, :columns] = x.float()
    grouped = padded.view(rows, groups, GROUP)
    scales = grouped.abs().amax(dim=-1).clamp_min(SMALLEST_SCALE * FLOAT8_MAX) / FLOAT8_MAX
    quantized = (grouped / scales.unsqueeze(-1)).clamp(-FLOAT8_MAX, FLOAT8_MAX).view(rows, -1)[:, :columns]
    return quantized.to(FLOAT8), scales


def w8a8_block_fp8_reference(
    a: torch.Tensor, a_scales: torch.Tensor, b: torch.Tensor, b_scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Dequantise in float32 and multiply."""
    columns = a.shape[1]
    left = a.float() * a_scales.repeat_interleave(GROUP, dim=1)[:, :columns]
    scales = b_scales.repeat_interleave(GROUP, dim=0).repeat_interleave(GROUP, dim=1)
    right = b.float() * scales[: b.shape[0], :columns]
    return (left @ right.t()).to(dtype)


def quantize_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (b, b_scales) of a weight [N, K], in plain torch, for loading."""
    n, k = weight.shape
    rows, columns = cdiv(n, GROUP), cdiv(k, GROUP)
    padded = torch.zeros(rows * GROUP, columns * GROUP, device=weight.device)
    padded[:n, :k] = weight.float()
    blocks = padded.view(rows, GROUP, columns, GROUP)
    scales = blocks.abs().amax(dim=(1, 3)).clamp_min_(SMALLEST_SCALE * FLOAT8_MAX).div_(FLOAT8_MAX)
    blocks.div_(scales[:, None, :, None]).clamp_(-FLOAT8_MAX, FLOAT8_MAX)
    return padded[:n, :k].to(FLOAT8).contiguous(), scales


def dequantize_blocks(b: torch.Tensor, b_scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight [N, K], or [experts, N, K] with a leading dimension."""
    n, k = b.shape[-2:]
    wide = b_scales.repeat_interleave(GROUP, dim=-2).repeat_interleave(GROUP, dim=-1)
    return (b.float() * wide[..., :n, :k]).to(dtype)


@kernel()
def _quantize_groups(
    x: tl.tensor,
    a: tl.tensor,
    a_scales: tl.tensor,
    x_stride: tl.tensor,
    size: tl.tensor,
    num_groups: tl.tensor,
    GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
) -> None:
    """CTA (token, GROUPS groups)."""
    token = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    columns = groups[:, None] * GROUP_SIZE + tl.arange(0, GROUP_SIZE)[None, :]
    inside = columns < size
    values = tl.load(x + token * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    # Division, not multiplication by 1/448: the largest value must become 448 exactly.
    scales = tl.maximum(tl.max(tl.abs(values), 1), 448.0 * 1e-10) / 448.0
    quantized = clamp_to_float8(values / scales[:, None], 448.0)
    tl.store(a + token * size + columns, quantized.to(a.dtype.element_ty), mask=inside)
    tl.store(a_scales + token * num_groups + groups, scales, mask=groups < num_groups)


def quantize_groups_triton(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel. x may have any row stride."""
    rows, columns = x.shape
    groups = cdiv(columns, GROUP)
    a = torch.empty(rows, columns, dtype=FLOAT8, device=x.device)
    scales = torch.empty(rows, groups, dtype=torch.float32, device=x.device)
    if rows:
        at_once = 16 if groups >= 16 else 4
        _quantize_groups[(rows, cdiv(groups, at_once))](
            x, a, scales, x.stride(0), columns, groups, GROUPS=at_once, GROUP_SIZE=GROUP, num_warps=4
        )
    return a, scales


@jit
def tile_of(program: tl.tensor, num_rows: tl.tensor, num_columns: tl.tensor, GROUP_M: tl.constexpr) -> tl.tensor:
    """Return (row tile, column tile) of a CTA: GROUP_M rows at a time, column by column, so that CTAs running at the
    same time share tiles in the L2 cache.
    """
    per_group = GROUP_M * num_columns
    first = program // per_group * GROUP_M
    height = tl.minimum(num_rows - first, GROUP_M)
    return first + program % per_group % height, program % per_group // height


@jit
def scaled_sum(
    a_rows: tl.tensor,
    a_scale_rows: tl.tensor,
    b_rows: tl.tensor,
    b_scale_row: tl.tensor,
    is_row: tl.tensor,
    is_column: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_FLOAT8: tl.constexpr,
) -> tl.tensor:
    """Return [BLOCK_M, BLOCK_N] fp32: the GEMM over the steps [first, last) of BLOCK_K. Pointers are to the start of
    rows.

    IS_FLOAT8: each step is scaled; BLOCK_K divides 128, so a step has one scale per row of a and one per 128 rows of b.
    `b_scale_row` points to those of the tile's first rows of b.
    """
    groups: tl.constexpr = (K + 127) // 128
    accumulator = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for step in tl.range(first, last):
        columns = step * BLOCK_K + tl.arange(0, BLOCK_K)
        in_row = columns < K
        left = tl.load(a_rows[:, None] + columns[None, :], mask=is_row[:, None] & in_row[None, :], other=0.0)
        right = tl.load(b_rows[:, None] + columns[None, :], mask=is_column[:, None] & in_row[None, :], other=0.0)
        if IS_FLOAT8:
            group = step * BLOCK_K // 128
            a_scale = tl.load(a_scale_rows + group, mask=is_row, other=0.0)
            product = tl.dot(left, tl.trans(right), input_precision="tf32x3")
            if BLOCK_N <= 128:  # one scale for the tile: one load per step instead of one per sum
                accumulator += product * (a_scale * tl.load(b_scale_row + group))[:, None]
            else:
                b_scale_rows = b_scale_row + tl.arange(0, BLOCK_N) // 128 * groups
                b_scale = tl.load(b_scale_rows + group, mask=is_column, other=0.0)
                accumulator += product * (a_scale[:, None] * b_scale[None, :])
        else:
            accumulator = tl.dot(left, tl.trans(right), accumulator, input_precision="tf32x3")
    return accumulator


@kernel("num_tokens")
def _w8a8_block_fp8(
    a: tl.tensor,
    a_scales: tl.tensor,
    b: tl.tensor,
    b_scales: tl.tensor,
    y: tl.tensor,
    splits: tl.tensor,
    arrivals: tl.tensor,
    num_tokens: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SPLIT_K: tl.constexpr,
) -> None:
    """CTA (tile, split of K). splits [SPLIT_K, num_tokens, N] fp32, None without split K."""
    row_tile, column_tile = tile_of(tl.program_id(0), tl.cdiv(num_tokens, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    split = tl.program_id(1)
    rows = (row_tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    columns = (column_tile * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    is_row, is_column = rows < num_tokens, columns < N
    groups: tl.constexpr = (K + 127) // 128
    steps: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    steps_per_part: tl.constexpr = (steps + SPLIT_K - 1) // SPLIT_K
    first = split * steps_per_part
    last = tl.minimum(first + steps_per_part, steps)
    total = scaled_sum(
        a + rows * K,
        a_scales + rows * groups,
        b + columns * K,
        b_scales + column_tile * BLOCK_N // 128 * groups,
        is_row,
        is_column,
        first,
        last,
        K,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        True,
    )
    places = rows[:, None] * N + columns[None, :]
    inside = is_row[:, None] & is_column[None, :]
    is_last = True
    if SPLIT_K > 1:
        size = num_tokens.to(tl.int64) * N
        tl.store(splits + split * size + places, total, mask=inside)
        # All threads store before one of them increments the counter; the last CTA reads after it has seen the full
        # count.
        tl.debug_barrier()
        is_last = tl.atomic_add(arrivals + tl.program_id(0), 1, sem="acq_rel", scope="gpu") == SPLIT_K - 1
    if is_last:
        if SPLIT_K > 1:
            total = tl.load(splits + places, mask=inside, other=0.0)
            for other in tl.range(1, SPLIT_K):
                total += tl.load(splits + other * size + places, mask=inside, other=0.0)
            tl.store(arrivals + tl.program_id(0), 0)  # for the next launch
        tl.store(y + places, total.to(y.dtype.element_ty), mask=inside)


def w8a8_block_fp8_triton(
    a: torch.Tensor,
    a_scales: torch.Tensor,
    b: torch.Tensor,
    b_scales: torch.Tensor,
    dtype: torch.dtype,
    *,
    config: GemmConfig | None = None,
    facts: DeviceFacts | None = None,
) -> torch.Tensor:
    """Launch the kernel. Shapes must have been checked; everything is contiguous."""
    num_tokens, k = a.shape
    n = b.shape[0]
    y = torch.empty(num_tokens, n, dtype=dtype, device=a.device)
    if num_tokens == 0:
        return y
    facts = facts or device_facts(a.device)
    config = config or block_fp8_config(num_tokens, n, k, facts)
    split = min(config.split_k, cdiv(k, config.block_k))
    tiles = cdiv(num_tokens, config.block_m) * cdiv(n, config.block_n)
    splits = arrivals = None
    if split > 1:
        splits = torch.empty(split, num_tokens, n, dtype=torch.float32, device=a.device)
        arrivals = arrival_counters(a.device, next_power_of_2(tiles))
    _w8a8_block_fp8[(tiles, split)](
        a,
        a_scales,
        b,
        b_scales,
        y,
        splits,
        arrivals,
        num_tokens,
        N=n,
        K=k,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        GROUP_M=config.group_m,
        SPLIT_K=split,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return y


def _check(a: torch.Tensor, a_scales: torch.Tensor, b: torch.Tensor, b_scales: torch.Tensor) -> None:
    groups = cdiv(a.shape[1], GROUP)
    fits = (
        a.shape[1] == b.shape[1]
        and a_scales.shape == (a.shape[0], groups)
        and b_scales.shape == (cdiv(b.shape[0], GROUP), groups)
    )
    if not fits or a.dtype != FLOAT8 or b.dtype != FLOAT8:
        raise ValueError(
            f"w8a8_block_fp8: a {list(a.shape)} {a.dtype}, a_scales {list(a_scales.shape)}, b {list(b.shape)} "
            f"{b.dtype}, b_scales {list(b_scales.shape)}: a and b must be float8_e4m3fn with equal columns, and have "
            f"a scale per {GROUP} columns of a row of a, per {GROUP} x {GROUP} block of b"
        )
    if a.is_cuda and not device_facts(a.device).has_float8:
        raise ValueError(
            "w8a8_block_fp8: this GPU has no float8 matrix unit; compute capability 8.9 or later is needed"
        )


def quantize_groups(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (a, a_scales) of activations [num_tokens, K]."""
    return quantize_groups_triton(x) if x.is_cuda else quantize_groups_reference(x)


def w8a8_block_fp8(
    a: torch.Tensor, a_scales: torch.Tensor, b: torch.Tensor, b_scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return the scaled GEMM.

    Raises:
        ValueError: shapes or dtypes do not match, or the GPU has no float8.
    """
    _check(a, a_scales, b, b_scales)
    if a.is_cuda:
        tensors = (a.contiguous(), a_scales.contiguous(), b.contiguous(), b_scales.contiguous())
        if kernel_backends().gluon_float8 and is_supported(a.shape[0], a.shape[1], device_facts(a.device)):
            return w8a8_block_fp8_gluon(*tensors, dtype)
        return w8a8_block_fp8_triton(*tensors, dtype)
    return w8a8_block_fp8_reference(a, a_scales, b, b_scales, dtype)

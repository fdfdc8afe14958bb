"""Grouped GEMM of each slot's row with its expert's weights:  y[slot] = a[slot // rows_per_a] @ b[expert(slot)]^T.

a         [num_tokens, K] (rows_per_a = top_k: each token feeds all its slots) or [num_slots, K] (rows_per_a = 1)
b         [num_experts, N, K]
bias      [num_experts, N] of any of these dtypes, or None: added to each row of its expert
y         [num_slots, N]: slots of experts on other ranks are not written
a, b of one dtype fp32 | bf16 | fp16, or float8_e4m3fn with a_scales [rows of a, ceil(K / 128)] and
b_scales [num_experts, ceil(N / 128), ceil(K / 128)] (see w8a8_block_fp8)

Memory-bound for few tokens (the weights of the active experts), compute-bound for many. Source: own.
"""

import torch

from trimtab_kernels.launch.device_facts import DeviceFacts
from trimtab_kernels.launch.gemm_config import GemmConfig, config_file_name, device_name, load_configs, nearest
from trimtab_kernels.launch.jit import cdiv, kernel, next_power_of_2, tl
from trimtab_kernels.moe.alignment import Alignment
from trimtab_kernels.reshape_and_cache import FLOAT8
from trimtab_kernels.w8a8_block_fp8 import scaled_sum, tile_of


def default_moe_config(num_tokens: int, top_k: int, num_experts: int, itemsize: int, facts: DeviceFacts) -> GemmConfig:
    """Return tiles as tall as the average number of tokens per expert: taller ones would compute padding. On Hopper,
    16-bit tiles are 256 wide: two of 128 would read a quarter more from the L2 cache, which is the limit.
    """
    per_expert = cdiv(num_tokens * top_k, num_experts)
    block_m = min(128, max(16, next_power_of_2(per_expert)))
    block_n = 64 if block_m <= 32 or itemsize == 4 else 128
    if block_m == 128 and itemsize == 2 and facts.capability == 90:
        block_n = 256
    block_k = 128 // itemsize
    stages = 4
    while stages > 1 and (block_m + block_n) * block_k * itemsize * stages > facts.shared_bytes:
        stages -= 1
    return GemmConfig(block_m, block_n, block_k, 8, 8 if block_m >= 128 else 4, stages)


def moe_config(
    num_tokens: int, top_k: int, num_experts: int, n: int, k: int, dtype: torch.dtype, facts: DeviceFacts
) -> GemmConfig:
    """Return a measured configuration if there is one, by the nearest number of tokens. Without a GPU, no file is
    read.
    """
    if torch.cuda.is_available():
        kind = "fp8_w8a8" if dtype == FLOAT8 else str(dtype).removeprefix("torch.")
        measured = load_configs(config_file_name(n, k, device_name(), num_experts=num_experts, dtype=kind))
        if measured:
            return nearest(measured, num_tokens)
    return default_moe_config(num_tokens, top_k, num_experts, dtype.itemsize, facts)


@kernel("num_slots")
def _grouped_gemm(
    a: tl.tensor,
    a_scales: tl.tensor,
    b: tl.tensor,
    b_scales: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    sorted_slots: tl.tensor,
    tile_experts: tl.tensor,
    num_padded: tl.tensor,
    num_slots: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS_PER_A: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    IS_FLOAT8: tl.constexpr,
) -> None:
    """CTA: a tile of slots that share an expert, and of columns. CTAs beyond the tiles in use end at once."""
    num_rows = tl.load(num_padded) // BLOCK_M
    num_columns: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    if program < num_rows * num_columns:
        row_tile, column_tile = tile_of(program, num_rows, num_columns, GROUP_M)
        expert = tl.load(tile_experts + row_tile).to(tl.int64)
        slots = tl.load(sorted_slots + row_tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        columns = (column_tile * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
        is_row, is_column = slots < num_slots, columns < N
        rows = slots // ROWS_PER_A
        groups: tl.constexpr = (K + 127) // 128
        column_groups: tl.constexpr = (N + 127) // 128
        a_scale_rows = rows
        b_scale_row = expert
        if IS_FLOAT8:
            a_scale_rows = a_scales + rows * groups
            b_scale_row = b_scales + (expert * column_groups + column_tile * BLOCK_N // 128) * groups
        total = scaled_sum(
            a + rows * K,
            a_scale_rows,
            b + (expert * N + columns) * K,
            b_scale_row,
            is_row,
            is_column,
            0,
            (K + BLOCK_K - 1) // BLOCK_K,
            K,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            IS_FLOAT8,
        )
        if bias is not None:
            total += tl.load(bias + expert * N + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
        places = y + slots[:, None] * N + columns[None, :]
        tl.store(places, total.to(y.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


def grouped_gemm_triton(
    a: torch.Tensor,
    b: torch.Tensor,
    alignment: Alignment,
    num_slots: int,
    config: GemmConfig,
    dtype: torch.dtype,
    *,
    a_scales: torch.Tensor | None = None,
    b_scales: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Launch the kernel. All tensors are contiguous; the alignment was made with the configuration's block_m."""
    _, n, k = b.shape
    y = torch.empty(num_slots, n, dtype=dtype, device=a.device)
    _grouped_gemm[(alignment.max_tiles * cdiv(n, config.block_n),)](
        a,
        a_scales,
        b,
        b_scales,
        bias,
        y,
        alignment.sorted_slots,
        alignment.tile_experts,
        alignment.num_padded,
        num_slots,
        N=n,
        K=k,
        ROWS_PER_A=num_slots // a.shape[0],
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        GROUP_M=config.group_m,
        IS_FLOAT8=a.dtype == FLOAT8,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return y

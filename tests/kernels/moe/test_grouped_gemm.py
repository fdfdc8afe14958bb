"""grouped_gemm against one GEMM per slot, with plain and with float8 block-scaled weights."""

from itertools import chain

import pytest
import torch
from trimtab_kernels.launch.device_facts import TARGETS
from trimtab_kernels.launch.gemm_config import GemmConfig
from trimtab_kernels.moe.alignment import Alignment, align_triton
from trimtab_kernels.moe.grouped_gemm import default_moe_config, grouped_gemm_triton
from trimtab_kernels.w8a8_block_fp8 import w8a8_block_fp8_reference

FLOAT8 = torch.float8_e4m3fn
EXPERTS = [[2, 0], [-1, 2], [1, 2], [0, 1], [2, -1]]


def aligned() -> Alignment:
    return align_triton(torch.tensor(EXPERTS, dtype=torch.int32), 3, 16)


@pytest.mark.parametrize("rows_per_a", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_grouped_gemm_multiplies_each_slot_by_its_expert(rows_per_a: int, dtype: torch.dtype) -> None:
    a, b = torch.randn(10 // rows_per_a, 70).to(dtype), torch.randn(3, 45, 70).to(dtype)
    config = GemmConfig(16, 32, 32, 2, 4, 2)
    y = grouped_gemm_triton(a, b, aligned(), 10, config, dtype)
    for slot, expert in enumerate(chain.from_iterable(EXPERTS)):
        if expert >= 0:
            expected = a[slot // rows_per_a].float() @ b[expert].float().t()
            torch.testing.assert_close(
                y[slot].float(), expected, rtol=1e-2, atol=2e-2 if dtype == torch.float16 else 1e-4
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_grouped_gemm_adds_bias_of_each_rows_expert(dtype: torch.dtype) -> None:
    a, b, bias = torch.randn(5, 70).to(dtype), torch.randn(3, 45, 70).to(dtype), torch.randn(3, 45).to(dtype)
    config = GemmConfig(16, 32, 32, 2, 4, 2)
    plain, ours = (grouped_gemm_triton(a, b, aligned(), 10, config, torch.float32, bias=x) for x in (None, bias))
    for slot, expert in enumerate(chain.from_iterable(EXPERTS)):
        if expert >= 0:
            assert torch.equal(ours[slot], plain[slot] + bias[expert].float())


def test_grouped_gemm_scales_float8_weights_by_blocks() -> None:
    a, b = torch.randn(5, 256).to(FLOAT8), torch.randn(3, 140, 256).to(FLOAT8)
    a_scales, b_scales = torch.rand(5, 2) + 0.1, torch.rand(3, 2, 2) + 0.1
    y = grouped_gemm_triton(
        a, b, aligned(), 10, GemmConfig(16, 64, 128, 2, 4, 2), torch.float32,
        a_scales=a_scales, b_scales=b_scales,
    )  # fmt: skip
    for slot, expert in enumerate(chain.from_iterable(EXPERTS)):
        if expert >= 0:
            row = slice(slot // 2, slot // 2 + 1)
            expected = w8a8_block_fp8_reference(a[row], a_scales[row], b[expert], b_scales[expert], torch.float32)
            torch.testing.assert_close(y[slot : slot + 1], expected, rtol=1e-4, atol=1e-3)


def test_default_moe_tiles_fit_targets_and_follow_expert_load() -> None:
    for facts in TARGETS:
        for itemsize in (1, 2, 4):
            for num_tokens in (1, 64, 8192):
                config = default_moe_config(num_tokens, 8, 128, itemsize, facts)
                assert config.operand_bytes * itemsize <= facts.shared_bytes
    assert default_moe_config(1, 8, 128, 2, TARGETS[2]).block_m == 16
    assert default_moe_config(8192, 8, 128, 2, TARGETS[2]).block_m == 128

"""The warp-specialised float8 block GEMM against the reference. Without a GPU, its source runs as plain Python in an
order derived from a seed (see gluon_stand_in for what this checks); on a Hopper GPU it runs as compiled.
"""

import os

import pytest
import torch
from gluon_stand_in import Box, pointer, run_program, value
from trimtab_kernels import w8a8_block_fp8_gluon as gluon_module
from trimtab_kernels.launch.device_facts import A100, H200
from trimtab_kernels.launch.jit import HAS_TRITON
from trimtab_kernels.w8a8_block_fp8 import quantize_blocks, quantize_groups_reference, w8a8_block_fp8_reference
from trimtab_kernels.w8a8_block_fp8_gluon import GROUP_M, HALF, ROWS, STAGES, STEP, is_supported, w8a8_block_fp8_gluon

ON_GPU = os.environ["TRITON_INTERPRET"] == "0"
IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="its source is decorated by Triton")


def operands(num_tokens: int, n: int, k: int) -> Operands:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(num_tokens, k, generator=generator)
    weight = torch.randn(n, k, generator=generator)
    return (*quantize_groups_reference(x), *quantize_blocks(weight))


def as_python(
    a: torch.Tensor, a_scales: torch.Tensor, b: torch.Tensor, b_scales: torch.Tensor, *, num_programs: int, seed: int
) -> torch.Tensor:
    """Run all CTAs of the launch in the stand-in."""
    num_tokens, n = a.shape[0], b.shape[0]
    y = torch.full((num_tokens, n), float("nan"), dtype=torch.float32)
    for program in range(num_programs):
        arguments = {
            "a_box": Box(a, [ROWS // 2, STEP]),
            "a_scales": pointer(a_scales),
            "b_box": Box(b, [HALF, STEP]),
            "b_scales": pointer(b_scales),
            "y": pointer(y),
            "num_tokens": value(num_tokens),
            "N": n,
            "STEPS": a.shape[1] // STEP,
            "BLOCK_M": ROWS,
            "STAGES": STAGES,
            "GROUP_M": GROUP_M,
            "REGISTERS": (),
        }
        run_program(
            gluon_module,
            "_w8a8_block_fp8_gluon",
            arguments,
            program=program,
            num_programs=num_programs,
            seed=100 * seed + program,
        )
    return y


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("num_tokens", "n", "k", "num_programs"),
    [
        (128, 256, 128, 1),
        (130, 300, 640, 1),  # four tiles of one CTA: buffers wrap around across tiles
        (130, 300, 640, 3),
        (1200, 136, 256, 4),  # more row tiles than one group; the right half of a tile is partial
        (65, 64, 384, 1),  # without a right half
    ],
)
def test_gluon_gemm_matches_reference(num_tokens: int, n: int, k: int, num_programs: int, seed: int) -> None:
    tensors = operands(num_tokens, n, k)
    expected = w8a8_block_fp8_reference(*tensors, torch.float32)
    if ON_GPU:
        if not IS_HOPPER:
            pytest.skip("the kernel is for Hopper")
        found = w8a8_block_fp8_gluon(*tensors, torch.float32)
    else:
        found = as_python(*tensors, num_programs=num_programs, seed=seed)
    # Matrix units add float8 products with about 14 bits.
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=2e-3 * float(expected.abs().max()))


@pytest.mark.cpu
def test_gluon_gemm_supports_many_tokens_on_hopper() -> None:
    assert is_supported(1024, 4096, H200)
    assert not is_supported(1023, 4096, H200)
    assert not is_supported(4096, 4096 + 64, H200)
    assert not is_supported(4096, 4096, A100)


@pytest.mark.cpu
def test_gluon_gemm_tiles_fit_shared_memory() -> None:
    assert H200.shared_bytes >= STAGES * (ROWS + 2 * HALF) * STEP + 1024

"""Linear layers with block-fp8 weights: the kernel's reference on the CPU, in one part or several."""

import pytest
import torch
from trimtab_engine.layers.quantized import BlockFp8, BlockFp8Linear, joined_blocks, multiplies_float8, stacked


@pytest.mark.parametrize("sizes", [(128, 256, 40), (40, 128), (130, 128, 7)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_projections_joined_give_what_each_gives(sizes: tuple[int, ...], has_bias: bool) -> None:
    weights = [torch.randn(size, 200) for size in sizes]
    bias = torch.randn(sum(sizes)) if has_bias else None
    x = torch.randn(5, 200)
    blocks = [BlockFp8.of(weight) for weight in weights]
    y = BlockFp8Linear(joined_blocks(blocks), bias, torch.float32)(x)
    expected = torch.cat([block.restored(torch.float32) for block in blocks])
    exact = torch.nn.functional.linear(x, expected, bias)
    # Each activation is rounded to 3 bits: an error of 2^-4 at most each, which the sum over 200 averages out.
    assert float((y - exact).norm() / exact.norm()) < 2**-4
    assert y.shape == (5, sum(sizes))


def test_only_whole_blocks_have_another_part_behind_them() -> None:
    parts = [BlockFp8.of(torch.randn(rows, 128)) for rows in (128, 256, 40, 128, 7)]
    assert [part.values.shape[0] for part in joined_blocks(parts)] == [424, 135]


def test_a_weight_and_what_is_made_of_it_again_differ_by_one_rounding() -> None:
    weight = torch.randn(300, 130) * torch.logspace(-3, 3, 300).unsqueeze(1)
    restored = BlockFp8.of(weight).restored(torch.float32)
    largest = weight.abs().amax()
    assert float((restored - weight).abs().max()) <= 2**-4 * float(largest)
    assert torch.equal(BlockFp8.of(restored).restored(torch.float32), restored), "once rounded, it stays"


def test_experts_are_stacked_with_their_scales() -> None:
    blocks: list[torch.Tensor | BlockFp8] = [BlockFp8.of(torch.randn(256, 130)) for _ in range(3)]
    values, scales = stacked(blocks)
    assert scales is not None
    assert (values.dtype, values.shape, scales.shape) == (torch.float8_e4m3fn, (3, 256, 130), (3, 2, 2))
    dense, none = stacked([torch.randn(4, 5)])
    assert (dense.shape, none) == ((1, 4, 5), None)


def test_the_cpu_does_not_multiply_float8() -> None:
    assert not multiplies_float8(torch.device("cpu"))

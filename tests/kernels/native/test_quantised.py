"""Products with weights of 4 and 8 bits: those of the weights that ggml makes of the same blocks."""

import gguf
import pytest
import torch
from trimtab_kernels.native.library import NativeLibrary
from trimtab_kernels.native.matrix import multiply_reference, pack_blocks
from trimtab_kernels.native.quantised import FORMS, GROUP, WITH_ZEROS, QuantisedBlocks, joined

NAMES = (*FORMS, WITH_ZEROS.name)
STEP = 1 / 32767
"""Of x: what its integers are apart, as a part of a group's largest."""


def a_weight(name: str, out: int, size: int, seed: int = 0) -> tuple[QuantisedBlocks, torch.Tensor]:
    """Blocks of random numbers, and what ggml's own code makes of them; where it has no such form, this page."""
    if name == WITH_ZEROS.name:
        return a_weight_with_zeros(out, size, seed)
    kind = gguf.GGMLQuantizationType[name]
    numbers = torch.randn(out, size, generator=torch.Generator().manual_seed(seed))
    stored = gguf.quants.quantize(numbers.numpy(), kind)
    return QuantisedBlocks(FORMS[name], torch.tensor(stored)), torch.tensor(gguf.quants.dequantize(stored, kind))


def a_weight_with_zeros(out: int, size: int, seed: int) -> tuple[QuantisedBlocks, torch.Tensor]:
    """The lower 4 bits of a block's 16 bytes are its first numbers, the upper ones its last."""
    generator = torch.Generator().manual_seed(seed)
    numbers, zeros = (torch.randint(16, (out, size // GROUP, count), generator=generator) for count in (GROUP, 1))
    scales = torch.rand(zeros.shape, generator=generator).half()
    stored = (numbers[..., :16] | numbers[..., 16:] << 4).to(torch.uint8)
    data = torch.cat([scales.view(torch.uint8), zeros.half().view(torch.uint8), stored], dim=-1)
    return QuantisedBlocks(WITH_ZEROS, data.view(out, -1)), ((numbers - zeros) * scales.float()).view(out, size)


def rows_of(count: int, size: int) -> torch.Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(count))


def check(actual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    """Each number of x is off by half a step of its group at most, and float32 sums are off by their own rounding."""
    steps = x.view(x.shape[0], -1, GROUP).abs().amax(dim=2, keepdim=True).expand(-1, -1, GROUP).reshape(x.shape) * STEP
    epsilon = 8 * torch.finfo(torch.float32).eps
    allowed = (0.5 * steps + epsilon * x.abs()).double() @ weight.double().abs().t() + 1e-30
    assert ((actual.double() - x.double() @ weight.double().t()).abs() <= allowed).all()


@pytest.mark.parametrize("name", NAMES)
def test_restored_weights_are_ggmls_bit_for_bit(name: str) -> None:
    blocks, weight = a_weight(name, 7, 96)
    assert blocks.shape == (7, 96)
    assert torch.equal(blocks.restored(), weight)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("out", "size"), [(1, 32), (7, 96), (71, 576), (160, 64)])
def test_products_are_those_of_the_restored_weights(library: NativeLibrary, name: str, out: int, size: int) -> None:
    blocks, weight = a_weight(name, out, size)
    packed = pack_blocks(library, blocks)
    for count in (1, 2, 3, 6, 7, 24, 25, 241):
        x = rows_of(count, size)
        check(packed(x), x, weight)


@pytest.mark.parametrize("name", NAMES)
def test_a_row_is_computed_alike_however_many_there_are(library: NativeLibrary, name: str) -> None:
    packed = pack_blocks(library, a_weight(name, 71, 96)[0])
    x = rows_of(241, 96)
    together = packed(x)
    for first, last in ((0, 1), (3, 5), (7, 13), (100, 130)):
        assert torch.equal(packed(x[first:last]), together[first:last])


def test_the_gated_product_and_biases(library: NativeLibrary) -> None:
    blocks, weight = a_weight("Q4_1", 66, 64)
    bias, x = torch.randn(66), rows_of(26, 64)
    gated = pack_blocks(library, blocks, bias, is_gated=True)(x)
    expected = multiply_reference(x, weight, bias, is_gated=True)
    torch.testing.assert_close(gated, expected, rtol=1e-3, atol=1e-2)


def test_weights_stay_as_small_as_they_are_stored(library: NativeLibrary) -> None:
    for name, bits in (("Q4_0", 4.5), ("Q4_1", 5.0), ("Q8_0", 8.5), ("zeros", 5.0)):
        packed = pack_blocks(library, a_weight(name, 64, 128)[0])
        assert packed.weight.numel() * 4 == 64 * 128 * bits / 8, name


def test_what_is_no_number_stays_none_and_nothing_stays_nothing(library: NativeLibrary) -> None:
    packed = pack_blocks(library, a_weight("Q4_0", 9, 64)[0])
    x = rows_of(5, 64)
    x[1, 3], x[2, 40], x[3] = float("nan"), float("inf"), 0.0
    y = packed(x)
    assert y[1].isnan().all()
    assert y[2].isnan().all()
    assert (y[3] == 0).all()
    assert y[[0, 4]].isfinite().all()


def test_rows_of_one_form_are_joined_and_of_two_are_not() -> None:
    first, second = a_weight("Q4_0", 4, 64)[0], a_weight("Q4_0", 6, 64, seed=1)[0]
    whole = joined([first, second])
    assert whole is not None
    assert torch.equal(whole.restored(), torch.cat([first.restored(), second.restored()]))
    assert joined([first, a_weight("Q8_0", 4, 64)[0]]) is None


def test_halves_and_biases_that_do_not_fit_are_refused(library: NativeLibrary) -> None:
    blocks = a_weight("Q4_0", 3, 32)[0]
    with pytest.raises(ValueError, match="pack_blocks"):
        pack_blocks(library, blocks, is_gated=True)
    with pytest.raises(ValueError, match="pack_blocks"):
        pack_blocks(library, blocks, torch.zeros(4))

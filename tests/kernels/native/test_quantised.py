"""GEMMs with weights of 4 to 8 bits against the weights that ggml dequantises from the same blocks."""

import gguf
import pytest
import torch
from trimtab_kernels.native.library import NativeLibrary
from trimtab_kernels.native.matrix import multiply_reference, pack_blocks
from trimtab_kernels.native.quantised import (
    BLOCK_FORMATS,
    FLOAT8,
    GROUP,
    MXFP4,
    ZERO_POINTS,
    BlockFormat,
    MixedBlocks,
    QuantisedBlocks,
    joined,
)

OURS = {form.name: form for form in (ZERO_POINTS, MXFP4, FLOAT8)}
"""The formats that ggml lacks."""
NAMES = (*BLOCK_FORMATS, *OURS)
FACTORS = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Offsets of a block's float16 numbers; 0 if not listed."""
BITS = {
    "Q4_0": 4.5,
    "Q4_1": 5.0,
    "zeros": 5.0,
    "Q5_0": 5.5,
    "Q5_1": 6.0,
    "Q8_0": 8.5,
    "Q4_K": 4.625,
    "Q5_K": 5.625,
    "Q6_K": 6.5625,
    "e2m1": 4.5,
    "e4m3": 8.0,
}
"""Bits per packed weight."""
STEP = 1 / 32767
"""Step of x's integers, relative to a group's largest value."""


def a_weight(name: str, out: int, size: int, seed: int = 0) -> tuple[QuantisedBlocks, torch.Tensor]:
    """Return blocks of random bits with finite factors, and the weight that ggml's code dequantises; for formats that
    ggml lacks, this module's.
    """
    if name in OURS:
        return {ZERO_POINTS.name: a_weight_with_zeros, MXFP4.name: a_weight_in_e2m1, FLOAT8.name: a_weight_in_e4m3}[
            name
        ](out, size, seed)
    form, generator = BLOCK_FORMATS[name], torch.Generator().manual_seed(seed)
    count = out * (size // form.numbers)
    data = torch.randint(256, (count, form.block_bytes), dtype=torch.uint8, generator=generator)
    for place in FACTORS.get(name, (0,)):
        factors = torch.randn(count, 1, generator=generator).half()
        data[:, place : place + 2] = factors.view(torch.uint8)
    data = data.view(out, -1)
    weight = gguf.quants.dequantize(data.numpy(), gguf.GGMLQuantizationType[name])
    return QuantisedBlocks(form, data), torch.tensor(weight)


def whole_blocks(name: str, size: int) -> int:
    """Return a size close to this one that whole blocks fill."""
    numbers = form_of(name).numbers
    return -(-size // numbers) * numbers


def form_of(name: str) -> BlockFormat:
    return OURS[name] if name in OURS else BLOCK_FORMATS[name]


def a_weight_in_e2m1(out: int, size: int, seed: int) -> tuple[QuantisedBlocks, torch.Tensor]:
    """Return a weight in e2m1. ggml's MXFP4 has the same numbers in the same places, but a one-byte power of two as its
    factor.
    """
    generator = torch.Generator().manual_seed(seed)
    count = out * (size // GROUP)
    numbers = torch.randint(256, (count, 16), dtype=torch.uint8, generator=generator)
    powers = torch.randint(118, 136, (count, 1), dtype=torch.uint8, generator=generator)
    theirs = torch.cat([powers, numbers], dim=1).numpy()
    weight = torch.tensor(gguf.quants.dequantize(theirs, gguf.GGMLQuantizationType.MXFP4)).view(out, size)
    halves = torch.exp2(powers.float() - 128).half()
    return QuantisedBlocks(MXFP4, torch.cat([halves.view(torch.uint8), numbers], dim=1).view(out, -1)), weight


def a_weight_in_e4m3(out: int, size: int, seed: int) -> tuple[QuantisedBlocks, torch.Tensor]:
    """Return a weight in e4m3: all bytes except NaN's are numbers, decoded by torch."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(255, (out, size), dtype=torch.uint8, generator=generator)
    data[data & 127 == 127] = 0
    scales = torch.rand(out, generator=generator) * 0.1
    weight = data.view(torch.float8_e4m3fn).float() * scales.unsqueeze(1)
    return QuantisedBlocks(FLOAT8, data, scales), weight


def a_weight_with_zeros(out: int, size: int, seed: int) -> tuple[QuantisedBlocks, torch.Tensor]:
    """Return a weight with zero points. The lower nibbles of a block's 16 bytes are its first numbers, the upper ones
    its last.
    """
    generator = torch.Generator().manual_seed(seed)
    numbers, zeros = (torch.randint(16, (out, size // GROUP, count), generator=generator) for count in (GROUP, 1))
    scales = torch.rand(zeros.shape, generator=generator).half()
    stored = (numbers[..., :16] | numbers[..., 16:] << 4).to(torch.uint8)
    data = torch.cat([scales.view(torch.uint8), zeros.half().view(torch.uint8), stored], dim=-1)
    return QuantisedBlocks(ZERO_POINTS, data.view(out, -1)), ((numbers - zeros) * scales.float()).view(out, size)


def rows_of(count: int, size: int) -> torch.Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(count))


def check(actual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    """Compare with a tolerance of half a step of its group per number of x, and of float32's rounding of the summands,
    which exceed the weight in blocks with a min.
    """
    steps = x.view(x.shape[0], -1, GROUP).abs().amax(dim=2, keepdim=True).expand(-1, -1, GROUP).reshape(x.shape) * STEP
    summed = weight.abs() + 2 * weight.view(len(weight), -1, GROUP).abs().amax(dim=2).repeat_interleave(GROUP, dim=1)
    allowed = 0.5 * steps.double() @ weight.double().abs().t() + 1e-30
    allowed += 8 * torch.finfo(torch.float32).eps * x.double().abs() @ summed.double().t()
    assert ((actual.double() - x.double() @ weight.double().t()).abs() <= allowed).all()


@pytest.mark.parametrize("name", NAMES)
def test_restored_weights_equal_ggmls_bitwise(name: str) -> None:
    size = whole_blocks(name, 600)
    blocks, weight = a_weight(name, 50, size)
    assert blocks.shape == (50, size)
    assert torch.equal(blocks.restored(), weight)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("out", "size"), [(1, 32), (7, 96), (71, 576), (160, 64)])
def test_multiply_equals_restored_weights(library: NativeLibrary, name: str, out: int, size: int) -> None:
    size = whole_blocks(name, size)
    blocks, weight = a_weight(name, out, size)
    packed = pack_blocks(library, blocks)
    for count in (1, 2, 3, 6, 7, 24, 25, 241):
        x = rows_of(count, size)
        check(packed(x), x, weight)


@pytest.mark.parametrize("name", NAMES)
def test_row_result_does_not_depend_on_number_of_rows(library: NativeLibrary, name: str) -> None:
    size = whole_blocks(name, 96)
    packed = pack_blocks(library, a_weight(name, 71, size)[0])
    x = rows_of(241, size)
    together = packed(x)
    for first, last in ((0, 1), (3, 5), (7, 13), (100, 130)):
        assert torch.equal(packed(x[first:last]), together[first:last])


def test_gated_multiply_with_biases(library: NativeLibrary) -> None:
    blocks, weight = a_weight("Q4_1", 66, 64)
    bias, x = torch.randn(66), rows_of(26, 64) * 1e-2
    gated = pack_blocks(library, blocks, bias, is_gated=True)(x)
    expected = multiply_reference(x, weight, bias, is_gated=True)
    torch.testing.assert_close(gated, expected, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("is_scaled", [False, True], ids=["as it is", "with scales and an order"])
def test_multiply_without_gate_returns_both_halves(library: NativeLibrary, is_scaled: bool) -> None:
    blocks, _ = a_weight("Q4_1", 66, 64)
    if is_scaled:
        generator = torch.Generator().manual_seed(4)
        scales, order = torch.rand(66, generator=generator), torch.randperm(64, generator=generator).int()
        blocks = QuantisedBlocks(blocks.form, blocks.data, scales, order)
    bias, x = torch.randn(66), rows_of(26, 64) * 1e-2
    whole = pack_blocks(library, blocks, bias)(x)
    before = pack_blocks(library, blocks, bias, is_gated=True).multiply_without_gate(x)
    torch.testing.assert_close(before, whole, rtol=1e-6, atol=1e-6 if is_scaled else 0.0)


@pytest.mark.parametrize("name", NAMES)
def test_packed_weights_stay_as_small_as_stored(library: NativeLibrary, name: str) -> None:
    blocks = a_weight(name, 64, 512)[0]
    packed = pack_blocks(library, blocks).weight.numel() * 4
    assert packed == 64 * 512 * BITS[name] / 8
    assert packed == 64 * 512 // blocks.form.numbers * blocks.form.packed_bytes


def test_every_float8_except_nan_is_multiplied_exactly(library: NativeLibrary) -> None:
    data = torch.arange(256, dtype=torch.uint8).view(32, 8)
    data[data & 127 == 127] = 0
    y = pack_blocks(library, QuantisedBlocks(FLOAT8, data))(torch.eye(8))
    assert torch.equal(y, data.view(torch.float8_e4m3fn).float().t())


@pytest.mark.parametrize("name", ["Q4_0", "zeros", "Q8_0", "e2m1"])
@pytest.mark.parametrize("is_gated", [False, True], ids=["plain", "gated"])
def test_row_scales_and_column_order_are_applied(library: NativeLibrary, name: str, is_gated: bool) -> None:
    (blocks, _), generator = a_weight(name, 70, 96), torch.Generator().manual_seed(3)
    scales, order = torch.rand(70, generator=generator) * 0.01, torch.randperm(96, generator=generator).int()
    stored = QuantisedBlocks(blocks.form, blocks.data, scales, order)
    plain = blocks.restored() * scales.unsqueeze(1)
    assert torch.equal(stored.restored()[:, order.long()], plain)
    bias, x = torch.randn(70, generator=generator), rows_of(26, 96) * 1e-2
    expected = multiply_reference(x, stored.restored(), bias, is_gated=is_gated)
    actual = pack_blocks(library, stored, bias, is_gated=is_gated)(x)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_mixed_orders_and_float8_with_integers_are_not_joined() -> None:
    first, second = (a_weight("Q4_0", 32, 64, seed=seed)[0] for seed in (0, 1))
    order = torch.arange(63, -1, -1, dtype=torch.int32)
    turned = QuantisedBlocks(first.form, first.data, None, order)
    assert joined([turned, second]) is None
    assert joined([turned, QuantisedBlocks(second.form, second.data, None, order.flip(0))]) is None
    whole = joined([turned, QuantisedBlocks(second.form, second.data, torch.full((32,), 2.0), order)])
    assert isinstance(whole, QuantisedBlocks)
    assert torch.equal(whole.restored(), torch.cat([turned.restored(), second.restored()[:, order.long()] * 2]))
    assert joined([a_weight("e4m3", 32, 64)[0], a_weight("Q8_0", 32, 64)[0]]) is None


def test_order_with_float8_is_rejected(library: NativeLibrary) -> None:
    blocks = a_weight("e4m3", 32, 64)[0]
    with pytest.raises(ValueError, match="requires integer formats"):
        pack_blocks(library, QuantisedBlocks(FLOAT8, blocks.data, None, torch.arange(64).int()))


def test_nan_propagates_and_zero_stays_zero(library: NativeLibrary) -> None:
    packed = pack_blocks(library, a_weight("Q4_0", 9, 64)[0])
    x = rows_of(5, 64)
    x[1, 3], x[2, 40], x[3] = float("nan"), float("inf"), 0.0
    y = packed(x)
    assert y[1].isnan().all()
    assert y[2].isnan().all()
    assert (y[3] == 0).all()
    assert y[[0, 4]].isfinite().all()


def test_rows_of_one_format_are_joined_to_one_weight() -> None:
    first, second = a_weight("Q4_0", 4, 64)[0], a_weight("Q4_0", 6, 64, seed=1)[0]
    whole = joined([first, second])
    assert isinstance(whole, QuantisedBlocks)
    assert torch.equal(whole.restored(), torch.cat([first.restored(), second.restored()]))


def test_rows_of_several_formats_are_multiplied_together(library: NativeLibrary) -> None:
    parts = [a_weight(name, rows, 256, seed=rows) for name, rows in (("Q4_K", 64), ("Q4_K", 32), ("Q6_K", 40))]
    mixed, bias, x = joined([blocks for blocks, _ in parts]), torch.randn(136), rows_of(26, 256)
    assert isinstance(mixed, MixedBlocks)
    assert [part.shape[0] for part in mixed.parts] == [96, 40]
    apart = torch.cat([pack_blocks(library, blocks)(x) for blocks, _ in parts], dim=1)
    assert torch.equal(pack_blocks(library, mixed, bias)(x), apart + bias)


def test_gate_and_up_may_have_two_formats(library: NativeLibrary) -> None:
    (gate, gates), (up, ups) = (a_weight(name, 64, 256, seed=7) for name in ("Q4_K", "Q5_K"))
    mixed, x = joined([gate, up]), rows_of(26, 256) * 1e-3
    assert isinstance(mixed, MixedBlocks)
    expected = multiply_reference(x, torch.cat([gates, ups]), is_gated=True)
    packed = pack_blocks(library, mixed, is_gated=True)
    torch.testing.assert_close(packed(x), expected, rtol=1e-3, atol=1e-2)
    apart = torch.cat([pack_blocks(library, blocks)(x) for blocks in mixed.parts], dim=1)
    assert torch.equal(packed.multiply_without_gate(x), apart)


def test_format_change_within_panel_is_not_joined(library: NativeLibrary) -> None:
    first, second = a_weight("Q4_0", 4, 64)[0], a_weight("Q8_0", 4, 64)[0]
    assert joined([first, second]) is None
    with pytest.raises(ValueError, match="no whole panels"):
        pack_blocks(library, MixedBlocks((first, second)))


def test_pack_blocks_rejects_mismatched_halves_and_biases(library: NativeLibrary) -> None:
    blocks = a_weight("Q4_0", 3, 32)[0]
    with pytest.raises(ValueError, match="pack_blocks"):
        pack_blocks(library, blocks, is_gated=True)
    with pytest.raises(ValueError, match="pack_blocks"):
        pack_blocks(library, blocks, torch.zeros(4))
    mixed = MixedBlocks((a_weight("Q4_0", 96, 32)[0], a_weight("Q8_0", 32, 32)[0]))
    with pytest.raises(ValueError, match="not two equal halves"):
        pack_blocks(library, mixed, is_gated=True)

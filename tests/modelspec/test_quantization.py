"""Requested, stored and rejected quantization."""

import pytest
from trimtab_engine.errors import ConfigError, NotSupportedError
from trimtab_modelspec.four_bit_format import FourBits
from trimtab_modelspec.quantization import (
    Quantization,
    check_aligned,
    stored_format,
    stored_quantization,
    wanted_quantization,
)

STORED = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}


def test_a_checkpoint_in_blocks_of_128_is_taken_as_it_is() -> None:
    assert stored_quantization({"quantization_config": STORED}, "config.json") == Quantization(is_stored=True)
    assert stored_quantization({}, "config.json") is None


@pytest.mark.parametrize(
    ("scheme", "form"),
    [
        ({"quant_method": "awq", "group_size": 64}, FourBits("awq", 64)),
        ({"quant_method": "gptq", "group_size": -1}, FourBits("gptq", None, is_symmetric=True, zero_offset=1)),
        ({"quant_method": "gptq", "sym": False}, FourBits("gptq", 128, zero_offset=1)),
        ({"quant_method": "gptq", "sym": False, "checkpoint_format": "gptq_v2"}, FourBits("gptq", 128)),
        (
            {"quant_method": "gptq", "sym": False, "desc_act": True},
            FourBits("gptq", 128, is_ordered=True, zero_offset=1),
        ),
        (
            {"quant_method": "gptq", "sym": False, "desc_act": True, "static_groups": True},
            FourBits("gptq", 128, zero_offset=1),
        ),
    ],
)
def test_integers_of_4_bits_are_known_and_are_no_fp8(scheme: dict[str, object], form: FourBits) -> None:
    config = {"quantization_config": scheme}
    assert stored_format(config, "config.json") == form
    assert stored_quantization(config, "config.json") is None


@pytest.mark.parametrize(
    ("stored", "asked", "has_weights", "is_stored"),
    [
        (False, None, True, None),
        (False, "fp8", True, False),
        (True, None, True, True),
        (True, "fp8", True, True),
        (True, None, False, False),  # dummy weights of a quantised configuration
    ],
)
def test_stored_quantization_precedes_requested(
    stored: bool, asked: str | None, has_weights: bool, is_stored: bool | None
) -> None:
    found = wanted_quantization(Quantization(True) if stored else None, asked, has_weights=has_weights)
    assert (None if found is None else found.is_stored) == is_stored


def test_another_method_is_refused_by_name() -> None:
    with pytest.raises(NotSupportedError, match="--quantization gptq is not supported; supported: fp8"):
        wanted_quantization(None, "gptq", has_weights=True)


@pytest.mark.parametrize("span", [(0, 300), (128, 256), (256, 300), (0, 128)])
def test_parts_of_whole_blocks_are_fine(span: tuple[int, int]) -> None:
    check_aligned("q_proj", span, 300)


@pytest.mark.parametrize("span", [(0, 150), (150, 300), (64, 128)])
def test_a_part_that_cuts_a_block_is_refused_with_the_numbers(span: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match=rf"300 rows or columns are split at {span[0]} and {span[1]}"):
        check_aligned("q_proj", span, 300)

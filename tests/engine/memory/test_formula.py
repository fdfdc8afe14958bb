"""The memory formula against the golden cases that the operator is tested on as well, its errors, and the ledger."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trimtab_engine.errors import ConfigError
from trimtab_engine.memory.formula import (
    Ledger,
    check_before_loading,
    check_one_request_fits,
    check_one_request_fits_fixed,
)
from trimtab_modelspec.kv_groups import KVGroup, LayerKV, uniform_group
from trimtab_modelspec.memory_formula import MemoryFormula

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "memory_formula.json").read_text())["cases"]
MIB = 1 << 20


def a_formula(**given: Any) -> MemoryFormula:
    """SmolLM2-135M in float32 on a device of 1400 MiB: 2048 tokens need 128 blocks of 720 KiB."""
    fields: dict[str, Any] = {
        "device_bytes": 1400 * MIB,
        "gpu_memory_utilization": "0.9",
        "other_bytes": 330 * MIB,
        "weights_bytes": 513 * MIB,
        "activations_peak_bytes": 160 * MIB,
        "workspace_bytes": 0,
        "graphs_bytes": 0,
        "communicator_bytes": 0,
        "kv_groups": (uniform_group(30, 3, 64),),
        "kv_dtype_bytes": 4,
        "block_size": 16,
        "max_model_len": 2048,
        "max_num_batched_tokens": 2048,
    }
    return MemoryFormula(**{**fields, **given})


@pytest.mark.parametrize("case", GOLDEN, ids=[case["name"] for case in GOLDEN])
def test_the_formula_gives_the_golden_values(case: dict[str, Any]) -> None:
    groups = tuple(
        KVGroup(tuple((first, last) for first, last in layers), LayerKV(**each))
        for layers, each in ((group.pop("layers"), group) for group in map(dict, case["given"]["kv_groups"]))
    )
    formula = MemoryFormula(**{**case["given"], "kv_groups": groups})
    for name, expected in case["expected"].items():
        value = formula.longest_model_len(formula.num_blocks) if name == "longest_model_len" else getattr(formula, name)
        assert (pytest.approx(expected, abs=1e-4) if isinstance(expected, float) else expected) == value, name


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine must not fail it
@given(
    device=st.integers(10_000, 1 << 40),
    other=st.integers(0, 1 << 38),
    layers=st.integers(1, 80),
    length=st.integers(1, 1 << 17),
)
def test_the_least_utilisation_suffices_and_one_step_less_does_not(
    device: int, other: int, layers: int, length: int
) -> None:
    formula = a_formula(
        device_bytes=device, other_bytes=other, kv_groups=(uniform_group(layers, 3, 64),), max_model_len=length
    )
    least = formula.min_utilization
    if least is None:
        assert formula.at("1").num_blocks < formula.blocks_per_request
        return
    assert formula.at(least).num_blocks >= formula.blocks_per_request
    below = round(float(least) * 10_000) - 1
    if below > 0:
        assert formula.at(f"{below / 10_000:.4f}").num_blocks < formula.blocks_per_request


@given(num_blocks=st.integers(0, 300), block_size=st.sampled_from([8, 16, 32]), length=st.integers(1, 4096))
def test_the_longest_length_fits_and_one_token_more_does_not(num_blocks: int, block_size: int, length: int) -> None:
    formula = a_formula(block_size=block_size, max_model_len=length)
    longest = formula.longest_model_len(num_blocks)
    assert -(-longest // block_size) <= num_blocks
    assert longest == length or -(-(longest + 1) // block_size) > num_blocks


def test_a_kv_cache_that_holds_one_request_is_accepted() -> None:
    check_one_request_fits(a_formula())
    check_one_request_fits_fixed(a_formula(), 128, "--num-gpu-blocks-override")


def test_too_small_a_kv_cache_is_refused_in_known_words_with_each_way_out() -> None:
    formula = a_formula(gpu_memory_utilization="0.75")
    with pytest.raises(ConfigError) as error:
        check_one_request_fits(formula)
    assert str(error.value) == (
        "To serve at least one request with the model's max seq len (2048), 0.09 GiB KV cache is needed, which is "
        "larger than the available KV cache memory (0.05 GiB). Based on the available memory, the estimated maximum "
        "model length is 1056. What to do: raise --gpu-memory-utilization from 0.75 to 0.7808 or more, use a device of "
        "1528124758 bytes (1.42 GiB) or more instead of 1468006400 bytes (on the CPU: --device-memory-bytes), or lower "
        "--max-model-len to 1056 or less."
    )
    check_one_request_fits(formula.at("0.7808"))
    check_one_request_fits(a_formula(gpu_memory_utilization="0.75", device_bytes=1528124758))
    check_one_request_fits(a_formula(gpu_memory_utilization="0.75", max_model_len=1056))


def test_useless_advice_is_omitted() -> None:
    with pytest.raises(ConfigError) as error:
        check_one_request_fits(a_formula(device_bytes=900 * MIB))
    assert "raise --gpu-memory-utilization" not in str(error.value)
    assert "lower --max-model-len" not in str(error.value)


@pytest.mark.parametrize(
    ("flag", "least"), [("--num-gpu-blocks-override", 128), ("--kv-cache-memory-bytes", 128 * 720 * 1024)]
)
def test_a_fixed_kv_cache_that_is_too_small_names_its_own_flag(flag: str, least: int) -> None:
    with pytest.raises(ConfigError) as error:
        check_one_request_fits_fixed(a_formula(), 100, flag)
    assert f"raise {flag} to {least} or more, or lower --max-model-len to 1600 or less" in str(error.value)
    assert "utilization" not in str(error.value)


@pytest.mark.parametrize(
    ("flag", "most"), [("--num-gpu-blocks-override", 1261), ("--kv-cache-memory-bytes", 887 << 20)]
)
def test_fixed_kv_cache_above_device_is_rejected_with_maximum(flag: str, most: int) -> None:
    check_one_request_fits_fixed(a_formula(), 1261, flag)
    with pytest.raises(ConfigError, match=f"{flag} requires a KV cache of .* lower it to {most} or less"):
        check_one_request_fits_fixed(a_formula(), 1262, flag)


def before_loading(**given: Any) -> MemoryFormula:
    """The same model before its weights are read: 843 MiB in use or wanted by weights, 90 MiB by one request."""
    return a_formula(**{"activations_peak_bytes": 0, **given})


def test_weights_fitting_with_one_request_are_accepted() -> None:
    check_before_loading(before_loading(device_bytes=1037 * MIB), fixed_by=None, limit_bytes=1037 * MIB)
    check_before_loading(before_loading(device_bytes=843 * MIB), fixed_by="--num-gpu-blocks-override", limit_bytes=None)


def test_too_large_weights_are_rejected_before_reading() -> None:
    with pytest.raises(ConfigError) as error:
        check_before_loading(before_loading(device_bytes=1000 * MIB), fixed_by=None, limit_bytes=None)
    assert str(error.value) == (
        "out of memory before loading: the weights take 0.50 GiB, and 0.32 GiB is in use before them, and one request "
        "of 2048 tokens 0.09 GiB of KV cache, but of the device's 0.98 GiB the engine may use 0.88 GiB "
        "(--gpu-memory-utilization 0.9); raise --gpu-memory-utilization to more than 0.933, use a device of more than "
        "1087023787 bytes (1.01 GiB; on the CPU: --device-memory-bytes), lower --max-model-len, or use a smaller model "
        "or --dtype bfloat16"
    )


def test_container_limit_below_weights_is_rejected() -> None:
    with pytest.raises(
        ConfigError, match=r"the container's memory limit is 0\.78 GiB; raise the limit to more than"
    ) as e:
        check_before_loading(before_loading(), fixed_by=None, limit_bytes=800 * MIB)
    assert str(843 * MIB) in str(e.value)


def test_a_fixed_kv_cache_leaves_the_whole_device_to_the_weights() -> None:
    with pytest.raises(ConfigError) as error:
        check_before_loading(
            before_loading(device_bytes=842 * MIB), fixed_by="--kv-cache-memory-bytes", limit_bytes=None
        )
    assert "utilization" not in str(error.value)
    assert f"a device of more than {843 * MIB} bytes" in str(error.value)


def a_ledger(driver: int = 1000) -> Ledger:
    return Ledger(
        device_bytes=2000,
        driver_used_bytes=driver,
        kinds={"other": 300, "weights": 400, "kv_mapped": 200},
        untouched_bytes=60,
        block_size=16,
        bytes_per_block=20,
        blocks_total=10,
        blocks_used=4,
        blocks_cap=30,
    )


@pytest.mark.parametrize(("driver", "unattributed"), [(1000, 160), (840, 0), (800, -40)])
def test_ledger_reports_unattributed_bytes(driver: int, unattributed: int) -> None:
    assert a_ledger(driver).unattributed_bytes == unattributed


def test_the_ledger_reads_as_the_contract_has_it() -> None:
    assert a_ledger().to_json() == {
        "device_bytes": 2000,
        "driver_used_bytes": 1000,
        "kinds": {"other": 300, "weights": 400, "kv_mapped": 200, "kv_used": 80, "free": 1100},
        "untouched_bytes": 60,
        "unattributed_bytes": 160,
        "kv": {
            "block_size": 16,
            "bytes_per_block": 20,
            "blocks_total": 10,
            "blocks_used": 4,
            "blocks_free": 6,
            "blocks_cap": 30,
        },
    }

"""KV cache size at start, its cap, and errors for insufficient memory."""

import re
from typing import Any

import pytest
from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.errors import ConfigError
from trimtab_engine.memory.sizing import Unmeasured, check_weights_fit, memory_warning, out_of_memory, size_kv_cache
from trimtab_modelspec.kv_groups import uniform_group
from trimtab_modelspec.memory_formula import MemoryFormula

GIB = 1 << 30


def known(**given: Any) -> Unmeasured:
    """A model of 7 billion parameters in bfloat16 on a device of 16 GiB; 2048 tokens take 1 GiB."""
    fields: dict[str, Any] = {
        "device_bytes": 16 * GIB,
        "other_bytes": 0,
        "limit_bytes": None,
        "weights_bytes": 13 * GIB,
        "tower_bytes": 0,
        "kv_groups": (uniform_group(32, 32, 128),),
        "kv_dtype_bytes": 2,
        "max_model_len": 2048,
    }
    return Unmeasured(**{**fields, **given})


def a_config(**given: Any) -> EngineConfig:
    return EngineConfig(model="m", **given)


@pytest.mark.parametrize(
    ("config", "changes", "fits"),
    [
        ({}, {}, True),
        ({}, {"weights_bytes": 14 * GIB}, False),  # 15 of 14.4 GiB
        ({"gpu_memory_utilization": "0.95", "gpu_memory_utilization_cap": "0.95"}, {"weights_bytes": 14 * GIB}, True),
        ({}, {"max_model_len": 8192}, False),
        ({"max_model_len": "auto"}, {"max_model_len": 8192}, True),  # it gives way
        ({"num_gpu_blocks_override": 128}, {"weights_bytes": 15 * GIB}, True),  # the utilization is ignored
        ({"num_gpu_blocks_override": 128}, {"weights_bytes": 17 * GIB}, False),
        ({}, {"limit_bytes": 12 * GIB}, False),
        ({}, {"tower_bytes": GIB // 4}, True),
        ({}, {"tower_bytes": GIB}, False),  # the vision encoder counts too
    ],
)
def test_unfitting_model_is_rejected_before_weights(
    config: dict[str, Any], changes: dict[str, Any], fits: bool
) -> None:
    if fits:
        check_weights_fit(a_config(**config), known(**changes))
        return
    with pytest.raises(ConfigError, match="out of memory before loading: the weights take"):
        check_weights_fit(a_config(**config), known(**changes))


SEES = {"limit_mm_per_prompt": {"image": 4}, "api_server_count": 1, "device_memory_bytes": 16 * GIB}
WITHOUT_THE_TOWER = (
    r"""serve text only with --limit-mm-per-prompt '\{"image": 0, "video": 0\}', which drops the vision encoder"""
)


def test_error_names_image_memory_and_advice() -> None:
    sees = a_config(**SEES)
    for changes in ({"tower_bytes": GIB}, {"tower_bytes": GIB, "limit_bytes": 12 * GIB}):
        with pytest.raises(ConfigError, match=r"the weights take .* \(the tower's 1\.00 GiB among them\)") as refused:
            check_weights_fit(sees, known(**changes))
        assert re.search(WITHOUT_THE_TOWER, str(refused.value))
        assert "lower --mm-processor-cache-gb (it is 1 in each of 2 processes, which on the CPU" in str(refused.value)
    with pytest.raises(ConfigError, match="out of memory") as refused:
        check_weights_fit(a_config(), known(weights_bytes=17 * GIB))
    assert "mm-processor-cache" not in str(refused.value)


@pytest.mark.parametrize(
    ("stage", "remedy"),
    [
        ("starting", "--dtype bfloat16"),
        ("weights", "--dtype bfloat16"),
        ("profile", "lower --max-num-batched-tokens"),
        ("kv_cache", "lower --gpu-memory-utilization"),
    ],
)
def test_failed_allocation_reports_numbers_and_advice(stage: str, remedy: str) -> None:
    text = out_of_memory(a_config(device_memory_bytes=16 * GIB), stage)
    assert f"in stage {stage} on a device of 16.00 GiB" in text
    assert "max_num_batched_tokens 2048, max_num_seqs 128" in text
    assert remedy in text
    assert "\n" not in text


def test_cuda_advice_is_smaller_image_limit() -> None:
    """On CUDA start-up computes the item; on the CPU a rule reserves its memory."""
    remedy = "lower --max-num-encoder-input-tokens"
    seeing = {"limit_mm_per_prompt": {"image": 4}}
    assert remedy in out_of_memory(a_config(device="cuda", **seeing), "profile")
    assert remedy not in out_of_memory(a_config(device="cuda", **seeing), "weights")
    assert remedy not in out_of_memory(a_config(device="cuda"), "profile")
    assert remedy not in out_of_memory(a_config(**seeing), "profile")


def a_formula(**given: Any) -> MemoryFormula:
    """2 GiB of weights on a device of 8 GiB, of which 7.2 may be used."""
    sizes = dict.fromkeys(("other_bytes", "activations_peak_bytes", "workspace_bytes", "graphs_bytes"), 0)
    fields: dict[str, Any] = {
        **sizes,
        "device_bytes": 8 * GIB,
        "gpu_memory_utilization": "0.9",
        "weights_bytes": 2 * GIB,
        "communicator_bytes": 0,
        "kv_groups": (uniform_group(32, 32, 128),),
        "kv_dtype_bytes": 2,
        "block_size": 16,
        "max_model_len": 2048,
        "max_num_batched_tokens": 2048,
    }
    return MemoryFormula(**{**fields, **given})


@pytest.mark.parametrize(
    ("config", "room", "remedy"),
    [
        ({}, 8 * GIB, None),
        ({}, 5 * GIB, f"set --device-memory-bytes {int(5 * GIB / 0.9)} or less"),
        ({"tensor_parallel_size": 2}, 8 * GIB, f"set --device-memory-bytes {int(4 * GIB / 0.9)} or less"),  # each
        ({"kv_cache_memory_bytes": 4 * GIB}, 5 * GIB, "lower --kv-cache-memory-bytes"),
        ({"kv_cache_memory_bytes": 2 * GIB}, 5 * GIB, None),
    ],
)
def test_insufficient_room_is_warned_with_number(config: dict[str, Any], room: int, remedy: str | None) -> None:
    formula, wanted = a_formula(), a_config(**config)
    warning = memory_warning(wanted, formula, size_kv_cache(wanted, formula), room)
    assert (warning is None) == (remedy is None)
    if warning is not None and remedy is not None:
        assert remedy in warning
        assert f"leave only {room / GIB:.2f} GiB" in warning


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"swap_space_bytes": 5 * GIB, "swap_space_bytes_cap": 5 * GIB}, "lower --swap-space from 5120Mi to 4300Mi"),
        ({"swap_space_bytes_cap": 5 * GIB}, "lower --swap-space-cap from 5120Mi to 4300Mi or less"),
        ({"kv_offload_bytes": 5 * GIB, "kv_offload_bytes_cap": 5 * GIB}, "lower --kv-offload-size from 5120Mi"),
        ({"swap_space_bytes_cap": 5 * GIB, "device": "cuda"}, None),  # there it is other memory
    ],
)
def test_host_memory_that_leaves_no_room_on_the_cpu_is_named(config: dict[str, Any], said: str | None) -> None:
    wanted = a_config(**{"device": "cpu", **config})
    with pytest.raises(ConfigError) as refused:
        size_kv_cache(wanted, a_formula(workspace_bytes=5 * GIB))
    assert (said or "To serve at least one request") in str(refused.value)
    assert ("on the CPU it is part of this memory" in str(refused.value)) == (said is not None)

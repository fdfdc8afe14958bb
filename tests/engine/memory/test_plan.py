"""POST /admin/v1/memory/plan: memory of another configuration and the source of each number."""

import json
from dataclasses import replace
from typing import Any

import pytest
from trimtab_engine.memory.plan import PlanBase, plan_memory
from trimtab_modelspec.kv_groups import uniform_group
from trimtab_modelspec.memory_formula import MemoryFormula

MIB = 1 << 20


def a_base(**given: Any) -> PlanBase:
    """SmolLM2-135M in float32 on a device of 1400 MiB: 2048 tokens need 128 blocks of 720 KiB."""
    formula = MemoryFormula(
        device_bytes=1400 * MIB,
        gpu_memory_utilization="0.9",
        other_bytes=330 * MIB,
        weights_bytes=513 * MIB,
        activations_peak_bytes=160 * MIB,
        workspace_bytes=0,
        graphs_bytes=0,
        communicator_bytes=0,
        kv_groups=(uniform_group(30, 3, 64),),
        kv_dtype_bytes=4,
        block_size=16,
        max_model_len=2048,
        max_num_batched_tokens=2048,
    )
    fields: dict[str, Any] = {
        "formula": formula,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2048,
        "num_layers": 30,
        "num_attention_heads": 9,
        "num_kv_heads": 3,
        "kv_groups": (uniform_group(30, 3, 64),),
        "vocab_size": 49152,
        "model_max_len": 8192,
        "dtype": "float32",
        "kv_cache_dtype": "float32",
        "swap_is_on_device": True,
    }
    return PlanBase(**{**fields, **given})


def planned(**asked: Any) -> dict[str, Any]:
    status, body = plan_memory(a_base(), asked)
    assert status == 200, body
    json.dumps(body, allow_nan=False)
    return body


def refused(asked: dict[str, Any]) -> dict[str, Any]:
    status, body = plan_memory(a_base(), asked)
    assert status == 422
    assert set(body) == {"field", "value", "min", "max", "nearest", "message"}
    json.dumps(body, allow_nan=False)
    return body


def test_empty_plan_equals_current_memory() -> None:
    body = planned()
    formula = a_base().formula
    assert (body["num_blocks"], body["num_tokens"]) == (formula.num_blocks, formula.num_tokens)
    assert body["max_concurrency"] == formula.max_concurrency
    assert str(body["min_utilization"]) == formula.min_utilization
    assert body["fits"] is True
    assert body["kinds"]["kv_mapped"] == formula.num_blocks * formula.bytes_per_block
    assert sum(body["kinds"].values()) == formula.device_bytes
    measured = {kind for kind, source in body["sources"].items() if source == "measured"}
    assert measured == {"other", "weights", "activations_peak", "graphs", "communicator"}
    assert body["planned"]["max_num_batched_tokens"] == 2048


def test_a_higher_utilisation_gives_the_blocks_of_the_formula() -> None:
    assert planned(gpu_memory_utilization=0.95)["num_blocks"] == a_base().formula.at("0.95").num_blocks


@pytest.mark.parametrize(("tokens", "peak"), [(4096, 320 * MIB), (1024, 80 * MIB), (64, 64 * 49152 * 12)])
def test_activations_scale_with_budget_above_sampling_minimum(tokens: int, peak: int) -> None:
    body = planned(max_num_batched_tokens=tokens)
    assert body["kinds"]["activations_peak"] == peak
    assert body["sources"]["activations_peak"] == "scaled"


def test_half_as_wide_a_kv_dtype_gives_twice_the_blocks() -> None:
    wide, narrow = planned(), planned(kv_cache_dtype="bfloat16")
    assert narrow["bytes_per_block"] * 2 == wide["bytes_per_block"]
    assert narrow["num_blocks"] // 2 == wide["num_blocks"]


def test_auto_is_the_models_dtype_also_for_an_engine_that_runs_with_another() -> None:
    base = a_base(kv_cache_dtype="fp8_e4m3")
    bodies: list[Any] = [plan_memory(base, {"kv_cache_dtype": dtype})[1] for dtype in ("auto", "fp8_e4m3")]
    assert bodies[0]["bytes_per_block"] == 4 * bodies[1]["bytes_per_block"]


def test_swap_space_on_the_cpu_is_taken_from_the_kv_cache() -> None:
    body = planned(swap_space_bytes="90Mi")
    assert body["kinds"]["workspace"] == 90 * MIB
    assert planned()["num_blocks"] - body["num_blocks"] == 128
    status, elsewhere = plan_memory(a_base(swap_is_on_device=False), {"swap_space_bytes": "90Mi"})
    assert (status, elsewhere["num_blocks"]) == (200, planned()["num_blocks"])


def test_too_large_cpu_swap_space_is_named_in_advice() -> None:
    too_much = planned(swap_space_bytes="1Gi")
    assert too_much["fits"] is False
    assert "What to do: lower swap_space_bytes from 1024Mi to 167Mi or less" in too_much["message"]
    assert planned(swap_space_bytes="167Mi")["fits"] is True
    assert planned(swap_space_bytes="168Mi")["fits"] is False
    no_swap = planned(gpu_memory_utilization=0.75)
    assert "swap_space_bytes" not in no_swap["message"], "without it there is nothing to lower"


def test_tensor_parallel_ranks_share_weights_and_heads() -> None:
    body = planned(tensor_parallel_size=3)
    assert body["kinds"]["weights"] == 171 * MIB
    assert body["bytes_per_block"] * 3 == planned()["bytes_per_block"]
    assert (body["sources"]["weights"], body["sources"]["communicator"]) == ("scaled", "unmeasured")
    nine = planned(tensor_parallel_size=9)
    assert nine["bytes_per_block"] == body["bytes_per_block"], "a key and value head is never split"


def test_pipeline_stages_share_layers() -> None:
    body = planned(pipeline_parallel_size=4)
    assert body["bytes_per_block"] * 30 == planned()["bytes_per_block"] * 8, "the largest stage decides"
    assert body["kinds"]["weights"] == -(-513 * MIB * 8 // 30)


def test_all_ranks_are_planned_and_the_tightest_decides() -> None:
    own = a_base().formula
    heavy = replace(own, weights_bytes=own.weights_bytes + 90 * MIB)
    base = a_base(formula=replace(own, other_ranks=(heavy,)))
    _, body = plan_memory(base, {"gpu_memory_utilization": 0.95})
    assert body["num_blocks"] == heavy.at("0.95").num_blocks
    kinds: Any = plan_memory(base, {"tensor_parallel_size": 3})[1]["kinds"]
    assert kinds["weights"] == heavy.weights_bytes // 3


def test_plan_that_does_not_fit_has_advice() -> None:
    body = planned(gpu_memory_utilization=0.75)
    assert body["fits"] is False
    assert "raise --gpu-memory-utilization from 0.75 to 0.7808 or more" in body["message"]
    assert body["min_utilization"] == 0.7808
    assert planned(device_memory_bytes="900Mi")["min_utilization"] is None


def test_max_model_len_auto_is_the_longest_that_fits() -> None:
    body = planned(max_model_len="auto", gpu_memory_utilization=0.75)
    assert body["planned"]["max_model_len"] == 1056
    assert body["fits"] is True
    assert planned(max_model_len="auto", gpu_memory_utilization=0.1)["fits"] is False


@pytest.mark.parametrize(
    ("asked", "field", "nearest", "message"),
    [
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization", 1, "between 0.0001 and 1"),
        (
            {"gpu_memory_utilization": "0.9"},
            "gpu_memory_utilization",
            None,
            'must be a number, not "0.9"; write 0.9 without quotes',
        ),
        ({"max_model_len": 9000}, "max_model_len", 8192, "between 1 and 8192"),
        ({"max_model_len": "long"}, "max_model_len", None, "must be an integer"),
        ({"block_size": 12}, "block_size", 8, "one of 8, 16, 32"),
        ({"block_size": 512}, "block_size", 256, "between 8 and 256"),
        ({"kv_cache_dtype": "fp4"}, "kv_cache_dtype", "fp8", "it must be auto or float32"),
        ({"max_num_seqs": 4096}, "max_num_batched_tokens", 4096, "at least max_num_seqs, 4096"),
        ({"max_num_seqs": 0}, "max_num_seqs", 1, "between 1"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size", 1, "must divide the model's 9 attention heads"),
        ({"tensor_parallel_size": 12}, "tensor_parallel_size", 9, "key and value heads"),
        ({"pipeline_parallel_size": 31}, "pipeline_parallel_size", 30, "between 1 and 30"),
        ({"swap_space_bytes": -1}, "swap_space_bytes", 0, "between 0"),
        ({"max_num_seq": 3}, "max_num_seq", None, "cannot be planned; plannable fields: gpu_memory_utilization"),
        ({"y" * 10_000: 3}, "y" * 100, None, "cannot be planned"),
    ],
)
def test_impossible_plan_value_is_rejected_with_nearest(
    asked: dict[str, Any], field: str, nearest: object, message: str
) -> None:
    body = refused(asked)
    assert (body["field"], body["nearest"]) == (field, nearest)
    assert message in body["message"]
    if nearest is not None:
        assert plan_memory(a_base(), {**asked, field: nearest})[0] == 200


@pytest.mark.parametrize("asked", [None, [], 3, {"max_num_seqs": [3]}])
def test_a_body_that_is_no_flat_object_is_400(asked: object) -> None:
    assert plan_memory(a_base(), asked)[0] == 400

"""PATCH /admin/v1/config: accepted and rejected values, responses, and valid `nearest` values."""

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trimtab_engine.config.live.fields import BY_NAME, FIELDS
from trimtab_engine.config.live.patch import LiveConfig
from trimtab_engine.config.live.values import Envelope, LiveValues


def a_config(
    *,
    seqs: int = 64,
    tokens: int = 2048,
    utilization: str = "0.8",
    generation: int = 1,
    chunked: bool = True,
    tokens_cap: int = 4096,
    kv_fixed_by: str | None = None,
    swap_cap: int = 8 << 30,
) -> LiveConfig:
    envelope = Envelope(
        max_num_seqs_cap=256,
        max_num_batched_tokens_cap=tokens_cap,
        gpu_memory_utilization_cap="0.95",
        max_model_len=1024,
        block_size=16,
        enable_chunked_prefill=chunked,
        min_utilization=None if kv_fixed_by else "0.7288",
        num_blocks_cap=599,
        swap_space_bytes_cap=swap_cap,
        kv_offload_bytes_cap=2 << 30,
        num_speculative_tokens_cap=5,
        kv_fixed_by=kv_fixed_by,
        restart_fields=(("model", "/models/m"), ("dtype", "float32"), ("tensor_parallel_size", 1)),
    )
    values = LiveValues(max_num_seqs=seqs, max_num_batched_tokens=tokens, gpu_memory_utilization=utilization)
    return LiveConfig(envelope, values, generation)


def refused(config: LiveConfig, values: dict[str, Any]) -> dict[str, Any]:
    """The body of the 422, after checking that nothing changed and that the body is JSON."""
    after, status, body = config.patch(values, change_id="c1", applied_at_step=9)
    assert (after, status) == (config, 422)
    assert set(body) == {"field", "value", "min", "max", "nearest", "message"}
    json.dumps(body, allow_nan=False)
    assert not isinstance(body["value"], int) or abs(body["value"]) < 2**63  # msgpack holds no more
    return body


# --- accepted -----------------------------------------------------------------------------------------------------


def test_a_change_answers_with_its_id_the_next_generation_and_the_step() -> None:
    after, status, body = a_config(generation=4).patch({"max_num_seqs": 128}, change_id="c7", applied_at_step=31)
    assert status == 200
    assert body == {"id": "c7", "generation": 5, "desired": after.shown(), "applied_at_step": 31}
    assert (after.generation, after.values.max_num_seqs) == (5, 128)


@pytest.mark.parametrize(
    ("patch", "field", "value"),
    [
        ({"max_num_seqs": 1}, "max_num_seqs", 1),
        ({"max_num_seqs": 256}, "max_num_seqs", 256),
        ({"max_num_seqs": 32.0}, "max_num_seqs", 32),  # an integral number is an integer
        ({"max_num_active_seqs": 32}, "max_num_seqs", 32),
        ({"max_num_seqs": 32, "max_num_active_seqs": 32}, "max_num_seqs", 32),
        ({"max_num_batched_tokens": 64}, "max_num_batched_tokens", 64),
        ({"max_num_batched_tokens": 4096}, "max_num_batched_tokens", 4096),
        ({"gpu_memory_utilization": 0.7288}, "gpu_memory_utilization", "0.7288"),
        ({"gpu_memory_utilization": 0.95}, "gpu_memory_utilization", "0.95"),
        ({"gpu_memory_utilization": 0.81}, "gpu_memory_utilization", "0.81"),  # as it was written
    ],
)
def test_values_up_to_their_bounds_are_accepted(patch: dict[str, Any], field: str, value: object) -> None:
    after, status, _ = a_config().patch(patch)
    assert status == 200
    assert getattr(after.values, field) == value
    assert type(getattr(after.values, field)) is type(value)


def test_fields_that_move_together_are_judged_together() -> None:
    config = a_config(seqs=64, tokens=64)
    assert refused(config, {"max_num_seqs": 128})["max"] == 64
    after, status, _ = config.patch({"max_num_seqs": 128, "max_num_batched_tokens": 128})
    assert (status, after.values.max_num_seqs, after.values.max_num_batched_tokens) == (200, 128, 128)


@pytest.mark.parametrize("values", [{}, {"max_num_seqs": 64}, {"gpu_memory_utilization": 0.80}])
def test_a_patch_that_changes_nothing_keeps_the_generation(values: dict[str, Any]) -> None:
    after, status, body = a_config(utilization="0.80").patch(values)
    assert (after, status, body["generation"]) == (a_config(utilization="0.80"), 200, 1)


def test_dry_run_returns_result_without_change() -> None:
    config = a_config()
    after, status, body = config.patch({"max_num_seqs": 9}, dry_run=True, change_id="c1", applied_at_step=9)
    assert (after, status) == (config, 200)
    assert (body["id"], body["generation"], body["applied_at_step"]) == (None, 1, None)
    assert body["desired"] == {**config.shown(), "max_num_seqs": 9}


def test_dry_run_rejects_like_real_patch() -> None:
    assert a_config().patch({"max_num_seqs": 0}, dry_run=True)[1] == 422


# --- refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("patch", "field", "low", "high", "nearest", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs", 1, 256, 1, "it must be 1 or more"),
        ({"max_num_seqs": -5}, "max_num_seqs", 1, 256, 1, "it must be 1 or more"),
        ({"max_num_seqs": 257}, "max_num_seqs", 1, 256, 256, "--max-num-seqs-cap"),
        ({"max_num_active_seqs": 257}, "max_num_active_seqs", 1, 256, 256, "max_num_active_seqs is 257"),
        ({"max_num_seqs": 8.5}, "max_num_seqs", 1, 256, 8, "must be an integer, not 8.5"),
        ({"max_num_batched_tokens": 63}, "max_num_batched_tokens", 64, 4096, 64, "at least max_num_seqs, 64"),
        ({"max_num_batched_tokens": 4097}, "max_num_batched_tokens", 64, 4096, 4096, "--max-num-batched-tokens-cap"),
        ({"max_num_seqs": 100, "max_num_batched_tokens": 80}, "max_num_seqs", 1, 80, 80, "raise that as well"),
        ({"max_num_batched_tokens": 80, "max_num_seqs": 100}, "max_num_batched_tokens", 100, 4096, 100, "lower that"),
        ({"max_num_seqs": 10, "max_num_batched_tokens": -1}, "max_num_batched_tokens", 10, 4096, 10, "at least"),
        ({"max_num_seqs": 0, "max_num_batched_tokens": -1}, "max_num_seqs", 1, 256, 1, "it must be 1 or more"),
        ({"max_num_seqs": 90, "max_num_batched_tokens": 5000}, "max_num_batched_tokens", 90, 4096, 4096, "the cap is"),
        ({"max_num_seqs": 90, "max_num_batched_tokens": 0}, "max_num_batched_tokens", 90, 4096, 90, "at least"),
        ({"gpu_memory_utilization": 0.5}, "gpu_memory_utilization", 0.7288, 0.95, 0.7288, "max_model_len 1024 needs"),
        ({"gpu_memory_utilization": 0.96}, "gpu_memory_utilization", 0.7288, 0.95, 0.95, "the cap is 0.95"),
        ({"gpu_memory_utilization": 1}, "gpu_memory_utilization", 0.7288, 0.95, 0.95, "the cap is 0.95"),
        ({"long_prefill_token_threshold": -1}, "long_prefill_token_threshold", 0, 1 << 20, 0, "it must be 0 or more"),
        ({"watermark": 0.95}, "watermark", 0, 0.9, 0.9, "it must be 0.9 or less"),
        ({"ttft_target": -1}, "ttft_target", 0, 86400, 0, "it must be 0 or more"),
        ({"ttft_target": 1e6}, "ttft_target", 0, 86400, 86400, "it must be 86400 or less"),
        ({"ttft_target_per_prompt_token": -0.1}, "ttft_target_per_prompt_token", 0, 86400, 0, "it must be 0 or more"),
        (
            {"ttft_target": 0, "scheduling_policy": "deadline"},
            "ttft_target",
            0.001,
            86400,
            0.001,
            "with scheduling_policy deadline it must be 0.001 or more; set that to fcfs as well",
        ),
        ({"swap_space_bytes": 9 << 30}, "swap_space_bytes", 0, 8 << 30, 8 << 30, "--swap-space-cap, fixed at start"),
        ({"kv_offload_bytes": "3Gi"}, "kv_offload_bytes", 0, 2 << 30, 2 << 30, "--kv-offload-size-cap, fixed at start"),
        ({"swap_space_bytes": "9Gi"}, "swap_space_bytes", 0, 8 << 30, 8 << 30, "--swap-space-cap, fixed at start"),
        ({"num_speculative_tokens": 6}, "num_speculative_tokens", 0, 5, 5, "--speculative-config"),
        ({"max_num_queued_reqs": -1}, "max_num_queued_reqs", 0, 10**9, 0, "it must be 0 or more"),
        ({"max_num_queued_tokens": 1e12}, "max_num_queued_tokens", 0, 10**9, 10**9, "it must be 1000000000 or less"),
        ({"stats_interval_seconds": 0}, "stats_interval_seconds", 1, 3600, 1, "it must be 1 or more"),
        ({"max_num_seqs": 10**5000}, "max_num_seqs", 1, 256, 256, "max_num_seqs is a number beyond 2^53: "),
        ({"max_num_seqs": -1e300}, "max_num_seqs", 1, 256, 1, "is a number below -2^53: it must be 1 or more"),
    ],
)
def test_value_outside_bounds_is_rejected_with_nearest(
    patch: dict[str, Any], field: str, low: float, high: float, nearest: float, message: str
) -> None:
    body = refused(a_config(), patch)
    assert (body["field"], body["min"], body["max"], body["nearest"]) == (field, low, high, nearest)
    assert message in body["message"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (True, "must be an integer, not true or false"),
        ("64", 'must be an integer, not "64"; write 64 without quotes'),
        (None, "must be an integer, not null"),
        (float("nan"), "must be an integer, not nan"),
        (float("inf"), "must be an integer, not inf"),
        ("x" * 10_000, 'not "xxx'),
    ],
)
def test_non_number_is_rejected_without_nearest(value: object, message: str) -> None:
    body = refused(a_config(), {"max_num_seqs": value})
    assert message in body["message"]
    assert (body["nearest"], body["min"], body["max"]) == (None, 1, 256)
    assert len(json.dumps(body)) < 1000


@pytest.mark.parametrize("value", [True, "0.9", None, float("nan")])
def test_a_utilisation_must_be_a_number(value: object) -> None:
    assert "must be a number" in refused(a_config(), {"gpu_memory_utilization": value})["message"]


@pytest.mark.parametrize(
    ("patch", "nearest", "message"),
    [
        ({"scheduling_policy": "prio"}, "priority", "scheduling_policy is prio; it must be fcfs or priority or"),
        ({"scheduling_policy": "lifo"}, None, "it must be fcfs or priority or deadline"),
        ({"preemption_mode": "Swap"}, "swap", "it must be recompute or swap or auto"),
        ({"log_level": 3}, None, "log_level must be debug or info or warning or error, not a number"),
        ({"log_level": "x" * 10_000}, None, "xxx..."),
        ({"enable_prefix_caching": 1}, None, "must be true or false, not a number"),
        ({"disable_log_stats": "true"}, None, "must be true or false, not a string"),
        ({"enable_prefix_caching": None}, None, "must be true or false, not null"),
    ],
)
def test_invalid_choice_is_rejected_with_allowed_values(
    patch: dict[str, Any], nearest: str | None, message: str
) -> None:
    body = refused(a_config(), patch)
    assert message in body["message"]
    assert (body["min"], body["max"], body["nearest"]) == (None, None, nearest)


@pytest.mark.parametrize(
    ("patch", "shown"),
    [
        ({"swap_space_bytes": "4Gi"}, 4 << 30),
        ({"kv_offload_bytes": "1Gi"}, 1 << 30),
        ({"watermark": 0.01}, 0.01),
        ({"scheduling_policy": "priority"}, "priority"),
        ({"preemption_mode": "auto"}, "auto"),
        ({"num_speculative_tokens": 5.0}, 5),
        ({"enable_prefix_caching": False}, False),
        ({"log_level": "debug"}, "debug"),
        ({"stats_interval_seconds": 2.5}, 2.5),
        ({"long_prefill_token_threshold": 512}, 512),
        ({"max_num_queued_reqs": 7}, 7),
        ({"max_num_queued_tokens": 7}, 7),
        ({"disable_log_stats": True}, True),
    ],
)
def test_each_field_takes_a_value_of_its_kind(patch: dict[str, Any], shown: object) -> None:
    after, status, body = a_config().patch(patch)
    (name,) = patch
    assert (status, after.shown()[name], after.generation) == (200, shown, 2)
    desired: Any = body["desired"]
    assert type(desired[name]) is type(shown)


def test_without_swap_space_in_the_envelope_nothing_can_be_swapped() -> None:
    body = refused(a_config(swap_cap=0), {"preemption_mode": "swap"})
    assert "preemption_mode is swap; it must be recompute; start the engine with --swap-space-cap" in body["message"]
    assert a_config(swap_cap=0).patch({"preemption_mode": "recompute"})[1] == 200


def test_text_that_is_no_size_is_refused() -> None:
    assert 'or a size such as 4Gi, not "4 GB"' in refused(a_config(), {"swap_space_bytes": "4 GB"})["message"]


def test_every_live_value_has_one_row_in_the_table() -> None:
    assert [field.name for field in FIELDS] == [field.name for field in dataclasses.fields(LiveValues)]


def test_metrics_get_numbers_and_switches_and_the_rest_is_text() -> None:
    config = a_config()
    assert config.numbers()["enable_prefix_caching"] == 1.0
    assert config.texts() == {"scheduling_policy": "fcfs", "preemption_mode": "recompute", "log_level": "info"}
    assert config.numbers().keys() | config.texts().keys() == config.shown().keys()


def test_the_schedulers_part_is_handed_over_whole() -> None:
    patch = {"max_num_seqs": 3, "watermark": 0.1, "preemption_mode": "auto", "num_speculative_tokens": 2}
    after, _, _ = a_config().patch(patch)
    policy = after.values.policy()
    for field in dataclasses.fields(policy):
        assert getattr(policy, field.name) == getattr(after.values, field.name)
    assert (policy.max_num_seqs, policy.watermark, policy.preemption_mode) == (3, 0.1, "auto")


@pytest.mark.parametrize(
    "field",
    [
        "model",
        "dtype",
        "tensor_parallel_size",
        "block_size",
        "max_model_len",
        "max_num_seqs_cap",
        "enable_chunked_prefill",
    ],
)
def test_a_field_of_class_restart_is_refused_as_such(field: str) -> None:
    body = refused(a_config(), {field: 1})
    assert "only with a restart" in body["message"]
    assert (body["min"], body["max"], body["nearest"]) == (None, None, None)
    refused(a_config(), {field: 10**5000})  # its body can be sent, too


def test_an_unknown_field_is_refused_with_the_names_that_exist() -> None:
    body = refused(a_config(), {"max_num_seq": 3})
    assert "live fields are max_num_seqs, max_num_batched_tokens, gpu_memory_utilization" in body["message"]
    assert "did you mean max_num_seqs?" in body["message"]
    assert len(json.dumps(refused(a_config(), {"y" * 10_000: 3}))) < 1000


def test_invalid_value_rejects_whole_patch() -> None:
    assert refused(a_config(), {"max_num_seqs": 8, "gpu_memory_utilization": 2})["field"] == "gpu_memory_utilization"


def test_deadline_policy_requires_target() -> None:
    body = refused(a_config(), {"scheduling_policy": "deadline"})
    assert (body["field"], body["value"], body["nearest"]) == ("scheduling_policy", "deadline", None)
    assert body["message"] == (
        "scheduling_policy is deadline: ttft_target is 0; set it as well, to the TTFT target in seconds, 0.001 or more"
    )
    config, status, _ = a_config().patch({"ttft_target": 2})
    assert status == 200  # without effect under fcfs
    config, status, body = config.patch({"scheduling_policy": "deadline"})
    assert status == 200
    assert config.values.policy().ttft_target == 2
    assert refused(config, {"ttft_target": 0})["nearest"] == 0.001
    described: Any = config.describe()
    assert described["fields"]["ttft_target"]["min"] == 0.001
    assert config.patch({"ttft_target": 0, "scheduling_policy": "fcfs"})[1] == 200
    assert a_config().patch({"scheduling_policy": "deadline", "ttft_target": 0.5})[1] == 200


def test_an_alias_that_contradicts_its_field_is_refused() -> None:
    body = refused(a_config(), {"max_num_seqs": 8, "max_num_active_seqs": 9})
    assert "one field, given as 9 and 8" in body["message"]


def test_without_chunked_prefill_a_step_must_hold_a_whole_prompt() -> None:
    body = refused(a_config(chunked=False), {"max_num_batched_tokens": 1023})
    assert (body["min"], body["nearest"]) == (1024, 1024)
    assert "without chunked prefill" in body["message"]


@pytest.mark.parametrize("flag", ["--kv-cache-memory-bytes", "--num-gpu-blocks-override"])
def test_utilization_is_not_live_with_fixed_kv_cache(flag: str) -> None:
    config = a_config(kv_fixed_by=flag)
    body = refused(config, {"gpu_memory_utilization": 0.8})
    assert f"{flag} fixes the KV cache" in body["message"]
    assert "gpu_memory_utilization" not in config.numbers()
    fields: Any = config.describe()["fields"]
    assert fields["gpu_memory_utilization"] == {"class": "restart", "min": None, "max": None}
    assert config.patch({"max_num_seqs": 8})[1] == 200


@pytest.mark.parametrize("body", [None, [], "x", 3, {"max_num_seqs": {"value": 3}}, {"max_num_seqs": [3]}])
def test_a_body_that_is_no_flat_object_is_refused(body: object) -> None:
    after, status, answer = a_config().patch(body)
    assert (after, status) == (a_config(), 400)
    assert "flat JSON object" in str(answer["message"])


@pytest.mark.parametrize(("if_match", "status"), [(None, 200), (4, 200), (3, 412), (5, 412)])
def test_if_match_guards_against_a_stale_reader(if_match: int | None, status: int) -> None:
    config = a_config(generation=4)
    after, answered, body = config.patch({"max_num_seqs": 8}, if_match=if_match)
    assert answered == status
    if status == 412:
        assert after is config
        assert body["generation"] == 4
        assert "read it again" in str(body["message"])


def test_a_stale_reader_hears_so_before_its_values_are_judged() -> None:
    assert a_config().patch({"max_num_seqs": 0}, if_match=9)[1] == 412


# --- described ----------------------------------------------------------------------------------------------------


def test_description_has_values_classes_and_bounds() -> None:
    body: Any = a_config(seqs=64, tokens=128).describe()
    json.dumps(body, allow_nan=False)
    assert body["generation"] == 1
    assert body["desired"] == body["applied"]
    assert body["applied"] == {
        "max_num_seqs": 64,
        "max_num_batched_tokens": 128,
        "gpu_memory_utilization": 0.8,
        "long_prefill_token_threshold": 0,
        "watermark": 0.0,
        "scheduling_policy": "fcfs",
        "ttft_target": 0.0,
        "ttft_target_per_prompt_token": 0.0,
        "preemption_mode": "recompute",
        "swap_space_bytes": 0,
        "kv_offload_bytes": 0,
        "max_num_queued_reqs": 0,
        "max_num_queued_tokens": 0,
        "num_speculative_tokens": 0,
        "data_parallel_size": 1,
        "enable_prefix_caching": True,
        "disable_log_stats": False,
        "stats_interval_seconds": 10.0,
        "log_level": "info",
    }
    assert body["fields"]["max_num_seqs"] == {"class": "live", "min": 1, "max": 128}
    assert body["fields"]["max_num_active_seqs"] == body["fields"]["max_num_seqs"]
    assert body["fields"]["max_num_batched_tokens"] == {"class": "live", "min": 64, "max": 4096}
    assert body["fields"]["gpu_memory_utilization"] == {"class": "live", "min": 0.7288, "max": 0.95}
    assert body["fields"]["swap_space_bytes"] == {"class": "live", "min": 0, "max": 8 << 30}
    assert body["fields"]["scheduling_policy"]["values"] == ["fcfs", "priority", "deadline"]
    assert body["fields"]["ttft_target"] == {"class": "live", "min": 0, "max": 86400}
    assert body["fields"]["disable_log_stats"]["values"] == [False, True]
    assert body["fields"]["model"] == {"class": "restart", "min": None, "max": None}
    assert body["envelope"] == {
        "max_num_seqs_cap": 256,
        "max_num_batched_tokens_cap": 4096,
        "gpu_memory_utilization_cap": 0.95,
        "swap_space_bytes_cap": 8 << 30,
        "kv_offload_bytes_cap": 2 << 30,
        "num_speculative_tokens_cap": 5,
        "data_parallel_size_cap": 1,
        "max_model_len": 1024,
        "block_size": 16,
        "enable_chunked_prefill": True,
        "num_blocks_cap": 599,
        "kv_fixed_by": None,
        "kv_memory": "mapped",
        "model": "/models/m",
        "dtype": "float32",
        "tensor_parallel_size": 1,
    }


# --- invalid input -----------------------------------------------------------------------------------------------

ANY_MACHINE = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy one must not fail tests
NUMBERS = st.integers() | st.floats() | st.integers(0, 5000) | st.floats(0, 1.2)
TEXTS = st.sampled_from(["", "64", "4Gi", "swap", "priority", "debug"])
VALUES = NUMBERS | st.booleans() | st.none() | TEXTS | st.lists(st.integers(), max_size=1)
NAMES = st.sampled_from([*BY_NAME, "max_num_seqs", "max_num_batched_tokens", "model", "x"])


@ANY_MACHINE
@given(
    patches=st.lists(st.dictionaries(NAMES, VALUES, max_size=3), max_size=12),
    chunked=st.booleans(),
    tokens_cap=st.sampled_from([128, 4096]),
)
def test_values_stay_in_described_bounds_after_patches(
    patches: list[dict[str, Any]], chunked: bool, tokens_cap: int
) -> None:
    config = a_config(tokens=tokens_cap, chunked=chunked, tokens_cap=tokens_cap)
    if not chunked and tokens_cap < config.envelope.max_model_len:
        return  # such an engine does not start
    for patch in patches:
        before = config
        config, status, body = config.patch(patch)
        json.dumps(body, allow_nan=False)
        assert config.generation - before.generation == (config.values != before.values)
        assert status == 200 or config is before
        values, envelope = config.values, config.envelope
        assert values.max_num_seqs <= values.max_num_batched_tokens <= envelope.max_num_batched_tokens_cap
        assert chunked or values.max_num_batched_tokens >= envelope.max_model_len
        fields: Any = config.describe()["fields"]
        for name, value in config.shown().items():
            if "values" in fields[name]:
                assert value in fields[name]["values"]
            else:
                assert fields[name]["min"] <= value <= fields[name]["max"]


@ANY_MACHINE
@given(name=NAMES, value=VALUES, seqs=st.integers(1, 128), chunked=st.booleans())
def test_the_nearest_value_is_always_accepted(name: str, value: object, seqs: int, chunked: bool) -> None:
    config = a_config(seqs=seqs, tokens=2048, chunked=chunked)
    _, status, body = config.patch({name: value})
    if status == 422 and body["nearest"] is not None:
        assert config.patch({name: body["nearest"]})[1] == 200

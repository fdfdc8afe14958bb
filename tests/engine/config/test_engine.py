"""Contradictory configurations are rejected with flag, value and advice."""

from typing import Any

import pytest
from trimtab_engine.config.engine import MAX_BATCHED_TOKENS, EngineConfig, first_visible_gpu
from trimtab_engine.errors import ConfigError


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"block_size": 12}, "--block-size is 12; it must be one of 8, 16, 32, 64, 128, 256"),
        ({"gpu_memory_utilization": "1.2"}, "--gpu-memory-utilization is 1.2; it must be above 0 and up to 1"),
        ({"gpu_memory_utilization": "much"}, "--gpu-memory-utilization is 'much'"),
        ({"gpu_memory_utilization": "nan"}, "--gpu-memory-utilization is nan"),
        ({"gpu_memory_utilization": "0.95"}, "is 0.95, above --gpu-memory-utilization-cap 0.9; raise the cap"),
        ({"max_num_seqs": 200}, "--max-num-seqs is 200, above --max-num-seqs-cap 128"),
        ({"max_num_batched_tokens": 64}, "--max-num-batched-tokens is 64, below --max-num-seqs 128"),
        ({"watermark": 1.0}, "--watermark is 1.0; it must be between 0 and 0.9"),
        ({"ttft_target": -1.0}, "--ttft-target is -1.0; it must be between 0 and 86400"),
        ({"ttft_target_per_prompt_token": 1e6}, "--ttft-target-per-prompt-token is 1000000.0; it must be between"),
        ({"scheduling_policy": "deadline"}, "--scheduling-policy is deadline, but --ttft-target is 0; set it to the"),
        ({"swap_space_bytes": 5}, "--swap-space is 5, above --swap-space-cap 0"),
        ({"num_speculative_tokens": 3}, "--num-speculative-tokens is 3, above --num-speculative-tokens-cap 0"),
        ({"max_num_queued_reqs": -1}, "--max-num-queued-reqs is -1; it must be between 0 and 1000000000"),
        ({"stats_interval_seconds": 0.5}, "--stats-interval-seconds is 0.5; it must be between 1 and 3600"),
        (
            {"max_num_batched_tokens": 10**11, "max_num_batched_tokens_cap": 10**11},
            f"set {MAX_BATCHED_TOKENS} or less",
        ),
    ],
)
def test_a_contradiction_is_refused_with_what_to_do(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        EngineConfig(model="m", **values)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (None, 0),
        ("", None),  # none are shown
        ("-1", None),
        ("3", 3),
        ("2,0", 2),
        ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6,1", "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"),
        ("MIG-5c89852c-d268-c3f3-1b07-005d5ae1dc3f", "MIG-5c89852c-d268-c3f3-1b07-005d5ae1dc3f"),
    ],
)
def test_the_first_gpu_is_the_first_that_cuda_shows(
    written: str | None, expected: int | str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if written is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", written)
    assert first_visible_gpu() == expected

"""Serving limits against manual calculations for one H200 (4.3 TB/s, 788 TFLOP/s)."""

import pytest
from kernel_benchmarks.ideal import (
    LLAMA_8B,
    QWEN3_06B,
    QWEN3_8B,
    ModelShape,
    nano_vllm_workload,
    prefill_seconds,
    step_seconds,
    workload_seconds,
)

BANDWIDTH, FLOPS = 4.3e12, 788e12


@pytest.mark.parametrize(
    ("shape", "batch", "rate"),
    [
        (LLAMA_8B, 1, 284),
        (LLAMA_8B, 32, 7131),
        (LLAMA_8B, 256, 22302),
        (QWEN3_8B, 32, 6890),
        (QWEN3_06B, 256, 35220),
    ],
)
def test_decode_reads_every_weight_and_key_once(shape: ModelShape, batch: int, rate: float) -> None:
    assert batch / step_seconds(shape, batch, batch * 1024, bandwidth=BANDWIDTH, flops=FLOPS) == pytest.approx(
        rate, rel=0.01
    )


def test_prefill_is_bound_by_its_gemms() -> None:
    assert 1024 / prefill_seconds(LLAMA_8B, 1024, flops=FLOPS) == pytest.approx(51_600, rel=0.01)


def test_workload_equals_nano_vllms() -> None:
    workload = nano_vllm_workload()
    assert sum(len(prompt) for prompt, _ in workload) == 142_827
    assert sum(count for _, count in workload) == 133_966
    assert max(count for _, count in workload) == 1024


@pytest.mark.parametrize(("shape", "seconds"), [(QWEN3_06B, 3.72), (QWEN3_8B, 10.49), (LLAMA_8B, 9.97)])
def test_ideal_seconds_of_workload(shape: ModelShape, seconds: float) -> None:
    workload = nano_vllm_workload()
    assert workload_seconds(shape, workload, bandwidth=BANDWIDTH, flops=FLOPS) == pytest.approx(seconds, rel=0.01)

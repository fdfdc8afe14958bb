"""Roofline of a step, compared with manual calculations and by properties."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from trimtab_operator.layout.cost import Hardware, Link, decode_step, prefill_seconds_per_token, tensor_stays_in_a_node
from trimtab_operator.layout.facts import ModelFacts
from trimtab_operator.layout.gpus import gpu_named
from trimtab_operator.resource.spec import Parallelism

Published = Callable[[str], ModelFacts]
H200 = Hardware(gpu=gpu_named("H200"))
L40S = Hardware(gpu=gpu_named("L40S"))


@pytest.mark.parametrize(
    ("batch", "context", "milliseconds"),
    [
        # Llama-3.1-8B in bf16 at the 4.3 TB/s that an H200 reaches: 15.01e9 bytes of layers and output layer, and
        # 131,072 bytes per token of context.
        (1, 1024, (15.01e9 + 1024 * 131072) / 4.3e12 * 1e3),  # 3.52
        (32, 1024, (15.01e9 + 32 * 1024 * 131072) / 4.3e12 * 1e3),  # 4.49
        (256, 1024, (15.01e9 + 256 * 1024 * 131072) / 4.3e12 * 1e3),  # 11.5
    ],
)
def test_a_decode_step_on_one_gpu_is_its_bytes_over_its_bandwidth(
    published: Published, batch: int, context: int, milliseconds: float
) -> None:
    step = decode_step(published("Llama-3.1-8B"), Parallelism(), H200, batch=batch, context=context)
    assert step.seconds * 1e3 == pytest.approx(milliseconds, rel=0.005)
    assert step.exchange_seconds == 0


def test_a_prompts_token_on_one_gpu_is_its_arithmetic_over_the_rate(published: Published) -> None:
    """2 × 7.5e9 operations per token at 788 TFLOP/s: 52,000 tokens a second for short prompts."""
    facts = published("Llama-3.1-8B")
    seconds = prefill_seconds_per_token(facts, Parallelism(), H200, chunk=8192, context=0)
    assert 1 / seconds == pytest.approx(52_500, rel=0.01)


def test_an_all_reduce_of_a_ring_sends_twice_what_the_others_hold() -> None:
    link = Link(bandwidth=1e9, latency_seconds=0.5)
    assert link.ring_seconds(4e9, 4, passes=2) == 0.5 + 2 * 3 / 4 * 4
    assert link.ring_seconds(4e9, 1, passes=2) == 0


def test_tensor_ranks_halve_the_reading_and_add_two_all_reduces_per_layer(published: Published) -> None:
    facts = published("Llama-3.1-70B")
    one = decode_step(facts, Parallelism(), H200, batch=1, context=0)
    two = decode_step(facts, Parallelism(tensor=2), H200, batch=1, context=0)
    assert two.work_seconds == pytest.approx(one.work_seconds / 2, rel=0.001)
    latencies = (2 * 80 + 1) * 15e-6  # and one for the embedding
    assert two.exchange_seconds == pytest.approx(latencies, rel=0.03)


@pytest.mark.parametrize("batch", [1, 8, 64])
def test_stages_exchange_less_than_tensor_ranks_and_answer_one_request_later(published: Published, batch: int) -> None:
    facts = published("Llama-3.1-70B")
    tensor = decode_step(facts, Parallelism(tensor=4), L40S, batch=batch, context=1024)
    stages = decode_step(facts, Parallelism(pipeline=4), L40S, batch=batch, context=1024)
    assert stages.exchange_share < tensor.exchange_share / 10
    assert stages.seconds > tensor.seconds


def test_tensor_ranks_across_nodes_wait_for_the_network(published: Published) -> None:
    facts = published("Llama-3.1-405B")
    inside, across = Parallelism(tensor=8, gpus_per_node=8), Parallelism(tensor=8, gpus_per_node=4)
    assert tensor_stays_in_a_node(inside)
    assert not tensor_stays_in_a_node(across)
    costs = [decode_step(facts, p, H200, batch=64, context=1024) for p in (inside, across)]
    assert costs[1].exchange_seconds > 5 * costs[0].exchange_seconds
    assert costs[1].work_seconds == costs[0].work_seconds


def test_few_requests_read_few_experts(published: Published) -> None:
    """Of Qwen3-235B's 128 experts one token reads 8; a hundred tokens read nearly all."""
    facts = published("Qwen3-235B-A22B")
    one = decode_step(facts, Parallelism(tensor=8), H200, batch=1, context=0)
    many = decode_step(facts, Parallelism(tensor=8), H200, batch=100, context=0)
    active = 22.2e9 * 2 / 8 / 4.3e12  # "A22B": about 22 billion parameters per token, without the embedding's 0.6
    assert one.work_seconds == pytest.approx(active, rel=0.05)
    assert many.work_seconds > 8 * one.work_seconds


def test_a_faster_gpu_or_network_never_slows_a_step(published: Published) -> None:
    facts = published("Llama-3.1-405B")
    parallelism = Parallelism(tensor=8, pipeline=2, gpus_per_node=8)
    slow = decode_step(facts, parallelism, H200, batch=64, context=1024)
    network = decode_step(facts, parallelism, replace(H200, network_gigabits=400), batch=64, context=1024)
    gpu = decode_step(facts, parallelism, Hardware(gpu=gpu_named("B200")), batch=64, context=1024)
    assert network.seconds <= slow.seconds
    assert gpu.seconds < slow.seconds


def test_lockstep_engines_run_stages_sequentially(published: Published) -> None:
    """One step at a time (docs/concepts/parallelism.md): its two stages read and compute together what one stage
    would.
    """
    facts = published("Qwen3-235B-A22B")
    whole, stages = Parallelism(data=4), Parallelism(data=4, pipeline=2)
    one, two = (decode_step(facts, p, H200, batch=64, context=1024) for p in (whole, stages))
    assert two.seconds == pytest.approx(one.seconds, rel=0.02)
    assert two.work_seconds == pytest.approx(one.work_seconds / 2, rel=0.05)
    first, second = (prefill_seconds_per_token(facts, p, H200, chunk=8192, context=512) for p in (whole, stages))
    assert second == pytest.approx(first, rel=0.02)


def test_stages_of_one_engine_work_on_steps_of_their_own(published: Published) -> None:
    facts = published("Qwen3-235B-A22B")
    one, two = (
        prefill_seconds_per_token(facts, Parallelism(pipeline=n), H200, chunk=8192, context=512) for n in (1, 2)
    )
    assert two == pytest.approx(one / 2 / 0.85, rel=0.05)

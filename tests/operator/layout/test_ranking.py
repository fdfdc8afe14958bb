"""Order and reasons of ranked layouts, consistent with the guide."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from trimtab_operator.layout.check import check_layout
from trimtab_operator.layout.cost import Hardware, tensor_stays_in_a_node
from trimtab_operator.layout.facts import ModelFacts, facts_of_config
from trimtab_operator.layout.gpus import gpu_named
from trimtab_operator.layout.memory_fit import Envelope, memory_fit
from trimtab_operator.layout.ranking import Cluster, Load, Objective, Ranking, estimate_layout, rank_layouts
from trimtab_operator.layout.reasons import reason_for
from trimtab_operator.layout.stored_weights import as_loaded
from trimtab_operator.resource.spec import Parallelism, Spec

Published = Callable[[str], ModelFacts]
Degrees = tuple[int, int, int]


def a_ranking(
    facts: ModelFacts,
    gpu: str,
    gpus_per_node: int = 8,
    nodes: int = 1,
    *,
    max_model_len: int = 8192,
    objective: Objective = "throughput",
) -> tuple[Ranking, Cluster, Envelope]:
    cluster = Cluster(hardware=Hardware(gpu=gpu_named(gpu)), gpus_per_node=gpus_per_node, nodes=nodes)
    envelope = replace(Envelope.default(facts, gpu_named(gpu)), max_model_len=max_model_len)
    return rank_layouts(facts, cluster, envelope, load=Load(), objective=objective), cluster, envelope


def first(ranking: Ranking) -> Degrees:
    p = ranking.rows[0].parallelism
    return p.tensor, p.pipeline, p.data


@pytest.mark.parametrize(
    ("model", "gpu", "gpus_per_node", "nodes", "best", "said"),
    [
        # What fits one GPU is copied, not split: no synchronisation, users isolated.
        (
            "Llama-3.1-8B",
            "H200",
            8,
            1,
            (1, 1, 1),
            "fits one GPU: no synchronisation; 8 independent replicas",
        ),
        ("Llama-3.1-8B", "L40S", 4, 1, (1, 1, 1), "4 independent replicas"),
        # What does not is split inside the node, over no more GPUs than it needs.
        ("Llama-3.1-70B", "H100", 8, 1, (4, 1, 1), "larger than one GPU; every layer over 4 GPUs of one node (NVLink)"),
        ("Llama-3.1-405B", "H200", 8, 1, (8, 1, 1), "exchanges take"),
        # What is larger than a node: tensor inside, stages across.
        ("Llama-3.1-405B", "H100", 8, 2, (8, 2, 1), "larger than a node; every layer over 8 GPUs of one node (NVLink)"),
        ("Llama-3.1-405B", "H100", 8, 2, (8, 2, 1), "2 stages over 2 pods: only hidden states cross the network"),
        # Without NVLink stages come before wide tensor groups.
        (
            "Llama-3.1-70B",
            "L40S",
            8,
            1,
            (2, 4, 1),
            "instead of two all-reduces per layer, which matters without NVLink",
        ),
        # Experts over the ranks of several attention copies.
        ("Qwen3-235B-A22B", "H200", 8, 1, (1, 1, 8), "16 whole experts on each of 8 ranks"),
    ],
)
def test_the_best_layout_and_its_reason(
    published: Published, model: str, gpu: str, gpus_per_node: int, nodes: int, best: Degrees, said: str
) -> None:
    facts = published(model)
    ranking, cluster, envelope = a_ranking(facts, gpu, gpus_per_node, nodes)
    assert first(ranking) == best
    assert said in reason_for(ranking.rows[0], facts, cluster, envelope)


@pytest.mark.parametrize(
    ("model", "gpu", "tensor", "prompt", "output", "published_rate"),
    [
        # Output tokens per second of all GPUs; fp8 weights, random tokens, maximum load. NVIDIA/TensorRT-LLM,
        # docs/source/performance/perf-overview.md (1.0), the last line from the developer guide's table.
        ("Llama-3.1-8B", "H200", 1, 1000, 1000, 17_744),
        ("Llama-3.1-8B", "H200", 1, 2048, 128, 3_538),
        ("Llama-3.1-8B", "H200", 1, 2048, 2048, 12_194),
        ("Llama-3.1-8B", "H100", 1, 1000, 1000, 15_220),
        ("Llama-3.1-70B", "H200", 1, 1000, 1000, 2_909),
        ("Llama-3.1-70B", "H200", 1, 2048, 128, 442),
        ("Llama-3.1-70B", "H200", 2, 1000, 1000, 2 * 2_587),
    ],
)
def test_a_tuned_engine_reaches_between_half_and_all_of_the_estimate(
    published: Published, model: str, gpu: str, tensor: int, prompt: int, output: int, published_rate: float
) -> None:
    facts, device, parallelism = published(model), gpu_named(gpu), Parallelism(tensor=tensor)
    envelope = replace(Envelope.default(facts, device), max_model_len=prompt + output, quantization="fp8")
    envelope = replace(envelope, kv_dtype_bytes=1)
    fit = memory_fit(facts, parallelism, device, envelope)
    load = Load(prompt_tokens=prompt, output_tokens=output)
    held = as_loaded(facts, device, "fp8")
    estimate = estimate_layout(held, parallelism, Hardware(gpu=device), fit, envelope, load)
    assert 0.5 < published_rate / estimate.tokens_per_second < 1


def test_for_latency_a_model_is_split_as_far_as_the_node_goes(published: Published) -> None:
    ranking, _, _ = a_ranking(published("Llama-3.1-8B"), "H200", objective="latency")
    assert first(ranking) == (8, 1, 1)


@pytest.mark.parametrize(
    ("layers", "hidden", "width", "heads", "kv_heads", "best"),
    [
        (400, 2048, 8192, 16, 16, (1, 2, 1)),  # 801 small all-reduces wait longer than they save
        (8, 16384, 53248, 128, 8, (2, 1, 1)),  # 17 large ones do not
    ],
)
def test_deep_narrow_model_prefers_pipeline_stages(
    layers: int, hidden: int, width: int, heads: int, kv_heads: int, best: Degrees
) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": 32000,
        "max_position_embeddings": 8192,
        "torch_dtype": "bfloat16",
    }
    ranking, _, _ = a_ranking(facts_of_config(config, "m"), "H100", 2, objective="latency")
    assert first(ranking) == best


@pytest.mark.parametrize("objective", ["throughput", "latency"])
def test_tensor_groups_across_nodes_come_last(published: Published, objective: Objective) -> None:
    ranking, _, _ = a_ranking(published("Llama-3.1-405B"), "H100", 8, 2, objective=objective)
    inside = [tensor_stays_in_a_node(row.parallelism) for row in ranking.rows]
    assert False in inside
    assert inside == sorted(inside, reverse=True)


@pytest.mark.parametrize("model", ["Llama-3.1-8B", "Llama-3.1-70B", "Qwen3-235B-A22B", "SmolLM2-135M"])
@pytest.mark.parametrize(("gpu", "gpus_per_node", "nodes"), [("H100", 8, 2), ("L4", 6, 1), ("A100-40", 4, 3)])
def test_rows_pass_the_check_and_fit_the_gpus_and_refused_ones_do_not(
    published: Published, a_spec: Callable[..., Spec], model: str, gpu: str, gpus_per_node: int, nodes: int
) -> None:
    facts = published(model)
    ranking, cluster, _ = a_ranking(facts, gpu, gpus_per_node, nodes, max_model_len=4096)
    engine = {"maxModelLen": 4096}
    for row in ranking.rows:
        spec = a_spec(facts, engine=engine, **row.parallelism.model_dump(by_alias=True))
        assert check_layout(spec, facts, cluster.hardware.gpu) == ()
        assert row.replicas >= 1
        assert row.used_gpus <= cluster.gpus
        assert row.pods * (row.parallelism.gpus_per_node or 0) == row.gpus
        assert row.pods * row.replicas <= nodes * (gpus_per_node // (row.parallelism.gpus_per_node or 1))
    for refused in ranking.refused:
        spec = a_spec(facts, engine=engine, **refused.parallelism.model_dump(by_alias=True))
        assert check_layout(spec, facts, cluster.hardware.gpu)
    assert len({tuple(row.parallelism.model_dump().values()) for row in ranking.rows}) == len(ranking.rows)


@pytest.mark.parametrize("model", ["Llama-3.1-8B", "Qwen3-235B-A22B"])
def test_the_largest_cluster_that_can_be_asked_for_is_ranked(published: Published, model: str) -> None:
    ranking, cluster, _ = a_ranking(published(model), "H100", 64, 64)
    assert max(row.used_gpus for row in ranking.rows) == cluster.gpus


def test_a_model_that_is_too_large_for_all_gpus_has_no_row(published: Published) -> None:
    ranking, _, _ = a_ranking(published("Llama-3.1-405B"), "L4", 8, 2)
    assert ranking.rows == ()
    assert ranking.refused


def test_idle_gpus_and_a_tight_cache_are_said(published: Published) -> None:
    facts = published("Llama-3.1-405B")
    ranking, cluster, envelope = a_ranking(facts, "H200", 12, max_model_len=131072)
    reasons = [reason_for(row, facts, cluster, envelope) for row in ranking.rows]
    assert any("leaves 4 of 12 GPUs idle" in reason for reason in reasons)
    assert any("little KV cache: 3." in reason for reason in reasons), reasons

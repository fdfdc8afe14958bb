"""Divisibility rules of layouts, with the engine's rules as the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.errors import ConfigError
from trimtab_engine.models.registry import parse_model_config
from trimtab_engine.parallel.ranks import Layout as EngineLayout
from trimtab_engine.parallel.shard import check_layout as engine_check
from trimtab_operator.layout.facts import ModelFacts, facts_of_config
from trimtab_operator.layout.replica import layout_of
from trimtab_operator.layout.rules import facts_problems, spec_problems
from trimtab_operator.resource.spec import Parallelism, Spec

Published = Callable[[str], ModelFacts]
RandomCase = Callable[[int], tuple[dict[str, Any], dict[str, Any]]]


@pytest.mark.parametrize("seed", range(400))
def test_the_operator_refuses_exactly_what_the_engine_refuses(a_random_case: RandomCase, seed: int) -> None:
    config, layout = a_random_case(seed)
    model = parse_model_config(config, {}, "config.json")
    try:
        # Cores of a dense model know nothing of each other: each is a world of its own.
        world = layout | {"data": layout["data"] if model.moe is not None else 1}
        engine_check(model, EngineLayout(**world))
        refusal = None
    except ConfigError as error:
        refusal = str(error)
    problems = facts_problems(Parallelism(**layout), facts_of_config(config, "m"))
    assert bool(problems) == (refusal is not None), (refusal, problems)


def test_the_generated_cases_hold_both_verdicts(a_random_case: RandomCase) -> None:
    """So that the test above cannot pass by refusing, or allowing, all of them."""
    refused = 0
    for seed in range(400):
        config, layout = a_random_case(seed)
        refused += bool(facts_problems(Parallelism(**layout), facts_of_config(config, "m")))
    assert 100 < refused < 300


@pytest.mark.parametrize(
    ("model", "layout", "field", "said"),
    [
        ("SmolLM2-135M", {"tensor": 2}, "tensor", "is 2, which does not divide num_attention_heads 9; set 1 or 3"),
        ("SmolLM2-135M", {"tensor": 2}, "tensor", "is 2, which is neither a divisor nor a multiple of num_key_value"),
        ("SmolLM2-135M", {"pipeline": 31}, "pipeline", "is 31, but the model has 30 layers; set 30 or less"),
        ("Llama-3.1-8B", {"expert": True}, "expert", "is true, but LlamaForCausalLM has no experts; set it to false"),
        ("Llama-4-Scout", {"tensor": 16}, "tensor", "which does not divide num_attention_heads 40"),
        (
            "Qwen3-235B-A22B",
            {"data": 5},
            "data",
            "do not divide moe_intermediate_size 1536; set a product that",
        ),
        ("Qwen3-235B-A22B", {"data": 129, "expert": True}, "data", "gives 129 ranks and the model has 128 experts"),
    ],
)
def test_a_refusal_says_the_field_its_value_and_what_it_may_be(
    published: Published, model: str, layout: dict[str, Any], field: str, said: str
) -> None:
    problems = facts_problems(Parallelism(**layout), published(model))
    assert any(p.field == f"spec.parallelism.{field}" and said in str(p) for p in problems), list(map(str, problems))


@pytest.mark.parametrize(
    ("sizes", "field", "said"),
    [
        ((1,), "tensor", "which does not support tensor ranks; set it to 1, and raise spec.replicas or data"),
        ((1, 4), "tensor", "which supports 1 or 4 tensor ranks; set it to 1 or 4, and raise spec.replicas or data"),
        ((1, 2, 4), "pipeline", "which does not support pipeline stages; set it to 1, and raise spec.replicas or data"),
        ((1, 2, 4), "expert", "which does not support expert parallelism; set it to false"),
    ],
)
def test_transformers_models_reject_unsupported_degrees(
    published: Published, sizes: tuple[int, ...], field: str, said: str
) -> None:
    facts = replace(published("Llama-3.1-8B"), is_by_transformers=True, tensor_sizes=sizes)
    assert facts_problems(Parallelism(data=2), facts) == ()
    layout: dict[str, Any] = {field: True if field == "expert" else 2}
    problem = next(each for each in facts_problems(Parallelism(**layout), facts) if "transformers" in str(each))
    assert problem.field == f"spec.parallelism.{field}"
    assert said in str(problem)


def test_transformers_models_accept_reported_tensor_sizes(published: Published) -> None:
    facts = replace(published("Llama-3.1-8B"), is_by_transformers=True, tensor_sizes=(1, 2, 4), intermediate_size=0)
    assert facts_problems(Parallelism(tensor=4, data=2), facts) == ()


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"tensor": 2, "gpus_per_node": 4}, "is 4, but a replica has 2 ranks"),
        ({"gpus_per_node": 2}, "has 1 rank (tensor"),
        ({"expert": True}, "is true, but tensor × data is 1"),
        ({"tensor": 8, "pipeline": 1, "gpus_per_node": 3}, "set 1, 2, 4 or 8"),
        ({"tensor": 2, "data": 3, "gpus_per_node": 4}, "which does not divide the replica's 6 ranks"),
        ({"tensor": 2, "data": 3, "gpus_per_node": 4}, "set 2 or 6"),
        ({"tensor": 4, "data": 2, "gpus_per_node": 2}, "only a single engine can span pods"),
        ({"tensor": 2, "data": 3, "gpus_per_node": 3}, "every pod must hold whole engines of 2 ranks"),
    ],
)
def test_pods_hold_whole_engines_and_no_idle_gpu(layout: dict[str, Any], message: str) -> None:
    said = [str(problem) for problem in spec_problems(Parallelism(**layout))]
    assert any(message in text for text in said), said


def test_degrees_beyond_any_cluster_are_refused_as_quickly_as_others() -> None:
    """A user's numbers must not cost the operator's time: this has 134,217,728 ranks."""
    huge = Parallelism(tensor=1024, pipeline=128, data=1024, gpus_per_node=7)
    assert str(spec_problems(huge)[0]).endswith("set a multiple of 131072")


@pytest.mark.parametrize("seed", range(200))
def test_valid_replicas_fill_pods_with_whole_engines(a_spec: Callable[..., Spec], seed: int) -> None:
    """Brute force: deal the ranks out to pods, one after the other."""
    random = Random(seed)
    tensor, pipeline, data = (random.choice([1, 2, 3, 4]) for _ in range(3))
    per_pod = random.choice([None, *range(1, 17)])
    parallelism = Parallelism(tensor=tensor, pipeline=pipeline, data=data, gpus_per_node=per_pod)
    size = per_pod or tensor * pipeline
    engines = [rank // (tensor * pipeline) for rank in range(tensor * pipeline * data)]
    pods = [engines[start : start + size] for start in range(0, len(engines), size)]
    full = all(len(pod) == size for pod in pods)
    whole = all(pod.count(engine) == tensor * pipeline for pod in pods for engine in pod)
    assert (spec_problems(parallelism) == ()) == (full and (whole or data == 1))
    if not spec_problems(parallelism):
        layout = layout_of(a_spec(tensor=tensor, pipeline=pipeline, data=data, gpusPerNode=per_pod))
        assert (layout.pods, layout.gpus_per_pod) == (len(pods), size)
        EngineConfig(  # raises ConfigError for nodes that the engine would not take
            model="m",
            tensor_parallel_size=tensor,
            pipeline_parallel_size=pipeline,
            data_parallel_size=data,
            nnodes=layout.pods,
        )

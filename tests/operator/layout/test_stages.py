"""Weights of a rank, compared with the bytes that the engine's ranks read from a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import transformers
from transformers_checkpoint import ARCHITECTURES, SIZES
from trimtab_engine.models.by_transformers.division import Heads, Shapes, divide, plan_of
from trimtab_engine.models.checkpoint import expected_shapes
from trimtab_engine.models.facts import model_facts
from trimtab_engine.models.loading import Loader
from trimtab_engine.models.registry import family_of, parse_model_config
from trimtab_engine.parallel.groups import RankGroup, RankGroups
from trimtab_engine.parallel.ranks import Layout
from trimtab_engine.parallel.shard import shard_model
from trimtab_engine.weights.dummy import DummySource
from trimtab_operator.layout.facts import ModelFacts, facts_of_config
from trimtab_operator.layout.rules import facts_problems
from trimtab_operator.layout.stages import min_weights_bytes, stages_of
from trimtab_operator.resource.spec import Parallelism

Published = Callable[[str], ModelFacts]
RandomCase = Callable[[int], tuple[dict[str, Any], dict[str, Any]]]


def a_group(size: int) -> RankGroup | None:
    """Stub of the communicator; reading weights does not communicate."""
    return cast(RankGroup, SimpleNamespace(index=0, size=size)) if size > 1 else None


def elements_read(config: dict[str, Any], layout: Layout, folder: Path) -> list[int]:
    """Return the number of elements that each rank reads, by building its shard of the model."""
    (folder / "config.json").write_text(json.dumps(config))
    model = parse_model_config(config, {}, "config.json")
    groups = RankGroups(tensor=a_group(layout.tensor), pipeline=a_group(layout.pipeline), data=a_group(layout.data))
    found = []
    for rank in range(layout.world_size):
        source = DummySource(folder, seed=0)
        source.expect(expected_shapes(model))
        counts: list[int] = []
        shard = shard_model(model, layout, rank)
        load = Loader(source, torch.float32, torch.device("cpu"), counts.append)
        family_of(model.architecture).build(model, load, shard, groups)
        found.append(sum(counts))
    return found


def a_layout_that_works(a_random_case: RandomCase, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The first from this seed on. Cores of a dense model are worlds of their own: one of them is looked at."""
    while True:
        config, layout = a_random_case(seed)
        if config["architectures"] != ["Qwen3MoeForCausalLM"]:
            layout["data"] = 1
        if layout["pipeline"] * layout["tensor"] > 1 and not facts_problems(
            Parallelism(**layout), facts_of_config(config, "m")
        ):
            return config, layout
        seed += 1000


@pytest.mark.parametrize("seed", range(40))
def test_a_stages_weights_are_what_its_fullest_rank_reads(a_random_case: RandomCase, seed: int, tmp_path: Path) -> None:
    config, layout = a_layout_that_works(a_random_case, seed)
    read = elements_read(config, Layout(**layout), tmp_path)
    stages = stages_of(facts_of_config(config, "m"), Parallelism(**layout))
    tensor, pipeline = layout["tensor"], layout["pipeline"]
    for stage in stages:
        ranks = [rank for rank in range(len(read)) if rank // tensor % pipeline == stage.index]
        fullest = 2 * max(read[rank] for rank in ranks)  # bfloat16
        assert fullest <= stage.weights_bytes <= fullest + 8  # each part is rounded up to a whole byte


@pytest.mark.parametrize("seed", range(200))
def test_no_layout_has_less_than_its_least(a_random_case: RandomCase, seed: int) -> None:
    config, layout = a_layout_that_works(a_random_case, seed)
    facts, parallelism = facts_of_config(config, "m"), Parallelism(**layout)
    fullest = max(stage.weights_bytes for stage in stages_of(facts, parallelism))
    assert min_weights_bytes(facts, parallelism) <= fullest


def test_single_rank_holds_all_weights(published: Published) -> None:
    facts = published("Qwen3-235B-A22B")
    assert stages_of(facts, Parallelism())[0].weights_bytes == facts.weights_bytes


def test_kv_projections_are_repeated_when_there_are_more_ranks_than_kv_heads(published: Published) -> None:
    facts = published("Qwen3-235B-A22B")  # 4 KV heads
    four, eight = (stages_of(facts, Parallelism(tensor=t))[0].weights_bytes for t in (4, 8))
    repeated = facts.weights.kv_projection / 4 - facts.weights.kv_projection / 8
    replicated = facts.weights.replicated
    assert eight == pytest.approx((four - replicated) / 2 + replicated + repeated, rel=1e-6)


@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("name", ["GraniteForCausalLM", "Cohere2ForCausalLM", "MixtralForCausalLM", "Phi3ForCausalLM"])
def test_transformers_stage_matches_engine_first_rank(name: str, tensor: int, tmp_path: Path) -> None:
    """Two KV heads, one or half of one of which a rank has; a plan that divides projections and gathers them; weights
    that are tied; experts, which are divided as an MLP is.
    """
    model_class = getattr(transformers, name)
    config = model_class.config_class(**SIZES | ARCHITECTURES[name])
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict() | {"architectures": [name], "dtype": "float32"}))
    facts = ModelFacts.parse(model_facts(str(tmp_path), load_format="dummy"))
    with torch.device("meta"):
        whole = model_class(config)
    heads = Heads(4, 2, 16, tuple(f"model.layers.{layer}.self_attn" for layer in range(3)))
    divide(whole, plan_of(whole, heads), Shapes(tensor, 0))
    held = sum(parameter.numel() for parameter in whole.parameters())
    assert facts_problems(Parallelism(tensor=tensor), facts) == ()
    assert stages_of(facts, Parallelism(tensor=tensor))[0].weights_bytes == 4 * held

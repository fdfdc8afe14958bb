"""transformers models divided over tensor-parallel ranks by transformers' own plans: the ranks together must compute
the whole model's results. Ranks are threads here; parallel/test_layouts.py has processes.
"""

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers
from rank_threads import ThreadRank, on_ranks
from transformers_checkpoint import ARCHITECTURES, SIZES, a_checkpoint
from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.device.device import Device
from trimtab_engine.errors import ConfigError, NotSupportedError
from trimtab_engine.models.by_transformers.division import CannotDivide, Heads, Plan, plan_of
from trimtab_engine.models.facts import model_facts
from trimtab_engine.models.registry import parse_model_config
from trimtab_engine.parallel.groups import RankGroup, RankGroups
from trimtab_engine.parallel.ranks import Layout
from trimtab_engine.runner.loading import load_model_runner
from trimtab_engine.runner.model_runner import ModelRunner
from trimtab_engine.scheduling.batch import ScheduledSequence
from trimtab_engine.scheduling.request import Request
from trimtab_engine.scheduling.sampling import Sampling

PROMPT = list(range(20, 60))
BLOCK_SIZE, NUM_BLOCKS = 8, 32
UNDIVIDED = ("GPT2LMHeadModel", "OPTForCausalLM")
OF_EACH_KIND = (
    "Phi3ForCausalLM", "Olmo2ForCausalLM", "GPTNeoXForCausalLM", "Starcoder2ForCausalLM", "Cohere2ForCausalLM",
    "MixtralForCausalLM",
)  # fmt: skip
"""Gathered projections, norms over all heads, shared keys and values, biases, tied weights, experts."""
DIVIDED = [
    pytest.param(name, marks=() if name in OF_EACH_KIND else pytest.mark.soak)
    for name in ARCHITECTURES
    if name not in UNDIVIDED
]


def a_rank(folder: Path, rank: ThreadRank, **changes: Any) -> ModelRunner:
    config = EngineConfig(model=str(folder), block_size=BLOCK_SIZE, dtype="float32", cpu_threads=1, **changes)
    groups = RankGroups(tensor=cast(RankGroup, rank))
    layout = Layout(tensor=rank.size)
    runner = load_model_runner(
        ModelRunner, config, Device("cpu"), lambda stage, percent: None, layout=layout, rank=rank.index, groups=groups
    )
    runner.init_kv_cache(NUM_BLOCKS)
    runner.kv_cache.map_blocks(NUM_BLOCKS)
    return runner


def logits_of(runner: ModelRunner) -> torch.Tensor:
    """Return logits at every position of a prompt: a chunk of several tokens, then single tokens. Empty on ranks
    without logits.
    """
    num_groups = len(runner.facts.kv_groups)
    request = Request.of("r", PROMPT, Sampling(), arrival_time=0.0)
    request.block_tables = [list(range(group, 5 * num_groups, num_groups)) for group in range(num_groups)]
    request.num_out_of_window = [0] * num_groups
    spans = [(0, 7), *((position, 1) for position in range(7, len(PROMPT)))]
    steps = [runner.flatten([ScheduledSequence(request, first, count, samples=True)])[0] for first, count in spans]
    rows = [runner.run(step) for step in steps]
    return torch.cat([torch.empty(0), *(row for row in rows if row is not None)])


@pytest.mark.parametrize("name", DIVIDED)
def test_two_ranks_have_the_logits_of_transformers_and_half_of_the_weights(name: str, tmp_path: Path) -> None:
    reference = a_checkpoint(tmp_path, name)

    def compute(rank: ThreadRank) -> tuple[torch.Tensor, int, int]:
        runner = a_rank(tmp_path, rank)
        (group, *_) = runner.facts.kv_groups
        held = sum(parameter.numel() for parameter in set(runner._model._halves._whole.parameters()))  # type: ignore[attr-defined]
        held += sum(parameter.numel() for parameter in set(runner._model._halves.decoder.parameters()))  # type: ignore[attr-defined]
        return logits_of(runner), held, group.each.num_kv_heads

    (logits, _, kv_heads), (nothing, _, _) = found = on_ranks(2, compute)
    with torch.no_grad():
        expected = reference(torch.tensor([PROMPT])).logits[0, 6:]
    assert float((logits - expected).abs().max() / expected.abs().max()) <= 1e-4
    assert nothing.numel() == 0
    assert kv_heads == model_facts(str(tmp_path))["num_kv_heads"] // 2
    whole = sum(parameter.numel() for parameter in reference.parameters())
    tied = reference.get_output_embeddings().weight is reference.get_input_embeddings().weight
    for _, held, _ in found:
        held -= reference.get_input_embeddings().weight.numel() // 2 if tied else 0  # counted in both halves
        assert whole / 2 < held < 0.55 * whole


@pytest.mark.parametrize("name", ["Starcoder2ForCausalLM", "Phi3ForCausalLM", "MixtralForCausalLM"])
def test_four_ranks_share_two_kv_heads(name: str, tmp_path: Path) -> None:
    """Two hold each; by a plan that gives attention all heads, too."""
    reference = a_checkpoint(tmp_path, name)
    logits, *_ = on_ranks(4, lambda rank: logits_of(a_rank(tmp_path, rank)))
    with torch.no_grad():
        expected = reference(torch.tensor([PROMPT])).logits[0, 6:]
    assert float((logits - expected).abs().max() / expected.abs().max()) <= 1e-4


def facts_of(name: str, folder: Path, **changes: Any) -> dict[str, Any]:
    words = getattr(transformers, name).config_class(**SIZES | ARCHITECTURES.get(name, {}) | changes).to_dict()
    (folder / "config.json").write_text(json.dumps(words | {"architectures": [name]}))
    return model_facts(str(folder), load_format="dummy")


@pytest.mark.parametrize(
    ("name", "changes", "degrees"),
    [
        ("GraniteForCausalLM", {}, [1, 2, 4]),
        ("GraniteForCausalLM", {"intermediate_size": 82}, [1, 2]),
        ("GraniteForCausalLM", {"num_attention_heads": 6, "num_key_value_heads": 6}, [1, 2]),
        ("GraniteForCausalLM", {"num_attention_heads": 12, "num_key_value_heads": 3, "intermediate_size": 96},
         [1, 3, 6, 12]),
        ("GPT2LMHeadModel", {}, [1]),
        ("OPTForCausalLM", {}, [1]),
        ("CohereForCausalLM", {"use_qk_norm": True}, [1]),
    ],
)  # fmt: skip
def test_facts_say_over_how_many_ranks_a_model_can_be_divided(
    name: str, changes: dict[str, Any], degrees: list[int], tmp_path: Path
) -> None:
    assert facts_of(name, tmp_path, **changes)["tensor_parallel_sizes"] == degrees


def test_facts_say_what_ranks_divide(tmp_path: Path) -> None:
    facts = facts_of("GraniteForCausalLM", tmp_path)
    hidden, wide, layers, vocabulary = 64, 80, 3, 211
    assert facts["weights_by_part"] == {
        "embedding": 4 * vocabulary * hidden,
        "lm_head": 4 * vocabulary * hidden,
        "attention": 4 * layers * 2 * hidden * hidden,
        "kv_projection": 4 * layers * 2 * 32 * hidden,
        "dense_mlp": 4 * layers * 3 * hidden * wide,
        "experts": 0,
        "shared_experts": 0,
        "replicated": 4 * (2 * layers + 1) * hidden,
    }


def test_experts_of_transformers_are_divided_like_an_mlp(tmp_path: Path) -> None:
    """Its cores know nothing of each other, so that nothing is divided over tensor and data."""
    facts = facts_of("MixtralForCausalLM", tmp_path)
    assert facts["num_experts"] == 0
    assert facts["weights_by_part"]["dense_mlp"] == 4 * 3 * 6 * 3 * 64 * 80
    assert facts["weights_by_part"]["experts"] == 0


def a_plan(name: str, **plan: str) -> Plan:
    model_class = getattr(transformers, name)
    with torch.device("meta"):
        whole = model_class(model_class.config_class(**SIZES | ARCHITECTURES[name]))
    whole._tp_plan = {key.replace("__", "."): style for key, style in plan.items()}
    names = tuple(f"model.layers.{layer}.self_attn" for layer in range(3))
    return plan_of(whole, Heads(4, 2, 16, names))


@pytest.mark.parametrize(
    ("style", "what"),
    [
        ("sequence_parallel", "sequence_parallel for model.layers.0.mlp.up_proj .Linear., which is not supported"),
        ("moe_identity_expert", "moe_identity_expert for model.layers.0.mlp.up_proj"),
    ],
)
def test_words_of_a_plan_that_are_not_known_are_refused_by_name(style: str, what: str) -> None:
    with pytest.raises(CannotDivide, match=what):
        a_plan("GraniteForCausalLM", **{"model__layers__*__mlp__up_proj": style})


def test_training_plan_entries_divide_nothing() -> None:
    with pytest.raises(CannotDivide, match="it has no plan by which its layers are divided"):
        a_plan("GraniteForCausalLM", **{"model__layers__*__mlp__up_proj": "replicated_with_grad_allreduce"})


def test_a_plan_that_the_code_does_not_survive_is_the_refusal_s_reason(tmp_path: Path) -> None:
    """Cohere's norms of queries have a weight for each head, of which a rank would have too many."""
    words = transformers.CohereConfig(**SIZES | ARCHITECTURES["CohereForCausalLM"], use_qk_norm=True).to_dict()
    config = parse_model_config(words | {"architectures": ["CohereForCausalLM"]}, {}, "config.json")
    assert config.division is not None
    assert "its code does not run when divided by its plan (RuntimeError" in config.division.reason


def test_a_quantised_load_is_refused_before_ranks_are_asked(tmp_path: Path) -> None:
    a_checkpoint(tmp_path, "GraniteForCausalLM")
    with pytest.raises((NotSupportedError, ConfigError), match="quantization is not supported for GraniteForCausalLM"):
        on_ranks(2, lambda rank: a_rank(tmp_path, rank, quantization="fp8"))

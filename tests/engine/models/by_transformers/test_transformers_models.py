"""Models run by transformers' code, compared with transformers itself on tiny random checkpoints: on the bare runner,
and in engines that preempt, swap, hit the prefix cache and are resized meanwhile.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from engine_benchmarks.parity import Reference, compare, greedy_generator, load_runner, reference_tokens
from served import served_twice_with_resizes
from transformers_checkpoint import ARCHITECTURES, SIZES, a_checkpoint
from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.core.startup import start_engine
from trimtab_engine.errors import ModelError, NotSupportedError
from trimtab_engine.memory.reserved import RANK_BYTES
from trimtab_engine.models.checkpoint import num_parameters
from trimtab_engine.models.facts import model_facts
from trimtab_engine.models.registry import open_model, parse_model_config
from trimtab_engine.parallel.ranks import Layout
from trimtab_engine.parallel.shard import check_layout
from trimtab_engine.scheduling.batch import ScheduledSequence
from trimtab_engine.scheduling.request import Request
from trimtab_engine.scheduling.sampling import Sampling

NUM_TOKENS = 64
BLOCK_SIZE = 8
DEVICE_BYTES = RANK_BYTES + (256 << 20)  # of which the least step of the utilisation is a few KV blocks
PROMPTS = [[5], [5, 6, 7, 8, 9, 10, 11], list(range(20, 60)), [*range(20, 50), 3, 4]]
# One of each kind: windows, a part of the rotation, soft caps, layers without positions, an MoE, learned positions.
OF_EACH_KIND = (
    "Phi3ForCausalLM", "GPTNeoXForCausalLM", "Gemma2ForCausalLM", "SmolLM3ForCausalLM", "MixtralForCausalLM",
    "GPT2LMHeadModel",
)  # fmt: skip


@pytest.fixture(scope="module", params=ARCHITECTURES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, a_checkpoint(folder, request.param)


@pytest.fixture(scope="module")
def references(checkpoint: tuple[Path, Any]) -> list[Reference]:
    return reference_tokens(checkpoint[1], PROMPTS, NUM_TOKENS)


def test_logits_equal_transformers_at_every_position(checkpoint: tuple[Path, Any]) -> None:
    folder, reference = checkpoint
    runner = load_runner(str(folder), block_size=BLOCK_SIZE, num_blocks=32)
    num_groups = len(runner.facts.kv_groups)
    request = Request.of("r", PROMPTS[2], Sampling(), arrival_time=0.0)
    request.block_tables = [list(range(group, 5 * num_groups, num_groups)) for group in range(num_groups)]
    request.num_out_of_window = [0] * num_groups
    rows = [runner.execute([ScheduledSequence(request, i, 1, samples=True)]) for i in range(len(PROMPTS[2]))]
    with torch.no_grad():
        expected = reference(torch.tensor([PROMPTS[2]])).logits[0]
    assert float((torch.cat(rows) - expected).abs().max() / expected.abs().max()) <= 1e-4


def test_64_greedy_tokens_equal_transformers(checkpoint: tuple[Path, Any], references: list[Reference]) -> None:
    runner = load_runner(str(checkpoint[0]), block_size=BLOCK_SIZE, num_blocks=256)
    for chunk, batch in ((None, 4), (3, 4)):
        parity = compare(references, greedy_generator(runner, block_size=BLOCK_SIZE, chunk=chunk, batch=batch))
        assert parity.defects == []
        assert parity.near_ties <= 1


def test_the_number_of_parameters_is_the_models(checkpoint: tuple[Path, Any]) -> None:
    folder, model = checkpoint
    source = open_model(str(folder))
    config = parse_model_config(source.config, source.generation_config, source.where)
    assert num_parameters(config) == sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize(
    "checkpoint",
    [pytest.param(name, marks=() if name in OF_EACH_KIND else pytest.mark.soak) for name in ARCHITECTURES],
    indirect=True,
    scope="module",
)
def test_requests_get_transformers_tokens_under_any_scheduling(
    checkpoint: tuple[Path, Any], references: list[Reference]
) -> None:
    """In chunks, preempted and swapped, with prefix-cache hits in the second round, while the KV cache is resized."""
    config = EngineConfig(
        model=str(checkpoint[0]),
        device_memory_bytes=DEVICE_BYTES,
        cpu_threads=1,
        max_model_len=112,
        block_size=BLOCK_SIZE,
        max_num_seqs=8,
        max_num_seqs_cap=8,
        max_num_batched_tokens=20,
        max_num_batched_tokens_cap=24,
        gpu_memory_utilization="0.95",
        gpu_memory_utilization_cap="0.95",
        preemption_mode="swap",
        swap_space_bytes=1 << 19,
        swap_space_bytes_cap=1 << 19,
    )
    engine, _ = start_engine(config, lambda stage, percent: None, lambda: 0.0)
    served = served_twice_with_resizes(engine, references)
    assert any(batch.preempted["swap"] for batch in served)
    assert any(batch.prefix_cache_hits for batch in served)
    engine.close()


def refusal_of(name: str, **changes: Any) -> str:
    """Changes of transformers' own configuration of the architecture."""
    model_class = getattr(transformers, name)
    words = model_class.config_class(**(SIZES | changes)).to_dict() | {"architectures": [name]}
    with pytest.raises(ModelError) as refused:
        parse_model_config(words, {}, "config.json")
    return str(refused.value)


@pytest.mark.parametrize(
    ("name", "changes", "why"),
    [
        ("MambaForCausalLM", {}, "its layers keep a state in addition to keys and values"),
        ("FalconH1ForCausalLM", {}, "its layers keep a state in addition to keys and values"),
        ("BloomForCausalLM", {}, "it takes no positions"),
        ("StableLmForCausalLM", {}, "do not hand on what attention has to know"),
        (
            "Lfm2ForCausalLM",
            {"layer_types": ["conv", "full_attention", "conv"]},
            "would mix tokens of several requests",
        ),
        (
            "DeepseekV2ForCausalLM",
            {"num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2},
            "supported are equal ones",
        ),
        ("GPT2LMHeadModel", {"add_cross_attention": True}, "it has an encoder, or attends to one"),
    ],
)
def test_unsupported_model_is_rejected_with_trial_reason(name: str, changes: dict[str, Any], why: str) -> None:
    said = refusal_of(name, **changes)
    assert f"config.json: architecture {name} is not supported: transformers cannot run it here" in said
    assert why in said


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ({}, "has no causal language model of that name either"),
        (
            {"auto_map": {"AutoModel": "code.Ours"}},
            r"code is in the checkpoint \(auto_map\), and code from checkpoints is never run",
        ),
    ],
)
def test_architecture_unknown_to_transformers_is_rejected(words: dict[str, Any], why: str) -> None:
    with pytest.raises(ModelError, match=why):
        parse_model_config(SIZES | words | {"architectures": ["OursForCausalLM"]}, {}, "config.json")


@pytest.fixture(scope="module")
def olmo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("olmo")
    a_checkpoint(folder, "Olmo2ForCausalLM")
    return folder


def with_words(folder: Path, copy: Path, **words: Any) -> Path:
    """The same checkpoint with another config.json."""
    config = json.loads((folder / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | words))
    (copy / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    return copy


def test_code_that_comes_with_a_known_architecture_is_passed_over(olmo: Path, tmp_path: Path) -> None:
    """Many checkpoints still bring the code that transformers has long had itself."""
    folder = with_words(olmo, tmp_path, auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"})
    assert greedy_generator(load_runner(str(folder), num_blocks=8), block_size=16)([[5, 6]], 4)


def test_weights_that_are_not_there_are_named(olmo: Path, tmp_path: Path) -> None:
    folder = with_words(olmo, tmp_path, num_hidden_layers=4)
    with pytest.raises(ModelError, match=r"the weights lack \d+ tensors, first model\.layers\.3\.mlp"):
        load_runner(str(folder))


def test_weights_of_other_shapes_are_refused(olmo: Path, tmp_path: Path) -> None:
    folder = with_words(olmo, tmp_path, intermediate_size=96)
    with pytest.raises(ModelError, match="the weights cannot be read as Olmo2ForCausalLM"):
        load_runner(str(folder))


def test_weights_that_are_quantised_are_refused_by_name(olmo: Path, tmp_path: Path) -> None:
    folder = with_words(olmo, tmp_path, quantization_config={"quant_method": "awq"})
    with pytest.raises(ModelError, match="quantization_config is not supported for Olmo2ForCausalLM, which"):
        load_runner(str(folder))


def test_a_model_that_is_another_over_paged_attention_is_not_served(
    olmo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that derives positions from the index in the step: correct only for a request by itself."""
    rotary = transformers.models.olmo2.modeling_olmo2.Olmo2RotaryEmbedding
    own = rotary.forward

    def by_place(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return own(self, x, torch.arange(position_ids.shape[-1], device=x.device).unsqueeze(0))

    monkeypatch.setattr(rotary, "forward", by_place)
    with pytest.raises(NotSupportedError, match="computes different results for several requests together"):
        load_runner(str(olmo))


def test_dummy_weights_need_no_checkpoint(olmo: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((olmo / "config.json").read_text())
    runner = load_runner(str(tmp_path), num_blocks=8, load_format="dummy")
    assert len(greedy_generator(runner, block_size=16)([[5, 6]], 4)[0]) == 4


@pytest.mark.parametrize(
    ("name", "layout", "said"),
    [
        ("Olmo2ForCausalLM", Layout(pipeline=2), "--pipeline-parallel-size: Olmo2ForCausalLM runs on transformers"),
        (
            "Olmo2ForCausalLM",
            Layout(tensor=2, expert=True),
            "--enable-expert-parallel: Olmo2ForCausalLM runs on transformers' own code",
        ),
        ("Olmo2ForCausalLM", Layout(tensor=3), "not divided over 3 ranks: its heads, .*; set one of 1, 2, 4, or start"),
        ("GPT2LMHeadModel", Layout(tensor=2), "not divided over 2 ranks: it has no plan by .*; set one of 1, or start"),
    ],
)
def test_ranks_that_do_not_divide_it_are_refused_by_name(name: str, layout: Layout, said: str) -> None:
    words = getattr(transformers, name).config_class(**SIZES | ARCHITECTURES[name]).to_dict()
    config = parse_model_config(words | {"architectures": [name]}, {}, "config.json")
    with pytest.raises(NotSupportedError, match=said):
        check_layout(config, layout)


def test_positions_that_are_turned_by_length_end_where_that_begins() -> None:
    """Phi-3's long checkpoints turn all tokens otherwise as soon as one request is long."""
    scaling = {
        "rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "rope_theta": 1e4,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    words = transformers.Phi3Config(**SIZES, original_max_position_embeddings=64, rope_parameters=scaling).to_dict()
    config = parse_model_config(words | {"architectures": ["Phi3ForCausalLM"]}, {}, "config.json")
    assert config.max_model_len == 64


def test_yarn_added_to_a_config_extends_positions() -> None:
    scaling = {
        "rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64,
    }  # fmt: skip
    words = transformers.OlmoConfig(**SIZES | {"max_position_embeddings": 80}, rope_parameters=scaling).to_dict()
    assert parse_model_config(words | {"architectures": ["OlmoForCausalLM"]}, {}, "config.json").max_model_len == 256


def test_facts_say_who_computes_a_model_or_why_nobody_does(olmo: Path, tmp_path: Path) -> None:
    facts = model_facts(str(olmo))
    assert (facts["supported"], facts["computed_by"], facts["num_layers"]) == (True, "transformers", 3)
    assert facts["weights_bytes"] == sum(facts["weights_by_part"].values()) == 4 * facts["num_parameters"]
    words = transformers.MambaConfig().to_dict() | {"architectures": ["MambaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(words))
    refused = model_facts(str(tmp_path), load_format="dummy")
    assert not refused["supported"]
    assert "recurrent or state-space layers" in refused["refusal"]

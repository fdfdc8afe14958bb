"""Families with several layer types, against transformers on tiny random checkpoints with every feature enabled: on the
bare runner, and in engines that preempt, swap, hit the prefix cache and are resized meanwhile.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from calling_recorder import steps_of_a_device
from engine_benchmarks.parity import Reference, compare, greedy_generator, load_runner, reference_tokens
from hybrid_families import CORRECTION, DEEPSEEK, FAMILIES, LLAMA4, PROMPTS, SIZES, save_family
from safetensors.torch import save_file
from served import served_twice_with_resizes
from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.config.graphs import CompilationConfig, CUDAGraphMode
from trimtab_engine.config.speculation import SpeculativeConfig
from trimtab_engine.core.startup import start_engine
from trimtab_engine.errors import ModelError, NotSupportedError
from trimtab_engine.memory.reserved import RANK_BYTES
from trimtab_engine.models.checkpoint import check_counts, check_tensors, expected_shapes, num_parameters
from trimtab_engine.models.registry import open_model, parse_model_config
from trimtab_engine.scheduling.batch import ScheduledSequence
from trimtab_engine.scheduling.request import Request
from trimtab_engine.scheduling.sampling import Sampling

NUM_TOKENS = 64
DEVICE_BYTES = RANK_BYTES + (256 << 20)  # of which the least step of the utilisation is a few KV blocks
BLOCK_SIZE = 8


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """(folder, transformers' model)."""
    folder = tmp_path_factory.mktemp(request.param)
    return folder, save_family(request.param, folder)


@pytest.fixture(scope="module")
def references(checkpoint: tuple[Path, Any]) -> list[Reference]:
    return reference_tokens(checkpoint[1], PROMPTS, NUM_TOKENS)


def test_64_greedy_tokens_equal_transformers(checkpoint: tuple[Path, Any], references: list[Reference]) -> None:
    runner = load_runner(str(checkpoint[0]), block_size=BLOCK_SIZE, num_blocks=256)
    for chunk, batch in ((None, 1), (None, 4), (3, 4), (20, 4)):
        parity = compare(references, greedy_generator(runner, block_size=BLOCK_SIZE, chunk=chunk, batch=batch))
        assert parity.defects == []
        assert parity.near_ties <= 1


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


def test_the_number_of_parameters_is_the_checkpoints(checkpoint: tuple[Path, Any]) -> None:
    folder, model = checkpoint
    source = open_model(str(folder))
    config = parse_model_config(source.config, source.generation_config, source.where)
    corrections = (buffer for name, buffer in model.named_buffers() if name.endswith(CORRECTION))
    assert num_parameters(config) == sum(weight.numel() for weight in (*model.parameters(), *corrections))


SWAP = {"preemption_mode": "swap", "swap_space_bytes": 1 << 20, "swap_space_bytes_cap": 1 << 20}
DRAFTS: dict[str, Any] = {
    "speculative": SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1),
    "num_speculative_tokens": 3,
    "num_speculative_tokens_cap": 3,
}


def a_config(folder: Path, changes: dict[str, Any]) -> EngineConfig:
    return EngineConfig(
        model=str(folder),
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
        **changes,
    )


@pytest.mark.parametrize("changes", [{}, SWAP, {"async_scheduling": True}], ids=["recompute", "swap", "overlapping"])
def test_requests_get_transformers_tokens_under_any_scheduling(
    checkpoint: tuple[Path, Any], references: list[Reference], changes: dict[str, Any]
) -> None:
    """In chunks, preempted, with prefix-cache hits in the second round, while the KV cache shrinks and grows."""
    engine, _ = start_engine(a_config(checkpoint[0], changes), lambda stage, percent: None, lambda: 0.0)
    served = served_twice_with_resizes(engine, references)
    assert any(batch.preempted[changes.get("preemption_mode", "recompute")] for batch in served)
    assert any(batch.prefix_cache_hits for batch in served)
    engine.close()


ON_A_DEVICE: dict[str, dict[str, Any]] = {
    "mistral": {"async_scheduling": True},
    "gemma3": SWAP | {"async_scheduling": True},
    "gpt-oss": DRAFTS | {"compilation": CompilationConfig(cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY)},
    "llama4": DRAFTS | {"async_scheduling": True},
    "deepseek": SWAP | {"async_scheduling": True},
    "deepseek, direct": DRAFTS | {"compilation": CompilationConfig(cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY)},
}


@pytest.mark.parametrize("checkpoint", ON_A_DEVICE, indirect=True)
def test_steps_of_a_device_give_them_the_same(
    checkpoint: tuple[Path, Any], references: list[Reference], request: pytest.FixtureRequest
) -> None:
    """Inputs at fixed places, a table per KV group, graphs that a double replays; the rest as above."""
    changes = ON_A_DEVICE[request.node.callspec.params["checkpoint"]]
    with steps_of_a_device() as recorder:
        engine, _ = start_engine(a_config(checkpoint[0], changes), lambda stage, percent: None, lambda: 0.0)
        served = served_twice_with_resizes(engine, references)
        engine.close()
    assert any(batch.preempted[changes.get("preemption_mode", "recompute")] for batch in served)
    assert any(batch.prefix_cache_hits for batch in served)
    assert recorder.num_replays > 0


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0 is not supported"),
        ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0 is not supported"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention True is not supported"),
        ("gemma3", {"hidden_activation": "silu"}, "hidden_activation 'silu' is not supported"),
        (
            "gemma3",
            {"layer_types": ["full_attention"]},
            "layer_types has 1 entries, of full_attention; supported are 4",
        ),
        ("gpt-oss", {"num_experts_per_tok": 7}, "num_experts_per_tok 7 is above num_local_experts 6"),
        *(
            (
                name,
                {"quantization_config": scheme},
                f"quant_method '{scheme['quant_method']}' is not supported for {family}",
            )
            for name, family in (("gpt-oss", "GptOssForCausalLM"), ("llama4", "Llama4ForCausalLM"))
            for scheme in (
                {"quant_method": "compressed-tensors"},
                {"quant_method": "awq", "bits": 4},
                {"quant_method": "gptq", "bits": 4},
                {"quant_method": "fp8", "weight_block_size": [128, 128]},
            )
        ),
        (
            "llama4",
            {"quantization_config": {"quant_method": "mxfp4"}},
            "quant_method 'mxfp4' is not supported for Llama4",
        ),
        ("deepseek", {"quantization_config": {"quant_method": "mxfp4"}}, "'mxfp4' is not supported for DeepseekV3"),
        ("deepseek", {"rope_interleave": False}, "rope_interleave False is not supported"),
        ("deepseek", {"topk_group": 5}, "topk_group 5 no more than n_group"),
        ("deepseek", {"num_experts_per_tok": 5}, "num_experts_per_tok 5 is above the 4 of topk_group groups"),
        ("llama4", {"no_rope_layers": [1, 0]}, "no_rope_layers has 2 entries; 5 are needed"),
        (
            "llama4",
            {"layer_types": ["sliding_attention"] * 5},
            "of sliding_attention; supported are 5, of full_attention",
        ),
    ],
)
def test_config_unsupported_is_rejected(name: str, changes: dict[str, Any], message: str) -> None:
    model_class, _, config = FAMILIES[name]
    with pytest.raises(ModelError, match=message):
        parse_model_config(config | {"architectures": [model_class.__name__]} | changes, {}, "config.json")


def test_layers_that_predict_further_tokens_are_left_alone(tmp_path: Path) -> None:
    config = parse_model_config(DEEPSEEK | {"architectures": ["DeepseekV3ForCausalLM"]}, {}, "config.json")
    stored = {name: torch.zeros(shape) for name, shape in expected_shapes(config).items()}
    (tmp_path / "config.json").write_text("{}")
    save_file(stored | {"model.layers.3.eh_proj.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    check_tensors(config, open_model(str(tmp_path)))
    save_file(stored | {"model.layers.4.eh_proj.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.layers\.4\.eh_proj\.weight; this variant is not supported"):
        check_tensors(config, open_model(str(tmp_path)))


def test_config_defaults_equal_transformers() -> None:
    """Released configurations rely on most of transformers' defaults."""
    said = {key: SIZES[key] for key in SIZES if key not in ("head_dim", "sliding_window", "max_position_embeddings")}
    gemma = parse_model_config(said | {"architectures": ["Gemma3ForCausalLM"]}, {}, "config.json")
    assert gemma.tie_word_embeddings
    assert (gemma.head_size, gemma.max_model_len, gemma.rope.theta) == (256, 131072, 1e6)
    assert gemma.local_rope is not None
    assert (gemma.local_rope.theta, gemma.windows) == (1e4, (4096,) * 4)
    older = said | {"architectures": ["Gemma3ForCausalLM"], "sliding_window_pattern": 2, "sliding_window": 512}
    older |= {"rope_local_base_freq": 2e4, "rope_theta": 3e6, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    gemma = parse_model_config(older, {}, "config.json")
    assert gemma.local_rope is not None
    assert (gemma.rope.theta, gemma.rope.rope_type, gemma.rope.factor) == (3e6, "linear", 8.0)
    assert (gemma.local_rope.theta, gemma.local_rope.rope_type) == (2e4, "default")
    assert gemma.windows == (512, None, 512, None)


def test_released_configurations_of_llama_4_are_read_as_transformers_does() -> None:
    said = {key: SIZES[key] for key in SIZES if key not in ("head_dim", "sliding_window", "max_position_embeddings")}
    llama = parse_model_config(said | {"architectures": ["Llama4ForCausalLM"], "no_rope_layers": []}, {}, "config.json")
    assert llama.moe is not None
    assert (llama.windows, llama.is_chunked, llama.nope_layers) == ((8192, 8192, 8192, None), True, frozenset({3}))
    assert (llama.intermediate_size, llama.moe.shared_size, llama.moe.dense_layers) == (16384, 80, frozenset())
    assert (llama.head_size, llama.rope.theta, llama.rms_norm_eps, llama.qk_norm) == (128, 5e5, 1e-5, True)
    assert llama.temperature is not None
    assert (llama.temperature.floor, llama.temperature.scale) == (8192, 0.1)


def test_experts_in_one_tensor_per_projection_are_no_tensors_of_their_own(tmp_path: Path) -> None:
    """Released checkpoints have more experts than tensors."""
    config = parse_model_config(
        LLAMA4 | {"architectures": ["Llama4ForCausalLM"], "num_local_experts": 500}, {}, "config.json"
    )
    save_file({name: torch.zeros(1) for name in expected_shapes(config)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    check_counts(config, open_model(str(tmp_path)))


def test_a_draft_model_beside_windows_is_refused_by_name(checkpoint: tuple[Path, Any]) -> None:
    if not any(group.each.window for group in load_runner(str(checkpoint[0])).facts.kv_groups):
        pytest.skip("it has none")
    from trimtab_engine.device.device import Device
    from trimtab_engine.runner.loading import load_model_runner
    from trimtab_engine.runner.model_runner import ModelRunner
    from trimtab_engine.speculative.loading import Speculation

    folder = str(checkpoint[0])
    drafts = SpeculativeConfig(method="draft_model", num_speculative_tokens=2, model=folder)
    config = EngineConfig(model=folder, speculative=drafts)
    target = load_model_runner(ModelRunner, config, Device("cpu"), lambda stage, percent: None)
    with pytest.raises(NotSupportedError, match="has layers with a window, which is not supported; use the"):
        Speculation.load(config, Device("cpu"), target)

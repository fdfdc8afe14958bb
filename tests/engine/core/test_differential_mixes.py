"""Random mixes of requests that share prefixes, on every device path that a machine without a GPU has.

Each request gets the tokens, log-probabilities and vectors that it gets alone, on an engine without prefix caching.
Mixes are chunked, arrive late, are cancelled, preempted, swapped, repeated from the prefix cache and verified with
drafts (fakes/request_mixes.py). `make soak` tries ten times as many.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import engine_builders
import pytest
import torch
import transformers_checkpoint
import trimtab_engine.models.compiled_layers as compiled_module
from adapter_folders import EVERY, an_adapter, modules_of
from calling_recorder import steps_of_a_device
from draft_heads import save_eagle
from four_bit_checkpoint import Recipe, quantise
from request_mixes import BUDGETS, VOCABULARY, Answer, Question, Tally, answer_alone, draw_questions, run_mix
from safetensors.torch import save_file
from trimtab_engine.config.adapters import AdapterConfig, AdapterModule
from trimtab_engine.config.speculation import SpeculativeConfig
from trimtab_engine.core.engine import Engine
from trimtab_engine.layers import attention, latent_attention, linear
from trimtab_engine.models.checkpoint import expected_shapes
from trimtab_engine.models.registry import parse_model_config
from trimtab_engine.runner import model_runner
from trimtab_kernels.latent_and_cache import latent_and_cache_triton
from trimtab_kernels.latent_attention import attend_latent_batch
from trimtab_kernels.native.library import NativeUnavailable, native_library
from trimtab_kernels.paged_attention import AttentionMetadata
from trimtab_kernels.paged_batch import attend_paged_batch, build_paged_batch
from trimtab_kernels.rope_and_cache import rope_and_cache_triton

SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 10))]
BLOCK_SIZE = 8
LONGEST = 240
"""Tokens of a prompt."""
MAX_MODEL_LEN = 256
BYTES_PER_BLOCK = 2 * 2 * BLOCK_SIZE * 2 * 16 * 4
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": MAX_MODEL_LEN,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "eos_token_id": VOCABULARY - 1,
    "torch_dtype": "float32",
}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
AWQ = Recipe("awq")
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"]},
    "mistral": {"architectures": ["MistralForCausalLM"]},
    "experts": {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 6, **EXPERTS},
    "awq": {
        "architectures": ["LlamaForCausalLM"],
        "intermediate_size": 192,
        "tie_word_embeddings": False,
        "quantization_config": AWQ.config,
    },
    "windows": {"architectures": ["MistralForCausalLM"], "sliding_window": 29},
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "num_hidden_layers": 4,
        "query_pre_attn_scalar": 16,
        "sliding_window": 29,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    },
    "sinks": {
        "architectures": ["GptOssForCausalLM"],
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "intermediate_size": 32,
        "sliding_window": 29,
        "attention_bias": True,
    },
    "chunks": {
        "architectures": ["Llama4ForCausalLM"],
        "num_local_experts": 6,
        "num_experts_per_tok": 1,
        "intermediate_size": 32,
        "intermediate_size_mlp": 96,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 29,
        "no_rope_layers": [1, 0],
        "floor_scale": 16,
    },
    "latent": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 48,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "n_routed_experts": 6,
        "n_shared_experts": 1,
        "n_group": 3,
        "topk_group": 2,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    },
}
TIGHT = {"num_gpu_blocks_override": MAX_MODEL_LEN // BLOCK_SIZE + 40}
SWAP = {"swap_space_bytes": 200 * BYTES_PER_BLOCK, "swap_space_bytes_cap": 200 * BYTES_PER_BLOCK}
OFFLOAD = {"kv_offload_bytes": 400 * BYTES_PER_BLOCK, "kv_offload_bytes_cap": 400 * BYTES_PER_BLOCK}
NGRAM: dict[str, Any] = {
    "speculative": SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1),
    "num_speculative_tokens": 3,
    "num_speculative_tokens_cap": 3,
}


SHORT = {"max_model_len": 48, "max_num_seqs": 6, "max_num_batched_tokens": 48}
"""Of an engine that is started in the interpreter, which computes the largest step once."""


def drafts_of(method: str, model: Path) -> dict[str, Any]:
    """Return the settings of a draft model that is the model itself, or of a random EAGLE head. Both have keys and
    values of their own in the blocks of the model.
    """
    path = save_eagle(model / "eagle", model) if method == "eagle" else model
    speculative = SpeculativeConfig(method=method, num_speculative_tokens=3, model=str(path))  # type: ignore[arg-type]
    return NGRAM | {"speculative": speculative}


@contextmanager
def torch_operators() -> Iterator[None]:
    """An installation without compiled operators."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (linear, compiled_module):
            patch.setattr(module, "native_library", lambda: NativeUnavailable("they were not compiled"))
        yield


@contextmanager
def triton_interpreter() -> Iterator[None]:
    """The attention kernels of CUDA, on CPU tensors: launched as on CUDA, one program after another."""

    def plan(
        slots: list[int],
        decodes: Any,
        chunks: Any,
        *,
        block_size: int,
        device: torch.device,
        window: int | None = None,
        chunk_size: int | None = None,
        gone: Any = (),
        **_: Any,
    ) -> AttentionMetadata:
        moved = None if chunk_size is None else gone or [0] * (len(decodes) + len(chunks))
        paged = build_paged_batch(decodes, chunks, block_size=block_size, device=device, gone=moved)
        mapping = torch.tensor(slots, dtype=torch.int64)
        return AttentionMetadata(paged.num_tokens, mapping, (), (), paged, window=window, chunk_size=chunk_size)

    def attend(
        query: Any, key: Any, value: Any, keys: Any, values: Any, metadata: Any, scale: float, **more: Any
    ) -> Any:
        attention_window = {"window": metadata.window, "chunk_size": metadata.chunk_size}
        return attend_paged_batch(query, keys, values, metadata.paged, scale, **attention_window, **more)

    def rope(*arguments: Any, is_padded: bool, **more: Any) -> Any:
        return rope_and_cache_triton(*arguments, **more)

    def attend_latent(
        query: Any, key: Any, cache: Any, metadata: Any, scale: float, *, kv_rank: int, cache_scale: float
    ) -> Any:
        return attend_latent_batch(query, cache, metadata.paged, scale, kv_rank=kv_rank, cache_scale=cache_scale)

    def write_latent(*arguments: Any, is_padded: bool, **more: Any) -> Any:
        return latent_and_cache_triton(*arguments, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(latent_attention, "latent_attention", attend_latent)
        patch.setattr(latent_attention, "latent_and_cache", write_latent)
        patch.setattr(model_runner, "build_attention_metadata", plan)
        patch.setattr(attention, "paged_attention", attend)
        patch.setattr(attention, "rope_and_cache", rope)
        yield


Context = Callable[[], AbstractContextManager[Any]]
PATHS: dict[str, tuple[Context, Context]] = {
    "compiled": (nullcontext, nullcontext),
    "torch": (torch_operators, nullcontext),
    "device": (steps_of_a_device, nullcontext),
    "interpreter": (torch_operators, triton_interpreter),
}
"""How engines start, and how those serve that answer mixes."""


@dataclass(frozen=True)
class Series:
    """A model on a device path, and how the engine is started."""

    path: str
    model: str
    mixes: int
    changes: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-4
    """Between log-probabilities: orders of summation differ."""
    budgets: tuple[int, ...] = BUDGETS
    longest: int = LONGEST
    most: int = 24
    """Prompts of a mix, before choices of one prompt."""
    adapters: tuple[str, ...] = ("",)
    drafts: str = ""
    questions: int = 120
    expects: tuple[str, ...] = ()
    """Fields of the tally, or kinds of preemption, that are not 0 afterwards."""


ADAPTERS = ("", "a", "b")
TRANSFORMERS = "GPT2LMHeadModel"
"""Without a family of its own: transformers' code computes it."""
SERIES = {
    "compiled llama": Series("compiled", "llama", 760, expects=("sliced_steps", "mixed_steps", "aborted")),
    "compiled llama 2 threads": Series("compiled", "llama", 12, {"cpu_threads": 2}, expects=("sliced_steps",)),
    "compiled llama blocks of 16": Series("compiled", "llama", 100, {"block_size": 16}),
    "compiled qwen3": Series("compiled", "qwen3", 200, expects=("sliced_steps",)),
    "compiled mistral": Series("compiled", "mistral", 150, expects=("sliced_steps",)),
    "compiled experts": Series("compiled", "experts", 150, expects=("sliced_steps",)),
    "compiled awq": Series("compiled", "awq", 100, tolerance=2e-2, expects=("sliced_steps",)),
    "compiled recompute": Series("compiled", "llama", 100, TIGHT, expects=("recompute",)),
    "compiled swap": Series("compiled", "llama", 100, TIGHT | SWAP | {"preemption_mode": "swap"}, expects=("swap",)),
    "compiled host cache": Series(
        "compiled", "llama", 100, TIGHT | OFFLOAD | {"async_scheduling": True}, expects=("host_cached_tokens",)
    ),
    "compiled n-gram": Series("compiled", "llama", 100, TIGHT | NGRAM, expects=("accepted_drafts", "recompute")),
    "compiled draft model": Series("compiled", "llama", 60, drafts="draft_model", expects=("accepted_drafts",)),
    "compiled eagle": Series("compiled", "llama", 30, drafts="eagle"),
    "compiled adapters": Series("compiled", "llama", 40, adapters=ADAPTERS),
    "compiled whole prompts": Series(
        "compiled", "llama", 60, {"enable_chunked_prefill": False}, budgets=(256, 300, 481, 1024)
    ),
    "torch llama": Series("torch", "llama", 30, expects=("sliced_steps",)),
    "torch experts": Series("torch", "experts", 20),
    "torch windows": Series("torch", "windows", 20),
    "torch gemma3": Series("torch", "gemma3", 20, expects=("sliced_steps",)),
    "torch gemma3 swap": Series(
        "torch", "gemma3", 15, {"num_gpu_blocks_override": 320, **SWAP, **OFFLOAD, "preemption_mode": "swap"}
    ),
    "torch sinks": Series("torch", "sinks", 15),
    "torch chunks": Series("torch", "chunks", 15),
    "torch latent": Series("torch", "latent", 15),
    "torch by transformers": Series("torch", TRANSFORMERS, 15),
    "torch bfloat16": Series("torch", "llama", 15, {"dtype": "bfloat16"}, tolerance=0.15),
    "torch float8 cache": Series("torch", "llama", 15, {"kv_cache_dtype": "fp8"}, tolerance=2e-2),
    "interpreter llama": Series("interpreter", "llama", 2, SHORT, longest=36, questions=10, budgets=(24, 48), most=6),
    "interpreter gemma3": Series("interpreter", "gemma3", 1, SHORT, longest=36, questions=10, budgets=(24, 48), most=6),
    "interpreter latent": Series("interpreter", "latent", 1, SHORT, longest=36, questions=10, budgets=(24, 48), most=6),
    "device llama": Series("device", "llama", 20, expects=("graph_steps",)),
    "device gemma3": Series("device", "gemma3", 8, expects=("graph_steps",)),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a model with random weights, large enough that attention decides over tokens."""
    made: dict[str, Path] = {}

    def folder_of(model: str) -> Path:
        if model not in made:
            made[model] = tmp_path_factory.mktemp(model)
            if model == TRANSFORMERS:
                sizes = {
                    "vocab_size": VOCABULARY,
                    "max_position_embeddings": MAX_MODEL_LEN,
                    "n_positions": MAX_MODEL_LEN,
                    "eos_token_id": VOCABULARY - 1,
                }
                transformers_checkpoint.a_checkpoint(made[model], model, **sizes)
            else:
                save_model(made[model], SIZES | MODELS[model])
        return made[model]

    return folder_of


def save_model(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for name, shape in expected_shapes(parse_model_config(config, {}, "config.json")).items():
        noise = torch.randn(shape, generator=generator) * (0.15 if len(shape) > 1 else 0.1)
        tensors[name] = noise + 1.0 if "norm" in name and "Gemma" not in config["architectures"][0] else noise
    if "quantization_config" in config:
        quantise(tensors, AWQ)
    save_file(tensors, folder / "model.safetensors")


def start(model: Path, **changes: Any) -> Engine:
    """Start an engine whose knobs reach every budget of the mixes."""
    settings: dict[str, Any] = {
        "load_format": "auto",
        "max_model_len": MAX_MODEL_LEN,
        "block_size": BLOCK_SIZE,
        "num_gpu_blocks_override": 800,
        "max_num_seqs": 24,
        "max_num_batched_tokens": max(BUDGETS),
    }
    return engine_builders.an_engine(model, **settings | changes)


@pytest.fixture(scope="module")
def adapters(folders: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> AdapterConfig:
    """Two adapters of the llama model."""
    shapes = expected_shapes(parse_model_config(SIZES | MODELS["llama"], {}, "config.json"))
    modules = []
    for seed, name in enumerate(ADAPTERS[1:]):
        folder = tmp_path_factory.mktemp("adapter") / name
        path = an_adapter(folder, modules_of(shapes, EVERY), seed=seed, size=0.3)
        modules.append(AdapterModule(name=name, path=path))
    return AdapterConfig(modules=tuple(modules), max_loras=2)


def asked_alone(series: Series, model: Path, changes: dict[str, Any], seed: int) -> tuple[list[Question], list[Answer]]:
    questions = draw_questions(
        series.questions, longest=series.longest, block_size=BLOCK_SIZE, seed=seed, adapters=series.adapters
    )
    engine = start(model, enable_prefix_caching=False, **changes)
    answers = answer_alone(engine, questions)
    engine.close()
    return questions, answers


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", SERIES)
def test_requests_of_random_mixes_equal_each_alone(
    name: str, seed: int, folders: Callable[[str], Path], request: pytest.FixtureRequest
) -> None:
    series = SERIES[name]
    if series.path == "compiled" and isinstance(native_library(), NativeUnavailable):
        pytest.skip("no compiled operators here")
    model = folders(series.model)
    changes = dict(series.changes)
    numerics: dict[str, Any] = {key: changes[key] for key in ("dtype", "kv_cache_dtype") if key in changes}
    if series.adapters != ("",):
        numerics["adapters"] = changes["adapters"] = request.getfixturevalue("adapters")
    if series.drafts:
        changes |= drafts_of(series.drafts, model)
    tally = Tally()
    start_context, serve_context = PATHS[series.path]
    with start_context():
        questions, answers = asked_alone(series, model, numerics, seed)
        engine = start(model, **changes)
        assert engine._runner.model.is_compiled == (series.path in ("compiled", "device") and series.model != "gemma3")
        with serve_context():
            for number in range(1, series.mixes + 1):
                run_mix(
                    engine,
                    questions,
                    answers,
                    seed * 100_000 + number,
                    tally,
                    tolerance=series.tolerance,
                    budgets=series.budgets,
                    most=series.most,
                )
        engine.close()
    assert tally.defects == []
    assert tally.near_ties <= tally.tokens / 200
    assert tally.cached_tokens > (series.longest // 4 * series.mixes if series.path != "interpreter" else 0)
    for what in series.expects:
        assert (tally.preempted[what] if what in ("recompute", "swap") else getattr(tally, what)) > 0, what

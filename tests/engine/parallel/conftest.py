"""Tiny random checkpoints, dense and mixtures, with windows and without, and engines on them of any layout."""

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from four_bit_checkpoint import Recipe, quantise
from safetensors.torch import save_file
from scaled_checkpoint import ScaledRecipe, store, store_in_mxfp4
from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.core.engine import Engine
from trimtab_engine.core.startup import start_engine
from trimtab_engine.engine_client.client import CoreClient
from trimtab_engine.engine_client.launcher import CoreLauncher
from trimtab_engine.messages.admin import AdminReply, Call
from trimtab_engine.messages.requests import AddRequest, StepStats
from trimtab_engine.models.checkpoint import expected_shapes
from trimtab_engine.models.registry import parse_model_config
from trimtab_engine.scheduling.sampling import Sampling

DEADLINE_SECONDS = 180.0  # generous: several processes each load torch, perhaps on a busy machine
VOCABULARY = 97  # odd, so that the vocabulary's parts differ
DENSE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "eos_token_id": 96,
    "attention_bias": True,
    "mlp_bias": True,
}
MIXTURE = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 12,
    "num_key_value_heads": 1,  # fewer than tensor-parallel ranks: replicated
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "attention_bias": False,
    "tie_word_embeddings": False,
}


WINDOWS: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "eos_token_id": 96,
    "query_pre_attn_scalar": 12,
    "sliding_window": 13,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
}
"""Four KV groups."""
SINKS = MIXTURE | {
    "architectures": ["GptOssForCausalLM"],
    "num_hidden_layers": 4,
    "num_local_experts": 6,
    "intermediate_size": 24,
    "attention_bias": True,
    "sliding_window": 13,
}
"""Two KV groups."""
CHUNKS = {key: value for key, value in MIXTURE.items() if key != "num_experts"} | {
    "architectures": ["Llama4ForCausalLM"],
    "num_hidden_layers": 4,
    "num_local_experts": 6,
    "interleave_moe_layer_step": 2,
    "intermediate_size": 24,
    "intermediate_size_mlp": 80,
    "attention_chunk_size": 13,
    "no_rope_layers": [1, 1, 0, 1],
    "floor_scale": 16,
    "attn_scale": 0.5,
}
"""Four KV groups."""
LATENT = {key: value for key, value in MIXTURE.items() if key not in ("num_experts", "head_dim", "norm_topk_prob")} | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "n_group": 3,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
"""One KV group of latent vectors, equal on all tensor-parallel ranks."""
AWQ = DENSE | {
    "hidden_size": 64,
    "intermediate_size": 192,
    "tie_word_embeddings": False,
    "quantization_config": Recipe("awq").config,
}
"""Blocks of 32, so that each of two tensor-parallel ranks has whole blocks."""
GPTQ = MIXTURE | {"hidden_size": 64, "head_dim": 16, "quantization_config": Recipe("gptq", group_size=16).config}
"""Restored as it loads, experts and all."""
ORDERED = Recipe("gptq", is_symmetric=True, is_ordered=True)
"""No rank's part of an output or down projection has whole groups: restored there."""
INT: dict[str, Any] = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32}
FP8 = ScaledRecipe("float-quantized", {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"})
W4A16 = ScaledRecipe("pack-quantized", INT, ("lm_head", "re:.*mlp.gate$"), None)
MXFP4 = SINKS | {"hidden_size": 64, "intermediate_size": 64, "quantization_config": {"quant_method": "mxfp4"}}
"""Each of two ranks has one block of the 64 inputs of a down projection."""
SKEWED = MIXTURE | {"num_experts": 8}
"""Experts 0 to 3 get nearly all tokens: initially those of the first of two ranks."""


def skew(tensors: dict[str, torch.Tensor]) -> None:
    """Two strong directions, an expert at either end of both: every token is far along each."""
    for name, router in tensors.items():
        if name.endswith("mlp.gate.weight"):
            router[1], router[3] = -router[0], -router[2]
            router[:4] *= 8


def in_four_bits(recipe: Recipe) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        quantise(tensors, recipe)

    return change


def with_scales(recipe: ScaledRecipe) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        store(tensors, recipe)

    return change


def a_checkpoint(
    folder: Path, config: dict[str, Any], change: Callable[[dict[str, torch.Tensor]], None] = lambda tensors: None
) -> str:
    """Random weights of the size that random activations keep; norms and biases are random too."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for name, shape in expected_shapes(parse_model_config(config, {}, "config.json")).items():
        noise = torch.randn(shape, generator=generator) * (0.3 if len(shape) > 1 else 0.1)
        tensors[name] = noise + 1.0 if "norm" in name else noise
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


@pytest.fixture(scope="module")
def expected() -> dict[str, dict[str, list[int]]]:
    """Return one rank's output by CPU steps, per model; filled by the first test of each module."""
    return {}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "dense": a_checkpoint(folder / "dense", DENSE),
        "moe": a_checkpoint(folder / "moe", MIXTURE),
        "windows": a_checkpoint(folder / "windows", WINDOWS),
        "sinks": a_checkpoint(folder / "sinks", SINKS),
        "chunks": a_checkpoint(folder / "chunks", CHUNKS),
        "latent": a_checkpoint(folder / "latent", LATENT),
        "awq": a_checkpoint(folder / "awq", AWQ, in_four_bits(Recipe("awq"))),
        "gptq": a_checkpoint(folder / "gptq", GPTQ, in_four_bits(Recipe("gptq", group_size=16))),
        "ordered": a_checkpoint(
            folder / "ordered", AWQ | {"quantization_config": ORDERED.config}, in_four_bits(ORDERED)
        ),
        "fp8": a_checkpoint(folder / "fp8", AWQ | {"quantization_config": FP8.config}, with_scales(FP8)),
        "w4a16": a_checkpoint(
            folder / "w4a16",
            GPTQ | {"moe_intermediate_size": 64, "quantization_config": W4A16.config},
            with_scales(W4A16),
        ),
        "mxfp4": a_checkpoint(folder / "mxfp4", MXFP4, store_in_mxfp4),
        "skewed": a_checkpoint(folder / "skewed", SKEWED, skew),
    }


def a_config(model: str, **changes: Any) -> EngineConfig:
    values: dict[str, Any] = {
        "model": model,
        "device_memory_bytes": 4 << 30,
        "cpu_threads": 1,
        "max_model_len": 96,
        "block_size": 8,
        "num_gpu_blocks_override": 64,
        "max_num_seqs": 8,
        "max_num_seqs_cap": 8,
        "max_num_batched_tokens": 64,
        "max_num_batched_tokens_cap": 64,
    }
    return EngineConfig(**values | changes)


TIGHT = {"num_gpu_blocks_override": 13, "max_num_batched_tokens": 24}
"""Blocks for little more than one request, and chunks of a few tokens: requests are preempted and chunked."""


@pytest.fixture
def tight() -> dict[str, Any]:
    return TIGHT


@pytest.fixture
def config_of() -> Callable[..., EngineConfig]:
    return a_config


@pytest.fixture
def start() -> Iterator[Callable[..., Engine]]:
    """Yield a starter of engines with a frozen clock; engines left open are closed."""
    engines: list[Engine] = []

    def start_one(model: str, *, on_rank_death: Any = None, **changes: Any) -> Engine:
        engine, _ = start_engine(a_config(model, **changes), lambda stage, percent: None, lambda: 0.0, on_rank_death)
        engines.append(engine)
        return engine

    yield start_one
    for engine in engines:
        engine.close()


class Cores:
    """Running cores, and the statistics of their steps."""

    def __init__(self, config: EngineConfig) -> None:
        self.steps: list[StepStats] = []
        self._launcher = CoreLauncher(config)
        self._client = CoreClient(self._launcher.addresses[0], on_step=self.steps.append)

    async def __aenter__(self) -> "Cores":
        self._client.open()
        await self._launcher.start(self._client)
        await asyncio.wait_for(self._client.loaded.wait(), DEADLINE_SECONDS)
        assert self._client.failure is None, self._client.failure
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._launcher.close(self._client)

    async def call(self, call: Call) -> AdminReply:
        return await self._client.call(call)

    async def serve(self, asked: list[AddRequest]) -> dict[str, list[int]]:
        """The tokens of every request, all together."""

        async def tokens_of(request: AddRequest) -> list[int]:
            outputs = self._client.generate(msgspec.structs.replace(request))
            return [token async for output in outputs for token in output.token_ids]

        answers = await asyncio.wait_for(asyncio.gather(*(tokens_of(r) for r in asked)), DEADLINE_SECONDS)
        return {request.request_id: tokens for request, tokens in zip(asked, answers, strict=True)}


def requests(count: int = 12, output: int = 12) -> list[AddRequest]:
    """Prompts of many lengths; the later ones begin as the earlier do, so that a prefix cache has something to find."""
    generator = torch.Generator().manual_seed(11)
    shared = torch.randint(0, VOCABULARY, (24,), generator=generator).tolist()
    made = []
    for number in range(count):
        own = torch.randint(0, VOCABULARY, (1 + 5 * (number % 7),), generator=generator).tolist()
        prompt = (shared if number % 2 else []) + own
        sampling = Sampling(max_tokens=output, temperature=0.0, ignore_eos=True)
        made.append(AddRequest(f"r{number}", prompt, sampling, 0.0))
    return made


def serve(
    engine: Engine,
    asked: list[AddRequest],
    steps: list[StepStats] | None = None,
    ends: tuple[str, ...] = ("length",),
) -> dict[str, list[int]]:
    """The tokens of every request, all together; the invariants hold after every step. `steps` gets each one's, `ends`
    are the finish reasons that are meant to be.
    """
    tokens: dict[str, list[int]] = {request.request_id: [] for request in asked}
    for request in asked:
        engine.add(request)
    while engine.has_work or engine.is_building:
        step = engine.step()
        if steps is not None:
            steps.append(step.stats)
        for output in step.outputs:
            assert output.finish_reason in (None, *ends)
            tokens[output.request_id] += output.token_ids
        engine.check_integrity()
    return tokens


def check_disturbed(steps: list[StepStats], asked: list[AddRequest]) -> None:
    """Fail unless requests were preempted, cut into chunks and given cached prefixes, as the test means them to be."""
    assert any(stats.preempted for stats in steps), "the test is to preempt"
    assert sum(stats.prefix_cache_hits for stats in steps) > 0, "the test is to find prefixes"
    own = [len(request.prompt_token_ids) for number, request in enumerate(asked) if number % 2 == 0]
    assert max(own) > steps[0].token_budget, "a prompt that shares nothing is to need two chunks or more"


@pytest.fixture
def serving() -> Any:
    """(serve, requests, check_disturbed), which a test module cannot import from here."""
    return serve, requests, check_disturbed


@pytest.fixture
def cores_of() -> type[Cores]:
    """Cores, which a test module cannot import from here either."""
    return Cores

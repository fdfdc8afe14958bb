"""A KV cache of another dtype than the model: how far its answers are from the model's own, and that nothing else
changes them. float8 rounds each key and value to 3 bits (e4m3) or 2 (e5m2): relative errors of up to 2^-4 and 2^-3.
"""

import json
from pathlib import Path
from typing import Any

import engine_builders
import pytest
import torch
from safetensors.torch import save_file
from served import serve
from trimtab_engine.core.engine import Engine
from trimtab_engine.errors import ModelError
from trimtab_engine.messages.requests import AddRequest
from trimtab_engine.models.checkpoint import expected_shapes
from trimtab_engine.models.registry import parse_model_config
from trimtab_engine.scheduling.sampling import Sampling
from trimtab_engine.weights.dummy import DummySource

TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "torch_dtype": "float32",
    "tie_word_embeddings": True,
}
ROUNDING = {"fp8_e4m3": 2**-4, "fp8_e5m2": 2**-3, "bfloat16": 2**-9}
"""The largest relative error of one stored value."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder


def an_engine(model: Path, kv_cache_dtype: str, **changes: Any) -> Engine:
    settings = {"num_gpu_blocks_override": 200, "max_num_batched_tokens_cap": 256, **changes}
    return engine_builders.an_engine(model, kv_cache_dtype=kv_cache_dtype, **settings)


def requests(num_tokens: int = 16) -> list[AddRequest]:
    params = Sampling(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    return [
        AddRequest(f"r{n}", [(7 * n + 3 * i) % 127 for i in range(20 + 17 * n)], params, arrival_time=0.0)
        for n in range(6)
    ]


def run(engine: Engine) -> dict[str, list[int]]:
    return serve(engine, requests()).tokens


def prompt_logprobs(model: Path, kv_cache_dtype: str, **changes: Any) -> torch.Tensor:
    """Return those of a long prompt, computed in chunks of 32 that read the cache."""
    engine = an_engine(model, kv_cache_dtype, max_num_batched_tokens=32, **changes)
    params = Sampling(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    engine.add(AddRequest("r", [(5 * i) % 127 for i in range(200)], params, arrival_time=0.0))
    while engine.has_work:
        for output in engine.step().outputs:
            scores = output.prompt_logprobs
    assert scores is not None
    return torch.tensor([score.logprobs[0] for score in scores if score is not None])


@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", "fp8_e5m2", "bfloat16"])
def test_answers_are_within_the_rounding_of_the_cache(model: Path, kv_cache_dtype: str) -> None:
    expected = prompt_logprobs(model, "float32")
    error = (prompt_logprobs(model, kv_cache_dtype) - expected).abs().max()
    # Attention averages values, so its relative error is at most one value's, and it is a part of the hidden states:
    # log-probabilities, of order 1 here, stay within one rounding; an error of nothing would mean nothing was rounded.
    assert ROUNDING[kv_cache_dtype] / 64 < error < ROUNDING[kv_cache_dtype]


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_e5m2"])
def test_neither_chunks_nor_batches_nor_preemption_nor_swap_change_a_token(model: Path, kv_cache_dtype: str) -> None:
    expected = run(an_engine(model, kv_cache_dtype, max_num_batched_tokens=256))
    assert run(an_engine(model, kv_cache_dtype, max_num_batched_tokens=19)) == expected
    assert run(an_engine(model, kv_cache_dtype, num_gpu_blocks_override=34)) == expected
    swap = {"preemption_mode": "swap", "swap_space_bytes": 1 << 20, "swap_space_bytes_cap": 1 << 20}
    assert run(an_engine(model, kv_cache_dtype, num_gpu_blocks_override=34, **swap)) == expected


def test_the_formula_the_ledger_and_the_plan_count_a_byte_per_value(model: Path) -> None:
    wide, narrow = an_engine(model, "float32").ledger(), an_engine(model, "fp8")
    assert narrow.ledger().bytes_per_block * 4 == wide.bytes_per_block == 2 * 3 * 8 * 2 * 16 * 4
    assert narrow.config()["envelope"]["kv_cache_dtype"] == "fp8_e4m3"
    status, planned = narrow.memory_plan({"kv_cache_dtype": "fp8"})
    assert (status, planned["bytes_per_block"]) == (200, narrow.ledger().bytes_per_block)


def a_checkpoint(folder: Path, scales: dict[str, float]) -> Path:
    """The tiny model as safetensors, with keys and values that float8 could not hold unscaled."""
    (folder / "config.json").write_text(json.dumps(TINY))
    config = parse_model_config(TINY, {}, "config.json")
    source = DummySource(folder, 0)
    source.expect(expected_shapes(config))
    weights = {name: source.tensor(name).clone() for name in source.shapes()}
    for layer in range(3):
        prefix = f"model.layers.{layer}.self_attn."
        weights[prefix + "v_proj.weight"] *= 3000.0  # values of some hundreds to thousands
        weights[prefix + "o_proj.weight"] /= 3000.0
        weights |= {prefix + name: torch.tensor(scale) for name, scale in scales.items()}
    save_file(weights, folder / "model.safetensors")
    return folder


def test_a_checkpoints_scales_keep_large_values_inside_the_format(tmp_path: Path) -> None:
    bare, scaled = tmp_path / "bare", tmp_path / "scaled"
    bare.mkdir()
    scaled.mkdir()
    a_checkpoint(bare, {})
    a_checkpoint(scaled, {"k_scale": 1.0, "v_scale": 32.0})
    expected = prompt_logprobs(bare, "float32", load_format="auto")
    clamped = (prompt_logprobs(bare, "fp8", load_format="auto") - expected).abs().mean()
    held = (prompt_logprobs(scaled, "fp8", load_format="auto") - expected).abs().mean()
    assert held < clamped / 2
    assert torch.equal(prompt_logprobs(scaled, "float32", load_format="auto"), expected), "other caches ignore them"


def test_a_scale_that_is_no_positive_number_is_refused(tmp_path: Path) -> None:
    a_checkpoint(tmp_path, {"v_scale": 0.0})
    with pytest.raises(ModelError, match=r"v_scale is \[0.0\]; one number above 0 is needed"):
        an_engine(tmp_path, "fp8", load_format="auto")

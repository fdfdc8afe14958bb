"""Llama against transformers on tiny random checkpoints: every variant of the architecture, single requests, batches,
chunks.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_benchmarks.parity import compare, greedy_generator, load_runner, reference_tokens
from transformers import LlamaConfig
from transformers import LlamaForCausalLM as Reference
from trimtab_engine.errors import ModelError
from trimtab_engine.layers import linear
from trimtab_engine.layers.linear import Linear
from trimtab_engine.models.facts import model_facts
from trimtab_kernels.launch import jit
from trimtab_kernels.skinny_gemm import skinny_gemm_triton

VOCABULARY = 257
PROMPT_LENGTHS = (1, 2, 7, 16, 31, 40)
NUM_TOKENS = 12
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
VARIANTS: dict[str, dict[str, Any]] = {
    "grouped queries": {"num_attention_heads": 6, "num_key_value_heads": 2},
    "one kv head per query head": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "one kv head for all": {"num_attention_heads": 4, "num_key_value_heads": 1},
    "tied embeddings": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "rope scaling llama3": {"rope_parameters": LLAMA3},
    "rope scaling linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    "rope scaling dynamic": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
    "rope scaling yarn": {"rope_parameters": YARN},
    "odd sizes": {"hidden_size": 39, "intermediate_size": 71, "num_attention_heads": 3, "num_key_value_heads": 1,
                  "head_dim": 10, "num_hidden_layers": 3},
}  # fmt: skip


def a_checkpoint(folder: Path, **changes: Any) -> Any:
    """A random model, its biases and norms random too, saved as safetensors."""
    values: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
        "dtype": "float32",
        **changes,
    }
    torch.manual_seed(0)
    model: Any = Reference(LlamaConfig(**values))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.3 if parameter.dim() > 1 else 0.1
            parameter.normal_(1.0 if "norm" in name else 0.0, spread)
    model.save_pretrained(folder)
    return model


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, VOCABULARY, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
def test_greedy_tokens_equal_transformers(variant: dict[str, Any], tmp_path: Path) -> None:
    reference = a_checkpoint(tmp_path, **variant)
    references = reference_tokens(reference, prompts(), NUM_TOKENS)
    runner = load_runner(str(tmp_path), block_size=8, num_blocks=64)
    for chunk, batch in ((None, 1), (None, 6), (3, 6), (1, 2)):
        parity = compare(references, greedy_generator(runner, block_size=8, chunk=chunk, batch=batch))
        assert parity.defects == []
        assert parity.near_ties <= 1


def test_stored_output_layer_is_used_despite_tied_config(tmp_path: Path) -> None:
    reference = a_checkpoint(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": True}))
    runner = load_runner(str(tmp_path), block_size=8, num_blocks=64)
    references = reference_tokens(reference, prompts(), NUM_TOKENS)
    assert compare(references, greedy_generator(runner, block_size=8, chunk=None, batch=6)).defects == []
    assert model_facts(str(tmp_path))["tie_word_embeddings"] is False


def test_logits_equal_transformers_at_every_position(tmp_path: Path) -> None:
    """Chunks of one token give the logits of each position; transformers gives them all at once."""
    from trimtab_engine.scheduling.batch import ScheduledSequence
    from trimtab_engine.scheduling.request import Request
    from trimtab_engine.scheduling.sampling import Sampling

    reference = a_checkpoint(tmp_path)
    prompt = prompts()[-1]
    runner = load_runner(str(tmp_path), block_size=8, num_blocks=8)
    request = Request.of("r", prompt, Sampling(), arrival_time=0.0)
    request.block_tables[0] = [7, 2, 5, 0, 1]
    rows = [runner.execute([ScheduledSequence(request, i, 1, samples=True)]) for i in range(len(prompt))]
    with torch.no_grad():
        expected = reference(torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(torch.cat(rows), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_close(dtype: str, tmp_path: Path) -> None:
    from trimtab_engine.config.engine import EngineConfig
    from trimtab_engine.device.device import Device
    from trimtab_engine.runner.loading import load_model_runner
    from trimtab_engine.runner.model_runner import ModelRunner
    from trimtab_engine.scheduling.batch import ScheduledSequence
    from trimtab_engine.scheduling.request import Request
    from trimtab_engine.scheduling.sampling import Sampling

    reference = a_checkpoint(tmp_path)
    config = EngineConfig(model=str(tmp_path), dtype=dtype)  # type: ignore[arg-type]
    runner = load_model_runner(ModelRunner, config, Device("cpu"), lambda stage, percent: None)
    runner.init_kv_cache(4)
    request = Request.of("r", prompts()[-1], Sampling(), arrival_time=0.0)
    request.block_tables[0] = [2, 0, 1]
    logits = runner.execute([ScheduledSequence(request, 0, 40, samples=True)])
    with torch.no_grad():
        expected = reference(torch.tensor([request.token_ids])).logits[0, -1:]
    error = (logits - expected).abs().max() / expected.abs().max()
    assert float(error) < 0.05


def test_config_with_absurd_layer_count_is_rejected_early(tmp_path: Path) -> None:
    a_checkpoint(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 10**12}))
    with pytest.raises(ModelError, match="implies 1000000000000 layers, but there are"):
        load_runner(str(tmp_path))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Run skinny matmuls for every projection; return the shapes used."""
    made: list[tuple[int, ...]] = []
    as_ever = Linear.__init__

    def keep(self: Any, weight: torch.Tensor, bias: torch.Tensor | None = None, *, is_gated: bool = False) -> None:
        as_ever(self, weight, bias, is_gated=is_gated)
        self.plain = weight.clone().contiguous()

    def of_few_rows(self: Any, x: torch.Tensor, **beside: Any) -> torch.Tensor:
        made.append(tuple(x.shape))
        return skinny_gemm_triton(x, self.plain, bias=self._bias, is_gated=self._is_gated, **beside)

    monkeypatch.setattr(linear, "library_for", lambda dtype, device: None)
    monkeypatch.setattr(Linear, "__init__", keep)
    monkeypatch.setattr(Linear, "joins_few_rows", property(lambda self: True))
    monkeypatch.setattr(Linear, "of_few_rows", of_few_rows)
    return made


@pytest.mark.parametrize("variant", ["grouped queries", "biases", "odd sizes"])
@pytest.mark.skipif(not jit.HAS_TRITON, reason="runs a Triton kernel in its interpreter")
def test_layers_whose_products_take_norms_and_sums_along_give_these_tokens_too(
    variant: str, launches: list[tuple[int, ...]], tmp_path: Path
) -> None:
    """Steps of few rows on CUDA take this way; here by the same kernel, in the interpreter."""
    reference = a_checkpoint(tmp_path, **VARIANTS[variant])
    references = reference_tokens(reference, prompts(), 3)
    runner = load_runner(str(tmp_path), block_size=8, num_blocks=64)
    parity = compare(references, greedy_generator(runner, block_size=8, chunk=None, batch=6))
    assert parity.defects == []
    assert parity.near_ties <= 1
    assert launches, "prompts are computed as ever, decodes by joined products"
    assert max(rows for rows, _ in launches) <= 16

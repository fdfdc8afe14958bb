"""Mistral against transformers on tiny random checkpoints, with and without a window: single requests, batches,
chunks.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_benchmarks.parity import compare, greedy_generator, load_runner, reference_tokens
from transformers import MistralConfig, MistralForCausalLM
from trimtab_engine.errors import ModelError
from trimtab_engine.models.registry import parse_model_config
from trimtab_engine.scheduling.batch import ScheduledSequence
from trimtab_engine.scheduling.request import Request
from trimtab_engine.scheduling.sampling import Sampling

VOCABULARY = 211
NUM_TOKENS = 64
PROMPTS = [[5], [5, 6, 7, 8, 9, 10, 11], list(range(20, 60))]
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "sliding_window": None,
    "eos_token_id": 2,
    "dtype": "float32",
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32
    },
}  # fmt: skip


def a_checkpoint(folder: Path, window: int | None) -> Any:
    """A random model with rope scaling and heads that are wider than their part of the hidden size."""
    torch.manual_seed(0)
    model: Any = MistralForCausalLM(MistralConfig(**SIZES | {"sliding_window": window}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3 if parameter.dim() > 1 else 0.1)
    model.save_pretrained(folder)
    return model


WINDOWS = pytest.mark.parametrize("window", [None, 13])


@WINDOWS
def test_64_greedy_tokens_equal_transformers(tmp_path: Path, window: int | None) -> None:
    references = reference_tokens(a_checkpoint(tmp_path, window), PROMPTS, NUM_TOKENS)
    runner = load_runner(str(tmp_path), block_size=8, num_blocks=64)
    for chunk, batch in ((None, 1), (None, 3), (3, 3)):
        parity = compare(references, greedy_generator(runner, block_size=8, chunk=chunk, batch=batch))
        assert parity.defects == []
        assert parity.near_ties <= 1


@WINDOWS
def test_logits_equal_transformers_at_every_position(tmp_path: Path, window: int | None) -> None:
    reference = a_checkpoint(tmp_path, window)
    runner = load_runner(str(tmp_path), block_size=8, num_blocks=8)
    request = Request.of("r", PROMPTS[-1], Sampling(), arrival_time=0.0)
    request.block_tables[0] = [7, 2, 5, 0, 1]
    steps = [ScheduledSequence(request, i, 1, samples=True) for i in range(len(PROMPTS[-1]))]
    logits = torch.cat([runner.execute([step]) for step in steps])
    with torch.no_grad():
        expected = reference(torch.tensor([PROMPTS[-1]])).logits[0]
    assert float((logits - expected).abs().max() / expected.abs().max()) <= 1e-4


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"sliding_window": 64}, (64, 64, 64)),
        ({"max_position_embeddings": 8192}, ()),  # explicit null: no window
        ({"sliding_window": 128}, ()),  # as long as the longest request: nothing ever leaves it
    ],
)
def test_a_window_that_a_request_can_leave_is_every_layers(changes: dict[str, Any], windows: tuple[int, ...]) -> None:
    config = SIZES | {"architectures": ["MistralForCausalLM"]} | changes
    assert parse_model_config(config, {}, "config.json").windows == windows


def test_a_window_that_is_not_said_is_the_one_that_transformers_reads() -> None:
    config = {key: value for key, value in SIZES.items() if key != "sliding_window"}
    config |= {"architectures": ["MistralForCausalLM"], "max_position_embeddings": 8192}
    assert parse_model_config(config, {}, "config.json").windows == (4096,) * 3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not supported"),
        ({"sliding_window": 0}, "sliding_window is 0; a positive whole number is needed"),
    ],
)
def test_config_unsupported_or_absurd_is_rejected(changes: dict[str, Any], words: str) -> None:
    config = SIZES | {"architectures": ["MistralForCausalLM"]} | changes
    with pytest.raises(ModelError, match=words):
        parse_model_config(config, {}, "config.json")

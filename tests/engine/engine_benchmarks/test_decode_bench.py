"""The limits of decode and prefill."""

import pytest
from engine_benchmarks.decode_bench import ahead, limit_tokens_per_second, prefill_flops
from engine_benchmarks.machine_bench import MachineRates
from trimtab_engine.models.checkpoint import num_parameters
from trimtab_engine.models.registry import parse_model_config
from trimtab_modelspec.config import ModelConfig


def a_config() -> ModelConfig:
    values = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 1000,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    }
    return parse_model_config(values, {}, "a test")


def test_decode_limit_is_bandwidth_for_one_row_and_slower_bound_for_many() -> None:
    config = a_config()
    weights = 4 * num_parameters(config)
    machine = MachineRates(2, 10.0, {1: 0.001, 8: 1.0, 32: 1e9}, {})
    assert limit_tokens_per_second(config, machine, 1) == pytest.approx(10e9 / weights)
    assert limit_tokens_per_second(config, machine, 8) == pytest.approx(1e9 / (2 * num_parameters(config)))
    assert limit_tokens_per_second(config, machine, 32) == pytest.approx(32 * 10e9 / weights)


def test_prefill_flops_count_gemms_causal_attention_and_one_logits_row() -> None:
    per_layer = (4 + 2 * 2) * 16 * 64 + 64 * 64 + 2 * 96 * 64 + 64 * 96
    pairs = 1 + 2 + 3
    assert prefill_flops(a_config(), 3) == 2 * (2 * per_layer * 3 + 4 * 4 * 16 * pairs) + 2 * 1000 * 64


def test_ahead_of_failed_contender_is_none() -> None:
    assert ahead({"trimtab": 6.0, "generate": 2.0}) == 3.0
    assert ahead({"trimtab": 6.0, "generate": None}) is None

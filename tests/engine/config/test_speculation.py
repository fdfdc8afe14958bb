"""--speculative-config: vLLM's names and defaults; other values are rejected by name."""

from typing import Any

import pytest
from trimtab_engine.config.speculation import SpeculativeConfig, parse_speculative_json, speculative_config
from trimtab_engine.errors import ConfigError, NotSupportedError


def test_ngram_default_lookup_is_five_tokens() -> None:
    assert speculative_config({"method": "ngram", "num_speculative_tokens": 4}) == SpeculativeConfig(
        method="ngram", num_speculative_tokens=4, prompt_lookup_min=5, prompt_lookup_max=5
    )


@pytest.mark.parametrize(
    ("given", "low", "high"),
    [
        ({"prompt_lookup_min": 2}, 2, 2),
        ({"prompt_lookup_max": 3}, 3, 3),
        ({"prompt_lookup_min": 2, "prompt_lookup_max": 4}, 2, 4),
    ],
)
def test_single_lookup_length_sets_both(given: dict[str, int], low: int, high: int) -> None:
    config = speculative_config({"method": "ngram", "num_speculative_tokens": 4, **given})
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == (low, high)


@pytest.mark.parametrize(
    ("given", "method", "model"),
    [({"model": "/models/small"}, "draft_model", "/models/small"), ({"model": "ngram"}, "ngram", None)],
)
def test_the_method_follows_from_the_model(given: dict[str, str], method: str, model: str | None) -> None:
    config = speculative_config({"num_speculative_tokens": 2, **given})
    assert (config.method, config.model) == (method, model)


@pytest.mark.parametrize("method", ["mtp", "deepseek_mtp"])
def test_mtp_default_is_one_draft(method: str) -> None:
    assert speculative_config({"method": method}) == SpeculativeConfig(method="mtp", num_speculative_tokens=1)
    assert speculative_config({"method": method, "num_speculative_tokens": 3}).num_speculative_tokens == 3


@pytest.mark.parametrize("method", ["eagle3", "qwen3_next_mtp", "suffix", "medusa"])
def test_methods_that_are_not_built_are_refused_by_name(method: str) -> None:
    with pytest.raises(NotSupportedError, match=f"method {method} is not supported; supported are ngram, draft_model"):
        speculative_config({"method": method, "num_speculative_tokens": 2})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"method": "ngram"}, "num_speculative_tokens is missing"),
        ({"num_speculative_tokens": 2}, "method is missing"),
        ({"method": "magic", "num_speculative_tokens": 2}, "there is no method 'magic'"),
        ({"method": "draft_model", "num_speculative_tokens": 2}, "needs model"),
        ({"method": "eagle", "num_speculative_tokens": 2}, "needs model, the folder of a head"),
        ({"method": "mtp", "model": "/m"}, "method mtp takes no model, but model is /m; leave it out"),
        ({"method": "ngram", "model": "/m", "num_speculative_tokens": 2}, "leave it out"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "it must be 1 to 128"),
        ({"method": "ngram", "num_speculative_tokens": 129}, "it must be 1 to 128"),
        ({"method": "ngram", "num_speculative_tokens": "many"}, "Expected `int`"),
        ({"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 3, "prompt_lookup_max": 2}, "above"),
        ({"method": "ngram", "num_speculative_tokens": 2, "draft_tensor_parallel_size": 2}, "tensor_parallel_size 2"),
        ({"method": "ngram", "num_speculative_tokens": 2, "rejection_sample_method": "synthetic"}, "'synthetic'"),
        ({"method": "ngram", "num_speculative_tokens": 2, "speculative_token_tree": "[]"}, "tree is not supported"),
    ],
)
def test_invalid_speculation_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        speculative_config(values)


def test_fields_with_builtin_behavior_are_accepted() -> None:
    speculative_config(
        {"method": "ngram", "num_speculative_tokens": 2, "draft_tensor_parallel_size": 1, "quantization": None}
    )


@pytest.mark.parametrize("text", ["ngram", "[1]", "{", "3"])
def test_text_that_is_no_json_object_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r'\{"method": "ngram", "num_speculative_tokens": 4\}'):
        parse_speculative_json(text)

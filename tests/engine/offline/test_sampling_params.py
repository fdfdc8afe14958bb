"""SamplingParams: vLLM's names, with the validation of the HTTP API."""

from pathlib import Path
from typing import Any

import pytest
from trimtab_engine import SamplingParams
from trimtab_engine.errors import InvalidRequest
from trimtab_engine.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return Tokenizer(str(tokenizer_folder))


def test_max_tokens_none_is_as_much_as_fits(tokenizer: Tokenizer) -> None:
    assert [of.max_tokens for of in SamplingParams(max_tokens=None).sampling_per_choice(37, tokenizer)] == [37]
    assert [of.max_tokens for of in SamplingParams(max_tokens=99).sampling_per_choice(37, tokenizer)] == [37]


def test_choices_of_one_prompt_have_different_seeds(tokenizer: Tokenizer) -> None:
    assert [of.seed for of in SamplingParams(n=3, seed=7).sampling_per_choice(8, tokenizer)] == [7, 8, 9]


def test_integers_are_accepted_for_floats(tokenizer: Tokenizer) -> None:
    (sampling,) = SamplingParams(temperature=0, top_p=1, repetition_penalty=1).sampling_per_choice(8, tokenizer)
    assert (sampling.temperature, sampling.top_p) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"n": 0}, "n"),
        ({"max_tokens": 4, "min_tokens": 5}, "min_tokens"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"logprobs": -1}, "logprobs"),
        ({"best_of": 4}, "best_of is supported only as 1"),
        ({"bad_words": [""]}, "bad_words"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "exactly one of"),
        ({"stop": "x", "detokenize": False}, "stop requires text"),
    ],
)
def test_invalid_value_is_rejected_by_name(values: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        SamplingParams(**values)


def test_min_tokens_beyond_context_is_rejected(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="only 3 tokens"):
        SamplingParams(max_tokens=None, min_tokens=4).sampling_per_choice(3, tokenizer)


def test_bad_words_are_tokenized_at_start_and_after_space(tokenizer: Tokenizer) -> None:
    (sampling,) = SamplingParams(bad_words=["ab"]).sampling_per_choice(8, tokenizer)
    assert sampling.bad_words == (tuple(b"ab"), tuple(b" ab"))


def test_structured_outputs_become_a_grammar(tokenizer: Tokenizer) -> None:
    (sampling,) = SamplingParams(structured_outputs={"regex": "[0-9]+"}).sampling_per_choice(8, tokenizer)
    assert sampling.grammar is not None
    assert "[0-9]+" in sampling.grammar

"""Construction of one choice: text, stop strings, finish reasons, log-probabilities."""

from pathlib import Path
from typing import Any

import pytest
from trimtab_engine.messages.requests import SequenceOutput
from trimtab_engine.offline.outputs import Choice
from trimtab_engine.offline.sampling_params import SamplingParams
from trimtab_engine.scheduling.sampling import TokenLogprobs
from trimtab_engine.text.tokenizer import Tokenizer

END = 256


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return Tokenizer(str(tokenizer_folder))


def make_choice(tokenizer: Tokenizer, **params: Any) -> Choice:
    return Choice(0, SamplingParams(**params), params.get("min_tokens", 0), tokenizer, arrival_time=0.0)


def feed(choice: Choice, text: str, *, finish: str | None = None, **output: Any) -> list[bool]:
    """Run one step per byte of `text`, until a stop string ends it; the last step has `finish`."""
    results = []
    data = text.encode()
    for position, byte in enumerate(data):
        last = position == len(data) - 1
        message = SequenceOutput("0-0", [byte], finish if last else None, **output)
        results.append(choice.take(message, now=float(position)))
        if choice.finish_reason is not None:
            break
    return results


def test_text_and_finish_reason_at_max_length(tokenizer: Tokenizer) -> None:
    choice = make_choice(tokenizer)
    feed(choice, "grüße", finish="length")
    output = choice.output()
    assert (output.text, output.finish_reason, output.stop_reason) == ("grüße", "length", None)
    assert output.token_ids == list("grüße".encode())


def test_end_token_counts_without_text(tokenizer: Tokenizer) -> None:
    choice = make_choice(tokenizer)
    feed(choice, "ab")
    choice.take(SequenceOutput("0-0", [END], "stop"), now=9.0)
    assert (choice.output().text, choice.output().token_ids) == ("ab", [97, 98, END])


def test_stop_string_ends_text_and_engine_is_notified(tokenizer: Tokenizer) -> None:
    choice = make_choice(tokenizer, stop=["xy"])
    assert feed(choice, "abxyz") == [False, False, False, True]
    output = choice.output()
    assert (output.text, output.finish_reason, output.stop_reason) == ("ab", "stop", "xy")
    assert len(output.token_ids) == 4


def test_stop_string_in_last_token_needs_no_abort(tokenizer: Tokenizer) -> None:
    choice = make_choice(tokenizer, stop="xy", include_stop_str_in_output=True)
    assert feed(choice, "axy", finish="length") == [False, False, False]
    assert (choice.output().text, choice.output().finish_reason) == ("axy", "stop")


def test_tokens_after_stop_string_in_same_step_are_dropped(tokenizer: Tokenizer) -> None:
    choice = make_choice(tokenizer, stop="b", logprobs=0)
    positions = [TokenLogprobs([token], [-1.0], 1) for token in b"abcd"]
    assert choice.take(SequenceOutput("0-0", list(b"abcd"), None, logprobs=positions), now=0.0)
    output = choice.output()
    assert (output.text, output.token_ids, output.cumulative_logprob) == ("a", list(b"ab"), -2.0)


def test_stop_strings_are_ignored_below_min_tokens(tokenizer: Tokenizer) -> None:
    choice = make_choice(tokenizer, stop="a", min_tokens=2)
    feed(choice, "aaba", finish="length")
    assert choice.output().text == "aab"


def test_held_back_text_is_returned_at_the_end(tokenizer: Tokenizer) -> None:
    choice = make_choice(tokenizer, stop="xyz")
    feed(choice, "abxy", finish="length")
    assert choice.output().text == "abxy"


def test_detokenize_false_returns_only_tokens(tokenizer: Tokenizer) -> None:
    choice = make_choice(tokenizer, detokenize=False)
    feed(choice, "ab", finish="length")
    assert (choice.output().text, choice.output().token_ids) == ("", [97, 98])


def test_logprobs_are_summed_and_ranked(tokenizer: Tokenizer) -> None:
    choice = make_choice(tokenizer, logprobs=2)
    position = TokenLogprobs([99, 97, 98], [-3.0, -0.5, -1.5], 5)
    choice.take(SequenceOutput("0-0", [99], "length", logprobs=[position]), now=0.0)
    output = choice.output()
    assert output.cumulative_logprob == -3.0
    assert output.logprobs is not None
    assert {token: (entry.rank, entry.decoded_token) for token, entry in output.logprobs[0].items()} == {
        99: (5, "c"),
        97: (1, "a"),
        98: (2, "b"),
    }

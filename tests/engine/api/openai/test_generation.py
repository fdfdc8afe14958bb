"""Text from a step's tokens, of which there are several when drafts were accepted."""

from pathlib import Path

import pytest
from trimtab_engine.api.openai.generation import Piece, piece_of
from trimtab_engine.messages import SequenceOutput
from trimtab_engine.scheduling.sampling import TokenLogprobs
from trimtab_engine.text.stop_strings import StopStrings
from trimtab_engine.text.tokenizer import Detokenizer, Tokenizer

END_TOKEN = 256


@pytest.fixture
def detokenizer(tokenizer_folder: Path) -> Detokenizer:
    return Detokenizer(Tokenizer(str(tokenizer_folder)), skip_special_tokens=True)


def an_output(text: str, *more: int, reason: str | None = None) -> SequenceOutput:
    tokens = [*text.encode(), *more]
    logprobs = [TokenLogprobs([token], [-1.0], 1) for token in tokens]
    return SequenceOutput("r", tokens, reason, logprobs=logprobs)


def piece(output: SequenceOutput, detokenizer: Detokenizer, *stop: str, num_unarmed: int = 0) -> Piece:
    watcher = StopStrings(stop, include=False)
    return piece_of(output, detokenizer, watcher, index=0, num_unarmed=num_unarmed)


def test_all_tokens_of_a_step_are_text(detokenizer: Detokenizer) -> None:
    result = piece(an_output("abc"), detokenizer)
    assert (result.text, result.num_tokens, len(result.logprobs), result.finish_reason) == ("abc", 3, 3, None)


def test_only_the_token_that_ends_a_sequence_is_no_text(detokenizer: Detokenizer) -> None:
    result = piece(an_output("abc", END_TOKEN, reason="stop"), detokenizer)
    assert (result.text, result.num_tokens, result.finish_reason) == ("abc", 4, "stop")


def test_tokens_behind_a_stop_string_are_dropped(detokenizer: Detokenizer) -> None:
    result = piece(an_output("abcde"), detokenizer, "c")
    assert (result.text, result.num_tokens, len(result.logprobs)) == ("ab", 3, 3)
    assert (result.finish_reason, result.stop_reason) == ("stop", "c")


def test_no_stop_string_is_looked_for_below_min_tokens(detokenizer: Detokenizer) -> None:
    result = piece(an_output("abcabc"), detokenizer, "b", num_unarmed=3)
    assert (result.text, result.num_tokens, result.stop_reason) == ("abca", 5, "b")

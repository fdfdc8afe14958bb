"""Text from a step's tokens, of which there are several when drafts were accepted."""

from pathlib import Path

import pytest
from trimtab_engine.api.metrics.observations import FinishedSequence
from trimtab_engine.api.openai.generation import GenerationPlan, Piece, SequenceClock, piece_of
from trimtab_engine.messages import SequenceOutput
from trimtab_engine.scheduling.sampling import Sampling, TokenLogprobs
from trimtab_engine.text.stream import TextStream
from trimtab_engine.text.tokenizer import Tokenizer

END_TOKEN = 256


@pytest.fixture
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return Tokenizer(str(tokenizer_folder))


def an_output(text: str, *more: int, reason: str | None = None) -> SequenceOutput:
    tokens = [*text.encode(), *more]
    logprobs = [TokenLogprobs([token], [-1.0], 1) for token in tokens]
    return SequenceOutput("r", tokens, reason, logprobs=logprobs)


def piece(output: SequenceOutput, tokenizer: Tokenizer, *stop: str, num_unarmed: int = 0) -> Piece:
    stream = TextStream(tokenizer, skip_special_tokens=True, stop=stop, min_tokens=num_unarmed)
    return piece_of(output, stream, index=0)


def test_all_tokens_of_a_step_are_text(tokenizer: Tokenizer) -> None:
    result = piece(an_output("abc"), tokenizer)
    assert (result.text, result.num_tokens, len(result.logprobs), result.finish_reason) == ("abc", 3, 3, None)


def test_only_the_token_that_ends_a_sequence_is_no_text(tokenizer: Tokenizer) -> None:
    result = piece(an_output("abc", END_TOKEN, reason="stop"), tokenizer)
    assert (result.text, result.num_tokens, result.finish_reason) == ("abc", 4, "stop")


def test_tokens_behind_a_stop_string_are_dropped(tokenizer: Tokenizer) -> None:
    result = piece(an_output("abcde"), tokenizer, "c")
    assert (result.text, result.num_tokens, len(result.logprobs)) == ("ab", 3, 3)
    assert (result.finish_reason, result.stop_reason) == ("stop", "c")


def test_no_stop_string_is_looked_for_below_min_tokens(tokenizer: Tokenizer) -> None:
    result = piece(an_output("abcabc"), tokenizer, "b", num_unarmed=3)
    assert (result.text, result.num_tokens, result.stop_reason) == ("abca", 5, "b")


class Seen:
    """An Observer that keeps what it is told."""

    def __init__(self) -> None:
        self.first_tokens: list[float] = []
        self.next_tokens: list[float] = []
        self.lives: list[FinishedSequence] = []

    def first_token(self, seconds: float, engine: int) -> None:
        self.first_tokens.append(seconds)

    def next_token(self, seconds: float, engine: int) -> None:
        self.next_tokens.append(seconds)

    def finished(self, life: FinishedSequence) -> None:
        self.lives.append(life)

    def request_finished(self, n: int, max_num_generation_tokens: int, engine: int) -> None:
        raise AssertionError("a sequence is no request")

    def rejected(self, reason: str) -> None:
        raise AssertionError("nothing is rejected")

    def media_looked_up(self, queries: int, hits: int) -> None:
        raise AssertionError("there are no images")


def a_plan() -> GenerationPlan:
    return GenerationPlan("r", [[1, 2]], [Sampling(max_tokens=9)], [], False, True, arrival_time=100.0)


def test_latencies_are_the_core_s_whenever_the_client_takes_its_answer() -> None:
    taken_at = iter([115.0, 130.0, 145.0, 160.0])
    seen = Seen()
    clock = SequenceClock(a_plan(), 0, seen, now=lambda: next(taken_at))
    clock.note(SequenceOutput("r", [5], first_scheduled_time=100.5, time=101.0))
    clock.note(SequenceOutput("r", [6], time=101.25))
    clock.note(SequenceOutput("r", [7], "stop", time=101.5))
    life = clock.finish("stop")
    assert (seen.first_tokens, seen.next_tokens) == ([1.0], [0.25, 0.25])
    assert (life.scheduled, life.first_token, life.last_token, life.end) == (100.5, 101.0, 101.5, 101.5)


def test_who_leaves_early_is_served_until_then() -> None:
    clock = SequenceClock(a_plan(), 0, Seen(), now=lambda: 103.0)
    clock.note(SequenceOutput("r", [5], first_scheduled_time=100.5, time=101.0))
    assert clock.finish("abort").end == 103.0

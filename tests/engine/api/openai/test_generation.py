"""Text from a step's tokens, of which there are several when drafts were accepted."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from trimtab_engine.api.metrics.observations import FinishedSequence
from trimtab_engine.api.openai.generation import GenerationPlan, Piece, SequenceClock, piece_of, piece_of_run
from trimtab_engine.engine_client.mailbox import PlainRun
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
        self.gaps: list[float] = []
        self.lives: list[FinishedSequence] = []

    def first_token(self, seconds: float, engine: int) -> None:
        self.first_tokens.append(seconds)

    def next_tokens(self, seconds: Sequence[float], engine: int) -> None:
        self.gaps += seconds

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
    assert (seen.first_tokens, seen.gaps) == ([1.0], [0.25, 0.25])
    assert (life.scheduled, life.first_token, life.last_token, life.end) == (100.5, 101.0, 101.5, 101.5)


def test_tokens_that_are_taken_together_have_the_times_of_their_steps() -> None:
    seen = Seen()
    clock = SequenceClock(a_plan(), 0, seen)
    clock.note(SequenceOutput("r", [5], first_scheduled_time=100.5, time=101.0))
    clock.note_run(PlainRun(0, [6, 7, 8], [101.25, 101.5, 103.0]), 2)
    life = clock.finish("stop")
    assert seen.gaps == [0.25, 0.25]
    assert (life.last_token, life.end, life.num_generation_tokens) == (101.5, 101.5, 3)


def test_a_run_of_tokens_is_cut_at_a_stop_string_and_split_into_its_tokens(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, skip_special_tokens=True, stop=["cd"])
    run = PlainRun(0, list(b"abcde"), [0.0] * 5)
    result = piece_of_run(run, stream, index=1)
    assert (result.text, result.num_tokens, result.finish_reason, result.stop_reason) == ("ab", 4, "stop", "cd")
    parts = [(p.index, p.text, p.num_tokens, p.token_ids, p.finish_reason) for p in result.split()]
    assert parts == [
        (1, "a", 1, [97], None),
        (1, "b", 1, [98], None),
        (1, "", 1, [99], None),
        (1, "", 1, [100], "stop"),
    ]


def test_the_texts_of_a_run_are_those_of_its_tokens_one_by_one(tokenizer: Tokenizer) -> None:
    tokens = list("aü🙂b".encode())
    one_by_one, together = (TextStream(tokenizer, skip_special_tokens=True) for _ in range(2))
    assert together.take_each(tokens) == [one_by_one.take([token], None).text for token in tokens]


def test_who_leaves_early_is_served_until_then() -> None:
    clock = SequenceClock(a_plan(), 0, Seen(), now=lambda: 103.0)
    clock.note(SequenceOutput("r", [5], first_scheduled_time=100.5, time=101.0))
    assert clock.finish("abort").end == 103.0

"""Text of a step's tokens; there are several with accepted drafts."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from trimtab_engine.api.metrics.observations import FinishedSequence
from trimtab_engine.api.openai.generation import GenerationPlan, Piece, SequenceClock, piece_of, piece_of_run
from trimtab_engine.engine_client.output_queue import PlainRun
from trimtab_engine.messages.requests import SequenceOutput
from trimtab_engine.scheduling.sampling import Sampling, TokenLogprobs
from trimtab_engine.text.stream import TextStream
from trimtab_engine.text.tokenizer import Tokenizer

END_TOKEN = 256


@pytest.fixture
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return Tokenizer(str(tokenizer_folder))


def make_output(text: str, *more: int, reason: str | None = None) -> SequenceOutput:
    tokens = [*text.encode(), *more]
    logprobs = [TokenLogprobs([token], [-1.0], 1) for token in tokens]
    return SequenceOutput("r", tokens, reason, logprobs=logprobs)


def piece(output: SequenceOutput, tokenizer: Tokenizer, *stop: str, num_unarmed: int = 0) -> Piece:
    stream = TextStream(tokenizer, skip_special_tokens=True, stop=stop, min_tokens=num_unarmed)
    return piece_of(output, stream, index=0)


def test_all_tokens_of_a_step_have_text(tokenizer: Tokenizer) -> None:
    result = piece(make_output("abc"), tokenizer)
    assert (result.text, result.num_tokens, len(result.logprobs), result.finish_reason) == ("abc", 3, 3, None)


def test_stop_token_has_no_text(tokenizer: Tokenizer) -> None:
    result = piece(make_output("abc", END_TOKEN, reason="stop"), tokenizer)
    assert (result.text, result.num_tokens, result.finish_reason) == ("abc", 4, "stop")


def test_tokens_after_stop_string_are_dropped(tokenizer: Tokenizer) -> None:
    result = piece(make_output("abcde"), tokenizer, "c")
    assert (result.text, result.num_tokens, len(result.logprobs)) == ("ab", 3, 3)
    assert (result.finish_reason, result.stop_reason) == ("stop", "c")


def test_stop_strings_are_ignored_below_min_tokens(tokenizer: Tokenizer) -> None:
    result = piece(make_output("abcabc"), tokenizer, "b", num_unarmed=3)
    assert (result.text, result.num_tokens, result.stop_reason) == ("abca", 5, "b")


class RecordingObserver:
    """An Observer that records its calls."""

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
        raise AssertionError("a sequence is not a request")

    def rejected(self, reason: str) -> None:
        raise AssertionError("nothing is rejected")

    def media_looked_up(self, queries: int, hits: int) -> None:
        raise AssertionError("there are no images")


def make_plan() -> GenerationPlan:
    return GenerationPlan("r", [[1, 2]], [Sampling(max_tokens=9)], [], False, True, arrival_time=100.0)


def test_latencies_are_those_of_the_core_for_slow_clients() -> None:
    taken_at = iter([115.0, 130.0, 145.0, 160.0])
    seen = RecordingObserver()
    clock = SequenceClock(make_plan(), 0, seen, now=lambda: next(taken_at))
    clock.record(SequenceOutput("r", [5], first_scheduled_time=100.5, time=101.0))
    clock.record(SequenceOutput("r", [6], time=101.25))
    clock.record(SequenceOutput("r", [7], "stop", time=101.5))
    life = clock.finish("stop")
    assert (seen.first_tokens, seen.gaps) == ([1.0], [0.25, 0.25])
    assert (life.scheduled, life.first_token, life.last_token, life.end) == (100.5, 101.0, 101.5, 101.5)


def test_tokens_consumed_together_keep_their_step_times() -> None:
    seen = RecordingObserver()
    clock = SequenceClock(make_plan(), 0, seen)
    clock.record(SequenceOutput("r", [5], first_scheduled_time=100.5, time=101.0))
    clock.record_run(PlainRun(0, [6, 7, 8], [101.25, 101.5, 103.0]), 2)
    life = clock.finish("stop")
    assert seen.gaps == [0.25, 0.25]
    assert (life.last_token, life.end, life.num_generation_tokens) == (101.5, 101.5, 3)


def test_run_of_tokens_is_cut_at_stop_string_and_split(tokenizer: Tokenizer) -> None:
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


def test_run_texts_equal_texts_of_single_tokens(tokenizer: Tokenizer) -> None:
    tokens = list("aü🙂b".encode())
    one_by_one, together = (TextStream(tokenizer, skip_special_tokens=True) for _ in range(2))
    assert together.take_each(tokens) == [one_by_one.take([token], None).text for token in tokens]


def test_cancelled_sequence_is_recorded_until_cancellation() -> None:
    clock = SequenceClock(make_plan(), 0, RecordingObserver(), now=lambda: 103.0)
    clock.record(SequenceOutput("r", [5], first_scheduled_time=100.5, time=101.0))
    assert clock.finish("abort").end == 103.0

"""Objectives: parsing, and which requests attain them."""

from __future__ import annotations

import pytest
from trimtab_operator.tuner.engine_model import Sequence
from trimtab_simulator.errors import BadRequest
from trimtab_simulator.objectives import Objectives, parse_duration, parse_ttft


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("2s", (2.0, 0.0)), ("2s+1/8000", (2.0, 1 / 8000)), ("500ms + 125us", (0.5, 125e-6)), (".5", (0.5, 0))],
)
def test_ttft_may_give_each_prompt_token_its_time(text: str, seconds: tuple[float, float]) -> None:
    assert parse_ttft(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "fast", "-2s", "0s", "2s+", "2s+1/0", "2s-1/8000", "2s+1/8000+1s", "nan", "1e3s"])
def test_a_time_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(BadRequest, match="--ttft"):
        parse_ttft(text)


def test_a_duration_names_its_flag() -> None:
    assert parse_duration("80ms", "--itl-mean") == pytest.approx(0.08)
    with pytest.raises(BadRequest, match="--itl-mean"):
        parse_duration("80", "--itl-mean") and parse_duration("80kg", "--itl-mean")


def served(*, prompt: int = 800, output: int = 11, ttft: float = 1.0, gap: float = 0.05, slow: int = 0) -> Sequence:
    sequence = Sequence(10.0, prompt, output)
    sequence.first_token_at = 10.0 + ttft
    sequence.finished_at = 10.0 + ttft + gap * (output - 1)
    sequence.num_slow_gaps = slow
    return sequence


TARGETS = Objectives(ttft=1.0, per_prompt_token=1 / 8000, itl_mean=0.06, itl_token=0.1)


@pytest.mark.parametrize(
    ("sequence", "met"),
    [
        (served(), True),
        (served(ttft=1.1), True),  # 800 tokens are given 0.1 s more
        (served(ttft=1.11), False),
        (served(gap=0.061), False),
        (served(slow=1), False),  # one gap of ten is more than one of twenty
        (served(output=41, slow=2), True),
        (served(output=1, gap=9.0), True),  # it has no gap
        (Sequence(0.0, 1, 1), False),  # it was never answered
    ],
)
def test_a_request_is_judged_by_its_own_times(sequence: Sequence, met: bool) -> None:
    assert TARGETS.met_by(sequence) is met

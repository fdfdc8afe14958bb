"""A stage that runs late says so and why."""

from __future__ import annotations

import pytest
from devtools.slow_stage import Surroundings, is_late, line, why

QUIET = Surroundings(cores=2, load=0.6, beside=(), last_words="")


@pytest.mark.parametrize(
    ("seconds", "expected", "late"),
    [
        (59.0, 60.0, False),
        (69.0, 60.0, False),  # within the grace
        (71.0, 60.0, True),
        (560.0, 500.0, False),  # a tenth is no lateness
        (600.0, 500.0, True),
    ],
)
def test_late_is_what_a_tenth_and_a_moment_do_not_explain(seconds: float, expected: float, late: bool) -> None:
    assert is_late(seconds, expected) is late


def test_in_time_only_the_time_is_said() -> None:
    assert line(30.0, 60.0, QUIET) == "30 s of about 1m00s"


def test_late_on_busy_cores_they_and_our_own_stages_are_the_reason() -> None:
    busy = Surroundings(cores=2, load=4.9, beside=("images: engine's packages",), last_words="compiling")
    assert (
        line(90.0, 60.0, busy)
        == "1m30s of about 1m00s; late: 5 processes want 2 cores, another stage of ours beside it"
    )


def test_late_on_idle_cores_the_program_s_last_words_are_shown() -> None:
    waiting = Surroundings(cores=2, load=0.6, beside=("model",), last_words="Get:7 linux-libc-dev")
    assert why(waiting) == (
        "the cores are not busy, so it waits for the network or the disk; its program said last: Get:7 linux-libc-dev"
    )

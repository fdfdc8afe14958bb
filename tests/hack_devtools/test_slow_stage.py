"""Detection of late stages and the reported reason."""

from __future__ import annotations

import pytest
from devtools.slow_stage import StageContext, delay_reason, is_late, status_line

QUIET = StageContext(cores=2, load=0.6, other_stages=(), last_output="")


@pytest.mark.parametrize(
    ("seconds", "expected", "late"),
    [
        (59.0, 60.0, False),
        (69.0, 60.0, False),  # within the grace
        (71.0, 60.0, True),
        (560.0, 500.0, False),  # within a tenth
        (600.0, 500.0, True),
    ],
)
def test_is_late_ignores_a_tenth_and_the_grace_period(seconds: float, expected: float, late: bool) -> None:
    assert is_late(seconds, expected) is late


def test_status_line_in_time_has_no_reason() -> None:
    assert status_line(30.0, 60.0, QUIET) == "30 s of about 1m00s"


def test_status_line_late_names_load_and_parallel_stages() -> None:
    busy = StageContext(cores=2, load=4.9, other_stages=("images: engine's packages",), last_output="compiling")
    assert (
        status_line(90.0, 60.0, busy)
        == "1m30s of about 1m00s; late: 5 runnable processes on 2 cores, with another stage running in parallel"
    )


def test_delay_reason_on_idle_cores_shows_last_output() -> None:
    waiting = StageContext(cores=2, load=0.6, other_stages=("model",), last_output="Get:7 linux-libc-dev")
    assert delay_reason(waiting) == (
        "the cores are not busy, so it waits for the network or the disk; last output: Get:7 linux-libc-dev"
    )

"""Durations of the stages of an engine's start."""

import pytest
from trimtab_engine.engine_client.start_clock import StartClock, format_stages


class Age:
    """A process age that tests set."""

    def __init__(self) -> None:
        self.seconds = 0.5

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def age() -> Age:
    return Age()


def make_clock(age: Age, download_seconds: float = 0.0) -> StartClock:
    return StartClock(program_age=0.25, download_seconds=download_seconds, age=age)


def test_stages_are_in_order_and_sum_to_the_age(age: Age) -> None:
    clock = make_clock(age)
    for stage, seconds in [("starting", 2.0), ("weights", 2.5), ("weights", 3.0), ("ready", 4.0)]:
        age.seconds = seconds
        clock.enter(stage)
    age.seconds = 4.5
    clock.finish()
    age.seconds = 100.0
    assert list(clock.seconds.items()) == [
        ("process", 0.25),
        ("imports", 1.75),
        ("starting", 0.5),
        ("weights", 1.5),
        ("ready", 0.5),
    ]
    assert sum(clock.seconds.values()) == 4.5


def test_current_stage_counts_until_now(age: Age) -> None:
    clock = make_clock(age)
    age.seconds = 1.25
    assert clock.seconds == {"process": 0.25, "imports": 1.0}


def test_download_is_not_part_of_imports(age: Age) -> None:
    clock = make_clock(age, download_seconds=30.0)
    age.seconds = 31.25
    assert clock.seconds == {"process": 0.25, "download": 30.0, "imports": 1.0}


def test_stage_after_the_end_is_ignored(age: Age) -> None:
    clock = make_clock(age)
    clock.finish()
    age.seconds = 9.0
    clock.enter("weights")
    assert "weights" not in clock.seconds


def test_only_the_first_request_sets_first_token(age: Age) -> None:
    clock = make_clock(age)
    clock.finish()
    clock.first_token(0.125)
    clock.first_token(7.0)
    assert clock.seconds["first_token"] == 0.125


def test_format_names_stages_and_total() -> None:
    assert format_stages({"imports": 1.2, "weights": 0.8}) == "imports 1.20 s, weights 0.80 s, 2.00 s in all"

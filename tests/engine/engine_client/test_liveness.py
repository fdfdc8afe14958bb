"""Liveness of engine cores by their silence."""

import pytest
from trimtab_engine.engine_client.liveness import LivenessTracker, Silence


def signs(*, longest_step: float = 0.1, limit: float = 30.0) -> LivenessTracker:
    """Return a tracker of one core that serves since 100 s."""
    signs = LivenessTracker(limit)
    signs.start(0, 100.0)
    signs.note_longest_step(0, longest_step)
    return signs


@pytest.mark.parametrize(
    ("at", "silence"),
    [(101.0, None), (129.9, None), (130.0, Silence(0, 30.0, False)), (160.0, Silence(0, 60.0, True))],
)
def test_a_core_hangs_after_the_limit_and_does_so_for_good_after_twice_that(at: float, silence: Silence | None) -> None:
    assert signs().silence(at) == silence


def test_any_message_resets_silence() -> None:
    vital = signs()
    vital.record_message(0, 129.0)
    assert vital.silence(158.0) is None
    assert vital.seconds(158.0) == {0: 29.0}


def test_steps_that_take_long_make_the_limit_longer() -> None:
    assert signs(longest_step=20.0).silence(159.0) is None
    assert signs(longest_step=20.0).silence(160.0) == Silence(0, 60.0, False)


def test_announced_silence_is_excused_until_next_message() -> None:
    vital = signs()
    vital.allow_silence_until(0, until=700.0)
    assert vital.silence(699.0) is None
    assert vital.silence(700.0) == Silence(0, 600.0, True)
    vital.record_message(0, 200.0)
    assert vital.silence(231.0) == Silence(0, 31.0, False)


def test_longest_silent_core_is_reported_without_ended_ones() -> None:
    vital = signs()
    vital.start(1, 110.0)
    assert str(vital.silence(150.0)) == "engine core 0 has been silent for 50 s"
    vital.stop(0)
    vital.record_message(0, 120.0)
    assert vital.silence(150.0) == Silence(1, 40.0, False)


def test_without_a_limit_no_silence_is_too_long() -> None:
    assert signs(limit=0.0).silence(1e6) is None

"""Rate limits with the semantics of autoscaling/v2."""

import pytest
from trimtab_operator.tuner.scaling.behavior import (
    Behavior,
    Policy,
    Rules,
    ScaleEvent,
    Select,
    Unit,
    limit_change,
    stabilize,
)

PODS_4, PERCENT_100 = Policy(Unit.PODS, 4, 15.0), Policy(Unit.PERCENT, 100, 15.0)
USUAL = Behavior(Rules(0.0, policies=(PODS_4, PERCENT_100)), Rules(300.0, policies=(PERCENT_100,)))


@pytest.mark.parametrize(
    ("current", "target", "allowed"),
    [
        (1, 10, 5),  # four more, as that is more than twice
        (10, 40, 20),  # twice, as that is more than four
        (10, 3, 3),  # all may go within the period
    ],
)
def test_the_most_lenient_policy_decides(current: int, target: int, allowed: int) -> None:
    assert limit_change(USUAL, current, target, [], now=100.0) == allowed


def test_changes_within_the_period_count() -> None:
    assert limit_change(USUAL, 5, 12, [ScaleEvent(95.0, 4)], now=100.0) == 5
    assert limit_change(USUAL, 5, 12, [ScaleEvent(80.0, 4)], now=100.0) == 10


def test_min_takes_the_strictest_and_disabled_takes_none() -> None:
    strict = Behavior(Rules(policies=(PODS_4, PERCENT_100), select=Select.MIN))
    assert limit_change(strict, 1, 10, [], now=0.0) == 2
    assert limit_change(Behavior(down=Rules(select=Select.DISABLED)), 5, 1, [], now=0.0) == 5


@pytest.mark.parametrize(
    ("wanted", "current", "result"),
    [
        ([(0.0, 4), (290.0, 2), (300.0, 2)], 4, 4),  # 4 was wanted within the down window
        ([(-10.0, 4), (290.0, 2), (300.0, 3)], 4, 3),  # the highest of the window
        ([(290.0, 2), (300.0, 6)], 4, 6),  # up at once
    ],
)
def test_scale_in_takes_highest_of_its_window(wanted: list[tuple[float, int]], current: int, result: int) -> None:
    assert stabilize(USUAL, current, wanted, now=300.0, tuner_hold=0.0) == result


def test_scale_out_takes_lowest_of_its_window() -> None:
    slow = Behavior(up=Rules(60.0))
    assert stabilize(slow, 2, [(250.0, 3), (300.0, 6)], now=300.0, tuner_hold=0.0) == 3

"""Step times learned from sums: quickly, with a wrong prior, and again after the engine changed."""

import random

import pytest
from trimtab_operator.tuner.engine_model import StepCost
from trimtab_operator.tuner.model import StepTime
from trimtab_operator.tuner.samples import Work

TRUE = StepCost(8e-3, 1 / 16_000, 3e-5, 4e-9)
NOTHING = Work()


def works(cost: StepCost, rng: random.Random) -> tuple[Work, Work]:
    """Return the sums of a scrape: decode steps of some batch, and steps with prefill."""
    batch, context = rng.randint(4, 64), rng.randint(300, 2000)
    steps = rng.randint(100, 800)
    tokens, total = steps * batch, steps * batch * context
    decode = Work(steps, tokens, tokens, total, total, _seconds(cost, steps, tokens, tokens, total, total))
    few, chunk = rng.randint(20, 100), rng.randint(100, 2000)
    tokens, sequences, total = few * (chunk + batch), few * (batch + 1), few * batch * context
    prefill = Work(few, tokens, sequences, total, total, _seconds(cost, few, tokens, sequences, total, total))
    return decode, prefill


def _seconds(cost: StepCost, steps: int, tokens: int, sequences: int, context: int, attended: int) -> float:
    return cost.per_step * steps + cost.seconds(tokens, sequences, context, attended) - cost.per_step


def wrong(cost: StepCost, *factors: float) -> StepCost:
    return StepCost(
        cost.per_step * factors[0],
        cost.per_token * factors[1],
        cost.per_sequence * factors[2],
        cost.per_context * factors[3],
    )


@pytest.mark.parametrize("factors", [(1.25, 0.75, 1.25, 0.75), (0.7, 1.3, 0.8, 1.2), (20.0, 20.0, 20.0, 20.0)])
def test_four_scrapes_predict_the_next_within_a_few_percent(factors: tuple[float, ...]) -> None:
    rng = random.Random(1)
    model = StepTime.of(wrong(TRUE, *factors))
    for _ in range(4):
        model = model.with_observation(*works(TRUE, rng))
    decode, prefill = works(TRUE, rng)
    error = model.relative_error(decode, prefill)
    assert error is not None
    assert abs(error) < 0.04


def test_unobserved_coefficients_stay_near_the_prior() -> None:
    rng = random.Random(2)
    model = StepTime.of(wrong(TRUE, 1.0, 1.0, 1.2, 1.0))
    for _ in range(20):
        model = model.with_observation(works(TRUE, rng)[0], None)  # while decoding, tokens and sequences are one
    cost = model.cost
    assert cost.per_token + cost.per_sequence == pytest.approx(TRUE.per_token + TRUE.per_sequence, rel=0.15)
    assert all(getattr(cost, name) >= 0 for name in ("per_step", "per_token", "per_sequence", "per_context"))


def test_slower_engine_is_detected_and_relearned() -> None:
    rng = random.Random(3)
    model = StepTime.of(TRUE)
    for _ in range(20):
        model = model.with_observation(*works(TRUE, rng))
    assert model.change_count == 0
    slower = wrong(TRUE, 1.4, 1.4, 1.4, 1.4)
    for _ in range(12):
        model = model.with_observation(*works(slower, rng))
    assert model.change_count >= 1
    error = model.relative_error(*works(slower, rng))
    assert error is not None
    assert abs(error) < 0.05


def test_too_few_steps_teach_nothing() -> None:
    model = StepTime.of(TRUE)
    assert model.with_observation(Work(2, 2, 2, 2, 2, 5.0), NOTHING) == model
    assert not model.is_fitted


@pytest.mark.parametrize("seed", range(4))
def test_varying_speed_keeps_costs_that_the_load_does_not_show(seed: int) -> None:
    """A shared core is 0.7 to 1.4 times as fast for a while, and only single sequences decode for hours."""
    rng = random.Random(seed)
    model = StepTime.of(wrong(TRUE, 0.3, 0.3, 0.3, 1.0))
    for _ in range(6):
        model = model.with_observation(*works(TRUE, rng))
    prefill = works(TRUE, rng)[1]
    speeds = [rng.uniform(0.7, 1.4) for _ in range(60)]
    for row in range(600):
        speed = speeds[row // 10]
        steps = rng.randint(10, 40)
        context = steps * rng.randint(80, 110)
        seconds = _seconds(TRUE, steps, steps, steps, context, context) * speed * rng.gauss(1, 0.04)
        model = model.with_observation(Work(steps, steps, steps, context, context, seconds), None)
    assert model.change_count > 5
    error = model.relative_error(None, prefill)
    assert error is not None
    assert 1 / 2.5 < 1 + error < 2.5

"""The fit of step times: coefficients from noisy steps, through long decoding and outliers."""

import math
import random

import pytest
from trimtab_engine.state_stream.step_time_fit import MIN_PROMPT_STEPS, MIN_STEPS, StepTimeFit

TRUE = (0.008, 1 / 16_000, 3e-5, 4e-9)


def seconds_of(tokens: int, sequences: int, context: int, coefficients: tuple[float, ...] = TRUE) -> float:
    base, per_token, per_sequence, per_context = coefficients
    return base + per_token * tokens + per_sequence * sequences + per_context * context


def add_steps(fit: StepTimeFit, rng: random.Random, count: int, *, prompts: float, scale: float = 1.0) -> None:
    for _ in range(count):
        computes_prompts = rng.random() < prompts
        sequences = rng.randint(1, 200)
        tokens = sequences + (rng.randint(100, 8000) if computes_prompts else 0)
        context = sequences * rng.randint(200, 4000)
        seconds = scale * seconds_of(tokens, sequences, context) * rng.gauss(1, 0.05)
        fit.add(tokens=tokens, sequences=sequences, context=context, seconds=seconds, computes_prompts=computes_prompts)


def test_fit_predicts_steps_of_all_sizes() -> None:
    fit, rng = StepTimeFit(), random.Random(1)
    add_steps(fit, rng, 3000, prompts=0.1)
    found = fit.coefficients()
    assert found is not None
    assert found.per_token == pytest.approx(TRUE[1], rel=0.05)
    for size in [(1, 1, 500), (200, 200, 400_000), (8000, 1, 8000), (4000, 100, 200_000)]:
        tokens, sequences, context = size
        assert fit.predict(tokens=tokens, sequences=sequences, context=context) == pytest.approx(
            seconds_of(*size), rel=0.1
        )


def test_long_decoding_keeps_cost_of_prompt_tokens() -> None:
    fit, rng = StepTimeFit(), random.Random(2)
    add_steps(fit, rng, 300, prompts=0.5)
    add_steps(fit, rng, 20_000, prompts=0.0)
    found = fit.coefficients()
    assert found is not None
    assert found.per_token == pytest.approx(TRUE[1], rel=0.15)


def test_fit_follows_a_machine_that_becomes_slower() -> None:
    fit, rng = StepTimeFit(), random.Random(3)
    add_steps(fit, rng, 2000, prompts=0.2)
    add_steps(fit, rng, 20_000, prompts=0.2, scale=2.0)
    found = fit.coefficients()
    assert found is not None
    assert found.per_token == pytest.approx(2 * TRUE[1], rel=0.1)


def test_no_fit_before_enough_steps_of_both_kinds() -> None:
    fit, rng = StepTimeFit(), random.Random(4)
    assert fit.coefficients() is None
    add_steps(fit, rng, 500, prompts=0.0)
    assert fit.coefficients() is None
    add_steps(fit, rng, MIN_PROMPT_STEPS, prompts=1.0)
    assert fit.coefficients() is not None
    fresh = StepTimeFit()
    add_steps(fresh, rng, MIN_STEPS - 1, prompts=1.0)
    assert fresh.coefficients() is None


def test_outliers_and_invalid_times_are_ignored() -> None:
    fit, rng = StepTimeFit(), random.Random(5)
    add_steps(fit, rng, 1000, prompts=0.2)
    before = fit.coefficients()
    for seconds in (30.0, 0.0, -1.0, math.inf, math.nan):
        fit.add(tokens=100, sequences=10, context=1000, seconds=seconds, computes_prompts=True)
    fit.add(tokens=0, sequences=0, context=0, seconds=0.01, computes_prompts=False)
    assert fit.coefficients() == before


@pytest.mark.parametrize("seed", range(20))
def test_coefficients_are_finite_and_not_negative(seed: int) -> None:
    """Also when all steps have one size, or their times do not depend on it."""
    rng, fit = random.Random(seed), StepTimeFit()
    tokens, sequences, context = rng.randint(1, 100), rng.randint(1, 100), rng.randint(1, 10_000)
    for _ in range(200):
        fit.add(
            tokens=tokens, sequences=sequences, context=context, seconds=rng.uniform(0.01, 0.02), computes_prompts=True
        )
    found = fit.coefficients()
    assert found is not None
    values = (found.base, found.per_token, found.per_sequence, found.per_context)
    assert all(math.isfinite(value) and value >= 0 for value in values)
    assert 0.01 < seconds_of(tokens, sequences, context, values) < 0.02

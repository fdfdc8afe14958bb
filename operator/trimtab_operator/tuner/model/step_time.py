"""Model of an engine's step time, learned from the work and duration of its steps.

    seconds = a·steps + p·prefill steps + b·tokens + c·sequences + d·context + e·attended

Steps with prefill may have an additional constant cost (they replay no whole graph). The law is linear, so sums over
any interval obey it exactly: each scrape gives one row for decode steps and one for steps with prefill. Coefficients
are learned as multiples of the prior, so that what the load does not show (tokens and sequences are equal while
decoding) stays at the prior. When the one-step error keeps its sign, the engine has
changed, and the present coefficients become the prior.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from trimtab_operator.tuner.engine_model import StepCost
from trimtab_operator.tuner.model.regression import Gaussian, Vector
from trimtab_operator.tuner.samples import Work

OWN_SD = 0.3  # of each coefficient, relative to the prior
COMMON_SD = 2.0  # of all coefficients together: another GPU than assumed, or a CPU
PREFILL_STEP_SHARE = 0.25  # of per_step: approximate maximum extra cost of a step with prefill
ATTENDED_SD = 0.6  # a small share of the time for all but very long prompts, and hard to see
OWN_SDS = (OWN_SD, OWN_SD, OWN_SD, OWN_SD, ATTENDED_SD, 1.0)
NOISE = 0.03  # relative noise of a row's seconds
LEAST_STEPS = 5  # rows with fewer steps are mostly noise
CUSUM_SLACK = 0.75  # standard deviations of the one-step error that are ignored
CUSUM_LIMIT = 5.0  # sum from which on the engine has changed
LEAST_FACTOR = 0.02  # of the prior: floor of every coefficient
NAMES = ("per_step", "per_token", "per_sequence", "per_context", "per_attended", "per_prefill_step")


@dataclass(frozen=True, slots=True)
class Fit:
    """Quality of the model: rows, the last row's relative error, and the uncertainty for a typical row."""

    rows: int
    last_error: float | None
    uncertainty: float


@dataclass(frozen=True, slots=True)
class StepTime:
    """Step-time model: belief about each coefficient relative to the prior, and the recent errors."""

    prior: StepCost
    belief: Gaussian
    rows: int = 0
    last_error: float | None = None
    rising: float = 0.0
    """One-sided CUSUM of standardized errors: slower than predicted."""
    falling: float = 0.0
    """The same for faster than predicted."""
    change_count: int = 0
    """Number of detected engine changes."""
    last_row: Vector = ()

    @classmethod
    def of(cls, prior: StepCost) -> StepTime:
        """Return a model without observations."""
        mean = (1.0,) * 5 + (0.0,)
        return cls(prior, Gaussian.prior(mean, scale=(1.0,) * 6, own_sd=OWN_SDS, common_sd=COMMON_SD))

    def with_observation(self, decode: Work | None, prefill: Work | None) -> StepTime:
        """Return the model after one interval of one replica."""
        model = self
        for work, carries_prefill in ((decode, False), (prefill, True)):
            if work is not None and work.steps >= LEAST_STEPS and work.seconds > 0:
                model = model._with_row(self._features(work, carries_prefill), work.seconds)
        return model

    def with_intervals(self, rows: Iterable[tuple[Work | None, Work | None]]) -> StepTime:
        """Return the model after the intervals of several replicas."""
        model = self
        for decode, prefill in rows:
            model = model.with_observation(decode, prefill)
        return model

    @property
    def is_fitted(self) -> bool:
        """True if it has enough rows to predict: the prior's common error is gone after one or two."""
        return self.rows >= 2

    @property
    def cost(self) -> StepCost:
        """Current estimate of the coefficients."""
        factors = [max(LEAST_FACTOR, value) for value in self.belief.mean[:5]]
        prior = self.prior
        return StepCost(
            per_step=prior.per_step * factors[0],
            per_token=prior.per_token * factors[1],
            per_sequence=prior.per_sequence * factors[2],
            per_context=prior.per_context * factors[3],
            per_attended=prior.per_attended * factors[4],
            per_prefill_step=max(0.0, prior.per_step * PREFILL_STEP_SHARE * self.belief.mean[5]),
        )

    @property
    def fit(self) -> Fit:
        """Quality of the model."""
        if not self.last_row:
            return Fit(self.rows, self.last_error, 1.0)
        mean, sd = self.belief.predict(self.last_row)
        return Fit(self.rows, self.last_error, sd / mean if mean > 0 else 1.0)

    def relative_error(self, decode: Work | None, prefill: Work | None) -> float | None:
        """Return the relative excess of these steps' time over the prediction; None for too few steps."""
        seconds = predicted = 0.0
        for work, carries_prefill in ((decode, False), (prefill, True)):
            if work is not None and work.steps >= LEAST_STEPS:
                seconds += work.seconds
                predicted += self.belief.predict(self._features(work, carries_prefill))[0]
        return seconds / predicted - 1.0 if predicted > 0 else None

    def _belief_after_change(self) -> Gaussian:
        """Return the belief with the present coefficients as prior.

        Multiplying the covariance instead would grow without limit in what the load does not show, such as prefill
        while an idle machine's speed varies, and a small error there would become a large one.
        """
        scale = [max(LEAST_FACTOR, value) for value in self.belief.mean[:5]]
        mean = (*scale, self.belief.mean[5])
        return Gaussian.prior(mean, scale=(*scale, scale[0]), own_sd=OWN_SDS, common_sd=COMMON_SD)

    def _features(self, work: Work, carries_prefill: bool) -> Vector:
        prior = self.prior
        return (
            prior.per_step * work.steps,
            prior.per_token * work.tokens,
            prior.per_sequence * work.sequences,
            prior.per_context * work.context,
            prior.per_attended * work.attended,
            prior.per_step * PREFILL_STEP_SHARE * work.steps if carries_prefill else 0.0,
        )

    def _with_row(self, x: Vector, seconds: float) -> StepTime:
        mean, sd = self.belief.predict(x)
        noise = NOISE * seconds
        if self.rows < 2 and mean > 0:  # the first rows set the scale, so their errors do not count
            belief = self.belief.update(x, seconds, sd=noise)
            return replace(self, belief=belief, rows=self.rows + 1, last_error=seconds / mean - 1, last_row=x)
        error = (seconds - mean) / math.hypot(sd, noise)
        rising = max(0.0, self.rising + min(error, CUSUM_LIMIT) - CUSUM_SLACK)
        falling = max(0.0, self.falling + min(-error, CUSUM_LIMIT) - CUSUM_SLACK)
        belief, change_count = self.belief, self.change_count
        if max(rising, falling) > CUSUM_LIMIT:
            belief, rising, falling, change_count = self._belief_after_change(), 0.0, 0.0, change_count + 1
        return replace(
            self,
            belief=belief.update(x, seconds, sd=noise),
            rows=self.rows + 1,
            last_error=seconds / mean - 1 if mean > 0 else None,
            rising=rising,
            falling=falling,
            change_count=change_count,
            last_row=x,
        )

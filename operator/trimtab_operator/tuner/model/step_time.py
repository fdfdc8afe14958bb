"""A model of an engine's step time, learned from what its steps computed and how long they took.

    seconds = a·steps + p·prefill steps + b·tokens + c·sequences + d·context + e·attended

Steps with prefill may cost more for themselves (they replay no whole graph). As the law is linear, sums over any
interval obey it exactly: each scrape gives one row for decode steps and one for those with prefill. Coefficients are
learned as multiples of the prior's, so that what the load does not show (tokens and sequences are one while decoding)
stays where the prior had it. When the one-step error keeps one sign, the engine has become another: then it forgets.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from trimtab_operator.tuner.engine_model import StepCost
from trimtab_operator.tuner.model.regression import Gaussian, Vector
from trimtab_operator.tuner.samples import Work

OWN_SD = 0.3  # of each coefficient around the prior's
COMMON_SD = 2.0  # of all of them together: another GPU than guessed, a CPU
PREFILL_STEP_SHARE = 0.25  # of per_step, which a step with prefill costs more at most, about
ATTENDED_SD = 0.6  # a small share of the time for all but very long prompts, and hard to see
NOISE = 0.03  # of a row's seconds
LEAST_STEPS = 5  # a row of fewer says more about noise than about the engine
CUSUM_SLACK = 0.75  # standard deviations of one-step error that are never suspicious
CUSUM_LIMIT = 5.0  # summed: then the engine is another than it was
WIDEN = 3.0  # how much less sure it is then
LEAST_FACTOR = 0.02  # of the prior: no coefficient becomes nothing, or negative
NAMES = ("per_step", "per_token", "per_sequence", "per_context", "per_attended", "per_prefill_step")


@dataclass(frozen=True, slots=True)
class Fit:
    """How well it predicts: rows seen, the last row's error as a share, and its own uncertainty of a typical row."""

    rows: int
    last_error: float | None
    uncertainty: float


@dataclass(frozen=True, slots=True)
class StepTime:
    """The model: a belief about how far each coefficient is from the prior's, and how its errors have run."""

    prior: StepCost
    belief: Gaussian
    rows: int = 0
    last_error: float | None = None
    rising: float = 0.0
    """The one-sided sums of standardised errors: slower than predicted …"""
    falling: float = 0.0
    """… and faster."""
    alarms: int = 0
    """How often it has found the engine to be another one."""
    last_row: Vector = ()

    @classmethod
    def of(cls, prior: StepCost) -> StepTime:
        """Nothing is learned yet."""
        own = (OWN_SD, OWN_SD, OWN_SD, OWN_SD, ATTENDED_SD, 1.0)
        return cls(prior, Gaussian.prior((1.0,) * 5 + (0.0,), own_sd=own, common_sd=COMMON_SD))

    def with_observation(self, decode: Work | None, prefill: Work | None) -> StepTime:
        """After one interval of one replica."""
        model = self
        for work, carries_prefill in ((decode, False), (prefill, True)):
            if work is not None and work.steps >= LEAST_STEPS and work.seconds > 0:
                model = model._with_row(self._features(work, carries_prefill), work.seconds)
        return model

    def learned_all(self, rows: Iterable[tuple[Work | None, Work | None]]) -> StepTime:
        """After the intervals of several replicas."""
        model = self
        for decode, prefill in rows:
            model = model.with_observation(decode, prefill)
        return model

    @property
    def is_fitted(self) -> bool:
        """Whether it has seen enough to predict by: the prior's common error is gone after a row or two."""
        return self.rows >= 2

    @property
    def cost(self) -> StepCost:
        """The coefficients as they are believed now."""
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
        """How far it can be trusted."""
        if not self.last_row:
            return Fit(self.rows, self.last_error, 1.0)
        mean, sd = self.belief.predicted(self.last_row)
        return Fit(self.rows, self.last_error, sd / mean if mean > 0 else 1.0)

    def relative_error(self, decode: Work | None, prefill: Work | None) -> float | None:
        """How much longer than predicted these steps took, as a share of the prediction; None for too few steps."""
        seconds = predicted = 0.0
        for work, carries_prefill in ((decode, False), (prefill, True)):
            if work is not None and work.steps >= LEAST_STEPS:
                seconds += work.seconds
                predicted += self.belief.predicted(self._features(work, carries_prefill))[0]
        return seconds / predicted - 1.0 if predicted > 0 else None

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
        mean, sd = self.belief.predicted(x)
        noise = NOISE * seconds
        if self.rows < 2 and mean > 0:  # the first rows set the scale: no error of theirs is suspicious
            belief = self.belief.updated(x, seconds, sd=noise)
            return replace(self, belief=belief, rows=self.rows + 1, last_error=seconds / mean - 1, last_row=x)
        error = (seconds - mean) / math.hypot(sd, noise)
        rising = max(0.0, self.rising + min(error, CUSUM_LIMIT) - CUSUM_SLACK)
        falling = max(0.0, self.falling + min(-error, CUSUM_LIMIT) - CUSUM_SLACK)
        belief, alarms = self.belief, self.alarms
        if max(rising, falling) > CUSUM_LIMIT:
            belief, rising, falling, alarms = belief.widened(WIDEN), 0.0, 0.0, alarms + 1
        return replace(
            self,
            belief=belief.updated(x, seconds, sd=noise),
            rows=self.rows + 1,
            last_error=seconds / mean - 1 if mean > 0 else None,
            rising=rising,
            falling=falling,
            alarms=alarms,
            last_row=x,
        )

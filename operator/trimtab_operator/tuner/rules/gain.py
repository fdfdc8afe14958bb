"""Gain that a change must bring: a clear predicted improvement of the deciding measure, beyond the sampling error.

The deciding measure is the objective. For open-loop load it is the share of requests that attain it; for closed-loop
clients the number of such requests per second, because they send fewer when they are served worse. Without objectives
in the spec the defaults decide as long as most open-loop requests attain them; beyond that they are violated anyway,
and tokens per second decide.
"""

from __future__ import annotations

from trimtab_operator.tuner.moves import Expectation, Measure
from trimtab_operator.tuner.prediction import Prediction
from trimtab_operator.tuner.situation import Situation

LEAST_GAIN = 0.02  # of the requests that attain the objectives, or of the tokens: less is within the model's error
DEVIATIONS = 2.0  # standard errors of the sampled requests
HARM = 0.005  # of the same: predicted loss above which a change is not made
MIN_DEFAULT_ATTAINMENT = 0.5  # with less, the default objectives do not decide
UNSURE = 0.02  # usual error of a predicted share
UNSURE_RATE = 0.1  # usual relative error of a predicted rate


def clear_gain(s: Situation, before: Prediction, after: Prediction, *, times: float = 1.0) -> Expectation | None:
    """Return the deciding measure before and after, if it improves clearly (`times` the usual margin); None
    otherwise.
    """
    if _tokens_decide(s, before, after):
        is_clear = after.tokens_per_second >= (1 + times * LEAST_GAIN) * before.tokens_per_second > 0
    else:
        is_clear = after.good_share >= before.good_share + times * max(LEAST_GAIN, DEVIATIONS * after.good_error)
    return deciding_measure(s, before, after) if is_clear else None


def is_harm(s: Situation, before: Prediction, after: Prediction) -> bool:
    """Return True if users are predicted to be worse off."""
    if _tokens_decide(s, before, after):
        return after.tokens_per_second < (1 - HARM) * before.tokens_per_second
    return after.good_share < before.good_share - HARM


def deciding_measure(s: Situation, before: Prediction, after: Prediction) -> Expectation:
    """Return the measure by which both are compared, in its display unit."""
    if _tokens_decide(s, before, after):
        return _rate(Measure.TOKENS, before.tokens_per_second, after.tokens_per_second)
    if s.state.clients.are_closed_loop:
        return _rate(Measure.GOOD, before.good_share * s.rate, after.good_share * s.rate)
    return attainment(before.attainment, after.attainment)


def attainment(before: float, after: float, *, unsure: float = UNSURE) -> Expectation:
    """Return the expectation for the share of requests that attain the objectives."""
    return Expectation(Measure.ATTAINMENT, before, after, max(0.0, after - unsure), min(1.0, after + unsure))


def round_significant(value: float) -> float:
    """Return the value with four significant digits, so that clearly different small figures stay different."""
    return float(f"{value:.4g}")


def _rate(measure: Measure, before: float, after: float) -> Expectation:
    return Expectation(measure, before, after, (1 - UNSURE_RATE) * after, (1 + UNSURE_RATE) * after)


def _tokens_decide(s: Situation, before: Prediction, after: Prediction) -> bool:
    if s.objectives.are_given:
        return False
    return s.state.clients.are_closed_loop or max(before.attainment, after.attainment) < MIN_DEFAULT_ATTAINMENT

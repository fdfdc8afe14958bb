"""What a move must bring: clearly more of what decides, by prediction, beyond what chance may have made of it.

What decides is what was promised. Of a stream that is the share of its requests that keep their promises; of clients
that wait, how many such requests end in a second, as they send fewer where they are served worse. Where nobody promised
anything the defaults decide as long as most requests of a stream keep them. Beyond that they are broken whatever is
done, and what chance leaves of them tells nothing: then tokens a second decide.
"""

from __future__ import annotations

from trimtab_operator.tuner.moves import Expectation, Measure
from trimtab_operator.tuner.prediction import Prediction
from trimtab_operator.tuner.situation import Situation

LEAST_GAIN = 0.02  # of the requests that keep their promises, or of the tokens: less is within the twin's noise
DEVIATIONS = 2.0  # standard errors of what was drawn, likewise
HARM = 0.005  # of the same: a move that is predicted to cost more is not made
MOST_KEEP = 0.5  # of the requests: where fewer keep the defaults, these decide nothing
UNSURE = 0.02  # of a share: what a prediction of it is off by, mostly
UNSURE_RATE = 0.1  # of a rate, likewise


def clear_gain(s: Situation, before: Prediction, after: Prediction, *, times: float = 1.0) -> Expectation | None:
    """What decides, as it is and as it will be, where that is clearly more, by so many times the usual; else None."""
    if _tokens_decide(s, before, after):
        is_clear = after.tokens_per_second >= (1 + times * LEAST_GAIN) * before.tokens_per_second > 0
    else:
        is_clear = after.good_share >= before.good_share + times * max(LEAST_GAIN, DEVIATIONS * after.good_error)
    return what_decides(s, before, after) if is_clear else None


def is_harm(s: Situation, before: Prediction, after: Prediction) -> bool:
    """Whether users are predicted to be worse off for it."""
    if _tokens_decide(s, before, after):
        return after.tokens_per_second < (1 - HARM) * before.tokens_per_second
    return after.good_share < before.good_share - HARM


def what_decides(s: Situation, before: Prediction, after: Prediction) -> Expectation:
    """The measure by which the two are compared, in the unit in which it is told."""
    if _tokens_decide(s, before, after):
        return _rate(Measure.TOKENS, before.tokens_per_second, after.tokens_per_second)
    if s.memory.clients.do_wait:
        return _rate(Measure.GOOD, before.good_share * s.rate, after.good_share * s.rate)
    return attainment(before.attainment, after.attainment)


def attainment(before: float, after: float) -> Expectation:
    """The share of requests that keep their promises."""
    return Expectation(Measure.ATTAINMENT, before, after, max(0.0, after - UNSURE), min(1.0, after + UNSURE))


def rounded(value: float) -> float:
    """To four digits, however small it is: two figures that clearly differ differ so, too."""
    return float(f"{value:.4g}")


def _rate(measure: Measure, before: float, after: float) -> Expectation:
    return Expectation(measure, before, after, (1 - UNSURE_RATE) * after, (1 + UNSURE_RATE) * after)


def _tokens_decide(s: Situation, before: Prediction, after: Prediction) -> bool:
    if s.objectives.are_given:
        return False
    return s.memory.clients.do_wait or max(before.attainment, after.attainment) < MOST_KEEP

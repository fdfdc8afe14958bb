"""Trials of live-parameter changes: a change is kept only if its predicted effect appears, and reverted otherwise.

The share of recomputed tokens shows within two samples; user-visible latency takes longer, because near capacity it
varies by a third from minute to minute and violations come in clusters. A trial is therefore reverted when results are
worse by clearly more than chance, and kept when they are not for long enough.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from trimtab_operator.tuner.explanation import format_distinct, percent, show_amount
from trimtab_operator.tuner.moves import Expectation, Measure
from trimtab_operator.tuner.observation import Interval
from trimtab_operator.tuner.parameters import Parameter
from trimtab_operator.tuner.situation import Situation
from trimtab_operator.tuner.state import Trial

SETTLE_SECONDS = 5.0  # a measurement this soon after a change started before it
MIN_SAMPLES = 2  # intervals of each replica before a verdict
CLUSTERING = 15.0  # violations cluster: factor of their count's variance over the binomial one
DEVIATIONS = 3.0
CLEAR_LOSS = 0.02  # of the attainment, beyond chance
WORSE_FACTOR = 1.5  # times the tokens computed twice …
WORSE_SHARE = 0.01  # … and this share of all more
AWAITED = 2.0  # factor of the trial's maximum duration while requested replicas start
COMPARABLE = 1.3  # loads within this factor of each other are comparable


class Verdict(StrEnum):
    """State of a trial."""

    OPEN = "open"
    KEPT = "kept"
    BAD = "bad"
    NOT_ACHIEVED = "not achieved"


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict and the observation that led to it."""

    verdict: Verdict
    seen: str = ""


OPEN = Judgement(Verdict.OPEN)


def judge_trial(
    trial: Trial,
    s: Situation,
    *,
    attained: float | None,
    requests: int,
    since: Interval | None,
    is_awaited: bool = False,
) -> Judgement:
    """Judge a trial by the attainment of `requests` that arrived since the change and by the replicas' work since then.

    `is_awaited`: too few requests arrived since the requested replicas serve, so attainment still reflects the replica
    count.
    """
    if since is None or since.seconds < MIN_SAMPLES * s.settings.pace.tick_seconds * max(1, s.replicas) * 0.9:
        return OPEN
    preemption = _preemption_regression(trial, s, since)
    if preemption is not None:
        return Judgement(Verdict.BAD, preemption)
    regression = _attainment_regression(trial, s, attained, requests)
    if regression is not None:
        return Judgement(Verdict.BAD, regression)
    if s.now - trial.at < (AWAITED if is_awaited else 1.0) * s.settings.pace.judge_seconds:
        return OPEN
    note = "; attainment could not be judged because replicas kept starting" if is_awaited else ""
    outcome = _describe_outcome(trial.expected, s, attained, since) + note
    is_useless = not is_awaited and _is_missed(trial, s, attained, requests, since)
    return Judgement(Verdict.NOT_ACHIEVED if is_useless else Verdict.KEPT, outcome)


def _is_missed(trial: Trial, s: Situation, attained: float | None, requests: int, since: Interval) -> bool:
    """Return True if the first measure that can be observed is outside its predicted interval, and has changed by less
    than half of the predicted change. With another open-loop load, nothing can be compared.
    """
    if not (_is_comparable(trial, s) or s.state.clients.are_closed_loop):
        return False
    for entry in trial.expected:
        seen = _observed(entry.measure, s, attained, since)
        if seen is None:
            continue
        if entry.measure is Measure.ATTAINMENT and not _is_less(seen, entry.after, requests):
            return False
        is_outside = seen > entry.high if entry.after < entry.before else seen < entry.low
        return is_outside and abs(entry.after - seen) > abs(entry.after - entry.before) / 2
    return False


def _observed(measure: Measure, s: Situation, attained: float | None, since: Interval) -> float | None:
    """Return the observed value of a measure; None if it cannot be observed."""
    match measure:
        case Measure.ATTAINMENT:
            return attained
        case Measure.RECOMPUTED:
            return since.recomputed_share
        case Measure.GOOD:
            return None if attained is None else attained * s.rate
        case Measure.TOKENS:
            return since.generated_tokens * max(1, s.replicas) / since.seconds if since.seconds > 0 else None
        case _:
            return None


def _preemption_regression(trial: Trial, s: Situation, since: Interval) -> str | None:
    """Return a message if clearly more tokens are recomputed than before, and than predicted for the old value, at a
    comparable load.

    Without predictions it waits for the whole trial: longer answers are not caused by the change.
    """
    if not _is_comparable(trial, s) or trial.parameter is Parameter.MAX_NUM_BATCHED_TOKENS:
        return None
    share, before = _share_of_new_victims(since), trial.recomputed_share
    if not _is_more(share, before):
        return None
    old = s.predict(s.with_parameter(trial.parameter, trial.before))
    if old is None and s.now - trial.at < s.settings.pace.judge_seconds:
        return None
    if old is None or _is_more(share, old.recomputed_share):
        return f"{share:.1%} of tokens are recomputed, {before:.1%} before"
    return None


def _is_more(share: float, reference: float) -> bool:
    return share > WORSE_FACTOR * reference + WORSE_SHARE


def _share_of_new_victims(since: Interval) -> float:
    """Return the share of tokens recomputed for requests that were preempted since the change. Earlier victims are
    recomputed too, and sooner with more room.
    """
    decode = since.decode
    if decode is None or decode.sequences <= 0 or since.computed_tokens <= 0:
        return since.recomputed_share
    caused = since.preempted_for_room * decode.context / decode.sequences
    return min(since.recomputed_share, caused / since.computed_tokens)


def _attainment_regression(trial: Trial, s: Situation, attained: float | None, requests: int) -> str | None:
    """Return a message if clearly fewer requests attain the objectives than before, and than predicted for the old
    value.

    Closed-loop clients send fewer requests when they are served worse, so their arrival rate counts too.
    """
    if attained is None or requests < s.settings.pace.least_requests or trial.attained is None:
        return None
    load = s.rate / trial.rate if s.state.clients.are_closed_loop and trial.rate > 0 else 1.0
    if not _is_less(attained * load, trial.attained, requests):
        return None
    old = s.predict(s.with_parameter(trial.parameter, trial.before))
    if old is not None and not _is_less(attained, old.good_share, requests):
        return None
    if attained < trial.attained:
        now, before = format_distinct(attained, trial.attained, percent)
        return f"{now} of {requests} requests attained the objectives, {before} before"
    return (
        f"the arrival rate is {load:.0%} of that before, and {percent(attained)} of {requests} requests attained the "
        f"objectives"
    )


def _is_less(share: float, reference: float, requests: int) -> bool:
    """Return True if `share` is below `reference` by more than chance and CLEAR_LOSS for this number of requests."""
    chance = math.sqrt(CLUSTERING * max(min(reference, 1.0) * (1 - min(reference, 1.0)), 0.01 * 0.99) / requests)
    return share < reference - DEVIATIONS * chance - CLEAR_LOSS


def _is_comparable(trial: Trial, s: Situation) -> bool:
    low, high = sorted((trial.rate, s.rate))
    return low > 0 and high <= COMPARABLE * low


def _describe_outcome(expected: tuple[Expectation, ...], s: Situation, attained: float | None, since: Interval) -> str:
    """Return observed next to predicted values."""
    parts = []
    for entry in expected:
        seen = _observed(entry.measure, s, attained, since)
        if seen is not None:
            predicted, observed = show_amount(entry.measure, entry.after), show_amount(entry.measure, seen)
            parts.append(f"predicted {entry.measure.value} {predicted}, observed {observed}")
    if not parts and attained is not None:
        parts.append(f"attainment since then {attained:.1%}")
    return "; ".join(parts) or "no regression"

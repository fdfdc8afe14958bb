"""A change of a hot knob is a trial: it stays only if what it was predicted to bring appeared, and is undone if not.

The mechanism shows within two looks (the share of tokens computed twice), what users feel takes longer: near capacity
latencies vary by a third from minute to minute, and misses come in clusters. So a trial is undone when things are worse
than they were by clearly more than chance, and kept when they are not for long enough.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from trimtab_operator.tuner.explanation import apart, percent
from trimtab_operator.tuner.knobs import Knob
from trimtab_operator.tuner.moves import Expectation, Measure
from trimtab_operator.tuner.observation import Interval
from trimtab_operator.tuner.situation import Situation
from trimtab_operator.tuner.state import Trial

SETTLE_SECONDS = 5.0  # what was measured this soon after a change began before it
LEAST_LOOKS = 2  # intervals of each replica before anything is said
CLUSTERING = 15.0  # misses come together: the variance of their count is so many times the binomial's
DEVIATIONS = 3.0
CLEAR_LOSS = 0.02  # of the attainment, beyond chance
WORSE_FACTOR = 1.5  # times the tokens computed twice …
WORSE_SHARE = 0.01  # … and this share of all more
AWAITED = 2.0  # times as long as usual a trial is open at most, while replicas come that were asked for with it
COMPARABLE = 1.3  # loads within this factor of each other are comparable


class Verdict(StrEnum):
    """How a trial stands."""

    OPEN = "open"
    KEPT = "kept"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict, and the words for what was seen."""

    verdict: Verdict
    seen: str = ""


OPEN = Judgement(Verdict.OPEN)


def judged(
    trial: Trial,
    s: Situation,
    *,
    attained: float | None,
    requests: int,
    since: Interval | None,
    is_awaited: bool = False,
) -> Judgement:
    """Judge a trial: `attained` of `requests` that came since the change, and what the replicas did since then.
    `is_awaited`: too few came since as many replicas serve as were asked for, and what users felt before tells of their
    number."""
    if since is None or since.seconds < LEAST_LOOKS * s.settings.pace.tick_seconds * max(1, s.replicas) * 0.9:
        return OPEN
    preemption = _by_preemption(trial, s, since)
    if preemption is not None:
        return Judgement(Verdict.BAD, preemption)
    felt = _by_feeling(trial, s, attained, requests)
    if felt is not None:
        return Judgement(Verdict.BAD, felt)
    if s.now - trial.at < (AWAITED if is_awaited else 1.0) * s.settings.pace.judge_seconds:
        return OPEN
    untold = "; what users felt could not be told, as replicas came all the time" if is_awaited else ""
    return Judgement(Verdict.KEPT, _seen(trial.expected, attained, since) + untold)


def _by_preemption(trial: Trial, s: Situation, since: Interval) -> str | None:
    """Clearly more is computed twice than before, and than the old value is predicted to bring now, at a comparable
    load. Where nothing can be predicted, it is waited for as long as a trial lasts: that answers have grown longer is
    not the change's fault."""
    if not _is_comparable(trial, s) or trial.knob is Knob.MAX_NUM_BATCHED_TOKENS:
        return None
    share, before = _share_of_new_victims(since), trial.recomputed_share
    if not _is_more(share, before):
        return None
    old = s.predicted(s.with_knob(trial.knob, trial.before))
    if old is None and s.now - trial.at < s.settings.pace.judge_seconds:
        return None
    if old is None or _is_more(share, old.recomputed_share):
        return f"{share:.1%} of the tokens are computed twice, {before:.1%} before"
    return None


def _is_more(share: float, reference: float) -> bool:
    return share > WORSE_FACTOR * reference + WORSE_SHARE


def _share_of_new_victims(since: Interval) -> float:
    """Share of the tokens computed twice for requests that were preempted since the change: those from before it are
    computed again now too, the sooner the more room there is."""
    decode = since.decode
    if decode is None or decode.sequences <= 0 or since.computed_tokens <= 0:
        return since.recomputed_share
    caused = since.preempted_for_room * decode.context / decode.sequences
    return min(since.recomputed_share, caused / since.computed_tokens)


def _by_feeling(trial: Trial, s: Situation, attained: float | None, requests: int) -> str | None:
    """Clearly fewer requests keep their promises than before, and than the old value is predicted to bring now. Clients
    that wait send fewer where they are served worse: of them it is counted beside how many came before."""
    if attained is None or requests < s.settings.pace.least_requests or trial.attained is None:
        return None
    come = s.rate / trial.rate if s.memory.clients.do_wait and trial.rate > 0 else 1.0
    if not _is_less(attained * come, trial.attained, requests):
        return None
    old = s.predicted(s.with_knob(trial.knob, trial.before))
    if old is not None and not _is_less(attained, old.good_share, requests):
        return None
    if attained < trial.attained:
        now, before = apart(attained, trial.attained, percent)
        return f"{now} of {requests} requests kept their promises, {before} before"
    return f"{come:.0%} as many requests come as before, and {percent(attained)} of {requests} kept their promises"


def _is_less(share: float, reference: float, requests: int) -> bool:
    """Whether so many requests tell the share from the reference, beyond a loss that nobody minds."""
    chance = math.sqrt(CLUSTERING * max(min(reference, 1.0) * (1 - min(reference, 1.0)), 0.01 * 0.99) / requests)
    return share < reference - DEVIATIONS * chance - CLEAR_LOSS


def _is_comparable(trial: Trial, s: Situation) -> bool:
    low, high = sorted((trial.rate, s.rate))
    return low > 0 and high <= COMPARABLE * low


def _seen(expected: tuple[Expectation, ...], attained: float | None, since: Interval) -> str:
    """What came of it, beside what was predicted."""
    said = []
    for entry in expected:
        if entry.measure is Measure.ATTAINMENT and attained is not None:
            said.append(f"predicted attainment {entry.after:.1%}, seen {attained:.1%}")
        elif entry.measure is Measure.RECOMPUTED:
            said.append(f"predicted recomputed share {entry.after:.1%}, seen {since.recomputed_share:.1%}")
    if not said and attained is not None:
        said.append(f"attainment since then {attained:.1%}")
    return "; ".join(said) or "nothing became worse"

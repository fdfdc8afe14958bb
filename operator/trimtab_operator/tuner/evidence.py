"""Evidence: loads that a number of replicas attained or did not, with their configuration.

It is stored, and bounds predictions: replicas that attained a load are not predicted to fail at it, and those that
failed at a load are not predicted to hold more.

Loads are compared in work: requests a second times the mean cost of a request. Evidence about other lengths, or another
configuration, is no evidence.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from trimtab_operator.tuner.prediction import Candidate

OBSERVED_SECONDS = 150.0  # of unchanged replicas and parameters
KEEP_SECONDS = 6 * 3600.0  # that a held load is evidence
KEEP_FAILED_SECONDS = 1800.0  # shorter: a queue from before, or a slow replica, may have been the cause
REFRESH_SECONDS = 1800.0  # age after which an unchanged bound is recorded again
LEAST_REQUESTS = 100
MAX_RECORDS = 24
ALIKE = 0.15  # relative difference of the mean context within which lengths are alike
CLUSTERING = 15.0  # violations cluster: factor of their count's variance over the binomial one
DEVIATIONS = 3.0
NEWS = 1.03  # factor of the load by which a record must extend a bound
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Record:
    """Load that `candidate` attained, or did not, until `at`."""

    at: float
    candidate: Candidate
    rate: float
    """Requests a second, of all replicas."""
    work: float
    """Mean cost of a request, in seconds of a well-filled replica."""
    context: float
    """Mean tokens of a request half-way through its output."""
    is_attained: bool

    @property
    def load(self) -> float:
        """Work per second and replica."""
        return self.rate * self.work / self.candidate.replicas

    def is_about(self, candidate: Candidate, context: float) -> bool:
        """Return True if it has the same configuration and similar lengths."""
        is_alike = abs(self.context - context) <= ALIKE * context
        return is_alike and replace(candidate, replicas=self.candidate.replicas) == self.candidate


@dataclass(frozen=True, slots=True)
class Evidence:
    """Records, oldest first."""

    records: tuple[Record, ...] = ()

    def verdict(self, candidate: Candidate, rate: float, *, work: float, context: float, now: float) -> bool | None:
        """Return True if at least this load was attained by at most as many replicas, False if at most this load was
        not attained by at least as many; None without evidence. The newest record counts.
        """
        load = rate * work / candidate.replicas
        for record in reversed(self.fresh(now)):
            if not record.is_about(candidate, context):
                continue
            if (
                record.is_attained
                and record.candidate.replicas <= candidate.replicas
                and load <= (1 + ROUNDING) * record.load
            ):
                return True
            if (
                not record.is_attained
                and record.candidate.replicas >= candidate.replicas
                and load >= (1 - ROUNDING) * record.load
            ):
                return False
        return None

    def fresh(self, now: float) -> list[Record]:
        """Return the records that have not expired."""
        return [
            record
            for record in self.records
            if 0 <= now - record.at <= (KEEP_SECONDS if record.is_attained else KEEP_FAILED_SECONDS)
        ]

    def is_news(self, record: Record) -> bool:
        """Return True if the record extends what is known, or renews it after REFRESH_SECONDS."""
        for known in self.fresh(record.at):
            if known.is_attained is not record.is_attained or not known.is_about(record.candidate, record.context):
                continue
            if known.candidate.replicas != record.candidate.replicas or record.at - known.at > REFRESH_SECONDS:
                continue
            if record.load <= NEWS * known.load if record.is_attained else record.load >= known.load / NEWS:
                return False
        return True

    def with_record(self, record: Record) -> Evidence:
        """Return the evidence with one more record. Records that it contradicts are dropped."""
        kept: Iterable[Record] = (known for known in self.fresh(record.at) if not _contradicts(record, known))
        return Evidence((*kept, record)[-MAX_RECORDS:])


def _contradicts(new: Record, old: Record) -> bool:
    """Return True if both cannot be true: a load was attained, and a lower one was not."""
    if new.is_attained is old.is_attained or not old.is_about(new.candidate, new.context):
        return False
    held, failed = (new, old) if new.is_attained else (old, new)
    return held.candidate.replicas <= failed.candidate.replicas and held.load >= failed.load


def judge(share: float, wanted: float, requests: int) -> bool | None:
    """Return True if the observed share attains the objective, False if it clearly does not; None in between."""
    if requests < LEAST_REQUESTS:
        return None
    if share >= wanted:
        return True
    chance = math.sqrt(CLUSTERING * wanted * (1 - wanted) / requests)
    return False if share < wanted - DEVIATIONS * chance else None

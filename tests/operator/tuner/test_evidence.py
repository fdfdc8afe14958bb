"""Evidence: loads that were attained or not bound predictions for the same lengths and configuration."""

from __future__ import annotations

from dataclasses import replace

import pytest
from trimtab_operator.tuner.evidence import (
    KEEP_FAILED_SECONDS,
    KEEP_SECONDS,
    MAX_RECORDS,
    REFRESH_SECONDS,
    Evidence,
    Record,
    judge,
)
from trimtab_operator.tuner.prediction import Candidate

THREE = Candidate(3, 256, 1024, 62_500)
WORK, CONTEXT = 0.1, 1000.0


def make_record(rate: float, *, replicas: int = 3, is_attained: bool = True, at: float = 0.0) -> Record:
    return Record(at, replace(THREE, replicas=replicas), rate, WORK, CONTEXT, is_attained)


def verdict(
    evidence: Evidence, replicas: int, rate: float, *, now: float = 60.0, context: float = CONTEXT
) -> bool | None:
    return evidence.verdict(replace(THREE, replicas=replicas), rate, work=WORK, context=context, now=now)


def test_held_load_bounds_capacity_from_below() -> None:
    held = Evidence((make_record(12.0),))
    assert verdict(held, 3, 11.9) is True
    assert verdict(held, 3, 12.1) is None
    assert verdict(held, 4, 16.0) is True
    assert verdict(held, 2, 8.0) is None  # fewer replicas smooth a load less


def test_failed_load_bounds_capacity_from_above() -> None:
    failed = Evidence((make_record(12.0, is_attained=False),))
    assert verdict(failed, 3, 12.1) is False
    assert verdict(failed, 3, 11.9) is None
    assert verdict(failed, 2, 8.0) is False
    assert verdict(failed, 4, 16.0) is None


@pytest.mark.parametrize(
    "candidate",
    [replace(THREE, max_num_batched_tokens=2048), replace(THREE, kv_blocks=50_000), replace(THREE, watermark=0.05)],
)
def test_evidence_holds_only_for_its_configuration(candidate: Candidate) -> None:
    held = Evidence((make_record(12.0),))
    assert held.verdict(candidate, 5.0, work=WORK, context=CONTEXT, now=60.0) is None


def test_evidence_compares_loads_by_their_work() -> None:
    held = Evidence((make_record(12.0),))
    assert held.verdict(THREE, 11.0, work=1.2 * WORK, context=CONTEXT, now=60.0) is None
    assert held.verdict(THREE, 14.0, work=0.8 * WORK, context=CONTEXT, now=60.0) is True
    assert verdict(held, 3, 5.0, context=1.3 * CONTEXT) is None


@pytest.mark.parametrize(("is_attained", "seconds"), [(True, KEEP_SECONDS), (False, KEEP_FAILED_SECONDS)])
def test_evidence_expires(is_attained: bool, seconds: float) -> None:
    known, rate = Evidence((make_record(12.0, is_attained=is_attained),)), 12.0
    assert verdict(known, 3, rate, now=seconds) is is_attained
    assert verdict(known, 3, rate, now=seconds + 1.0) is None
    assert verdict(known, 3, rate, now=-1.0) is None  # the clock was set back


def test_new_record_drops_contradicting_ones() -> None:
    known = Evidence((make_record(12.0),)).with_record(make_record(10.0, is_attained=False, at=60.0))
    assert known.records == (make_record(10.0, is_attained=False, at=60.0),)
    known = known.with_record(make_record(11.0, at=120.0))
    assert verdict(known, 3, 10.5, now=180.0) is True


def test_only_news_is_recorded() -> None:
    known = Evidence((make_record(12.0),))
    assert not known.is_news(make_record(12.0, at=60.0))
    assert known.is_news(make_record(13.0, at=60.0))
    assert known.is_news(make_record(12.0, at=REFRESH_SECONDS + 1.0))
    assert known.is_news(make_record(12.0, replicas=4, at=60.0))
    for index in range(3 * MAX_RECORDS):
        known = known.with_record(make_record(12.0 + index, at=60.0 * index))
    assert len(known.records) == MAX_RECORDS


@pytest.mark.parametrize(
    ("share", "requests", "verdict"),
    [(0.995, 500, True), (0.99, 99, None), (0.98, 500, None), (0.90, 500, False), (0.90, 50, None)],
)
def test_attainment_is_evidence_beyond_chance(share: float, requests: int, verdict: bool | None) -> None:
    assert judge(share, 0.99, requests) is verdict

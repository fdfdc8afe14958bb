"""Timelines: values per slot, gaps, and expiry."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from trimtab_operator.board.timeline import (
    COARSE_STEP_SECONDS,
    FINE_STEP_SECONDS,
    MAX_GAP_SECONDS,
    NUM_FINE_SLOTS,
    Series,
    SlotBuffer,
    Timeline,
)

START = 1_790_000_400.0  # the start of a fine and of a coarse slot


def make_timeline(*records: tuple[float, dict[Series, float]]) -> Timeline:
    timeline = Timeline()
    for offset, values in records:
        timeline.add(START + offset, values)
    return timeline


def row(buffer: SlotBuffer, series: Series, *, now: float, count: int) -> list[float | None]:
    return buffer.read(START + now)[1].get(series, [None] * buffer.num_slots)[-count:]


def test_slot_keeps_mean_peak_and_last_value() -> None:
    timeline = make_timeline(
        (1, {}),
        (6, {Series.REQUESTS_PER_SECOND: 4.0, Series.TTFT: 0.9, Series.MAX_NUM_SEQS: 64}),
        (11, {Series.REQUESTS_PER_SECOND: 8.0, Series.TTFT: 0.2, Series.MAX_NUM_SEQS: 96}),
    )
    found = {name: values[-1] for name, values in timeline.fine.read(START + 11)[1].items()}
    assert found == {Series.REQUESTS_PER_SECOND: 6.0, Series.TTFT: 0.9, Series.MAX_NUM_SEQS: 96.0}


def test_mean_is_weighted_by_time() -> None:
    timeline = make_timeline((0, {}), (60, {Series.REQUESTS_PER_SECOND: 0.0}), (80, {Series.REQUESTS_PER_SECOND: 8.0}))
    assert row(timeline.coarse, Series.REQUESTS_PER_SECOND, now=80, count=1) == [2.0]


def test_values_fill_slots_since_previous_record() -> None:
    timeline = make_timeline((0, {}), (60, {Series.REQUESTS_PER_SECOND: 3.0}))
    assert row(timeline.fine, Series.REQUESTS_PER_SECOND, now=60, count=5) == [3.0] * 5


def test_long_gap_stays_empty() -> None:
    timeline = make_timeline((0, {Series.RUNNING: 1.0}), (MAX_GAP_SECONDS + 30, {Series.RUNNING: 1.0}))
    values = row(timeline.fine, Series.RUNNING, now=MAX_GAP_SECONDS + 30, count=9)
    assert values == [1.0, *[None] * 7, 1.0]


def test_series_without_values_are_left_out() -> None:
    timeline = make_timeline((0, {Series.RUNNING: 1.0, Series.TTFT: math.nan}))
    assert set(timeline.fine.read(START)[1]) == {Series.RUNNING}


def test_old_slots_expire() -> None:
    hour = FINE_STEP_SECONDS * NUM_FINE_SLOTS
    timeline = make_timeline((0, {Series.RUNNING: 1.0}))
    assert Series.RUNNING in timeline.fine.read(START + hour - 1)[1]
    assert Series.RUNNING not in timeline.fine.read(START + hour)[1]
    assert Series.RUNNING in timeline.coarse.read(START + hour)[1]
    timeline.add(START + hour + 1, {Series.WAITING: 2.0})
    assert set(timeline.fine.read(START + hour + 1)[1]) == {Series.WAITING}


@pytest.mark.parametrize("offset", [0.0, -5.0, -COARSE_STEP_SECONDS])
def test_record_of_the_past_is_ignored(offset: float) -> None:
    timeline = make_timeline((0, {Series.RUNNING: 1.0}), (offset, {Series.RUNNING: 9.0}))
    assert row(timeline.fine, Series.RUNNING, now=0, count=1) == [1.0]


def test_read_has_one_value_per_slot() -> None:
    times, found = make_timeline((0, {Series.RUNNING: 1.0})).coarse.read(START)
    assert times[-1] == START
    assert len(times) == len(found[Series.RUNNING]) == 144
    assert {later - earlier for earlier, later in pairwise(times)} == {COARSE_STEP_SECONDS}

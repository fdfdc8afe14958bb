"""Replay of recordings: the same decisions over its own recording, and a row per difference with other settings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from fake_prometheus import exposed
from trimtab_operator.tuner.decide import decide
from trimtab_operator.tuner.moves import Reason
from trimtab_operator.tuner.parameters import Parameter, Value
from trimtab_operator.tuner.replay import DecisionRecord, ReplayReport, Verdict, compare_decisions, record_of, replay
from trimtab_operator.tuner.samples import Histogram, ReplicaSnapshot
from trimtab_operator.tuner.samples.prometheus import DuplicateTargets, PrometheusNaming, StoredSeries
from trimtab_operator.tuner.samples.recorded import Limits, Tick, build_ticks, sample_histogram
from trimtab_operator.tuner.samples.series import Unreadable
from trimtab_operator.tuner.settings import Bounds, Mode, Pace, Scaling, Settings
from trimtab_operator.tuner.state import TunerState
from tuner_snapshots import FIELDS, PARAMETERS, make_replica_snapshot, make_sample

TICK, BEGIN = 15.0, 1000.0
UTILIZATION = Parameter.GPU_MEMORY_UTILIZATION
AUTO = Settings(Mode.AUTO, starts=PARAMETERS, pace=Pace(tick_seconds=TICK))
LIMITS: Limits = {parameter: (field.minimum, field.maximum) for parameter, field in FIELDS.items()}


def record_run(ticks: int, settings: Settings = AUTO) -> tuple[list[Tick], list[DecisionRecord]]:
    """Return the ticks and decisions of a run: an engine that recomputes 14 % of its tokens, and runs PATCHed values
    from the next sample on.
    """
    state, values, generation = TunerState(), dict(PARAMETERS), 1
    seen: list[Tick] = []
    made: list[DecisionRecord] = []
    for number in range(ticks):
        now = BEGIN + TICK * number
        sample = make_sample(
            now, generation=generation, kv_usage=0.99, preemptions={"capacity": now},
            recomputed_tokens=20.0 * now,
        )  # fmt: skip
        snapshot = make_replica_snapshot("m-g0-0", sample, values=values)
        seen.append(Tick(now, (snapshot,)))
        outcome = decide([snapshot], state, settings, now)
        state = outcome.state
        made += [record_of(decision) for decision in outcome.decisions]
        for patch in outcome.patches.values():
            values.update(patch)
            generation += 1
    return seen, made


def verdicts(then: Sequence[DecisionRecord], again: ReplayReport) -> list[str]:
    return [row.verdict.value for row in compare_decisions(then, again.decided, within=120.0)]


def test_replay_of_own_recording_decides_the_same() -> None:
    ticks, made = record_run(40)
    assert [decision.after for decision in made] == [0.89, 0.92]
    again = replay(ticks, AUTO)
    assert set(verdicts(made, again)) == {"same"}
    assert {spell.reason for spell in again.periods} == {"Scraped"}


def test_recorded_changes_replace_recorded_decisions() -> None:
    ticks, made = record_run(40)
    again = replay(ticks, AUTO)
    assert [(m.target, m.after) for m in again.moved] == [(m.target, m.after) for m in made]
    assert set(verdicts(again.moved, again)) == {"same"}


def test_other_bounds_give_one_row_per_difference() -> None:
    ticks, made = record_run(40)
    pinned = replace(AUTO, bounds={UTILIZATION: Bounds(0.8, 0.8)})
    rows = compare_decisions(made, replay(ticks, pinned).decided, within=120.0)
    then = [(row.then.target, row.verdict) for row in rows if row.then is not None]
    assert ("gpu_memory_utilization", Verdict.ONLY_RECORDED) in then
    smaller = replace(AUTO, bounds={UTILIZATION: Bounds(0.5, 0.85)})
    values = {row.verdict for row in compare_decisions(made, replay(ticks, smaller).decided, within=120.0)}
    assert Verdict.DIFFERENT_VALUE in values


def test_unapplied_decision_is_one_record_with_end_time() -> None:
    """Recorded with the tuner off: the engine was never changed."""
    ticks, _ = record_run(40, replace(AUTO, mode=Mode.OFF))
    again = replay(ticks, AUTO)
    first = again.decided[0]
    assert (first.target, first.reason) == ("gpu_memory_utilization", Reason.KV_CACHE_TOO_SMALL.value)
    assert first.until is not None
    assert first.until > first.at + 300
    assert again.moved == ()
    assert len([made for made in again.decided if made.target == first.target]) == 1


def test_manual_change_is_only_recorded() -> None:
    calm = []
    for number in range(20):
        now = BEGIN + TICK * number
        values: dict[Parameter, Value] = {Parameter.MAX_NUM_SEQS: 64 if number < 10 else 32}
        calm.append(Tick(now, (make_replica_snapshot("m", make_sample(now, kv_usage=0.3), values=values),)))
    again = replay(calm, AUTO)
    (row,) = compare_decisions(again.moved, again.decided, within=120.0)
    assert (row.verdict, row.then and row.then.after) == (Verdict.ONLY_RECORDED, 32)


def test_empty_recording_is_rejected() -> None:
    with pytest.raises(ValueError, match="no samples"):
        replay([], AUTO)


def at(seconds: float, after: float, *, before: float = 1.0, until: float | None = None) -> DecisionRecord:
    return DecisionRecord(seconds, "max_num_seqs", before, after, until=until)


@pytest.mark.parametrize(
    ("then", "now", "verdicts"),
    [
        ([at(0, 2)], [at(100, 2)], ["same"]),
        ([at(0, 2)], [at(100, 3)], ["different value"]),
        ([at(0, 2)], [at(130, 2)], ["only recorded", "only replayed"]),
        ([at(0, 2)], [at(0, 0.5)], ["only recorded", "only replayed"]),  # the other way
        ([at(300, 2)], [at(0, 2, until=290)], ["same"]),  # wanted all the time
        ([at(0, 2), at(60, 2)], [at(50, 2)], ["only recorded", "same"]),  # the nearest are paired
    ],
)
def test_decisions_are_paired_by_target_direction_and_time(
    then: list[DecisionRecord], now: list[DecisionRecord], verdicts: list[str]
) -> None:
    assert sorted(row.verdict.value for row in compare_decisions(then, now, within=120.0)) == sorted(verdicts)


# --- what Prometheus stored -------------------------------------------------------------------------------------------


def stored(ticks: Sequence[Tick]) -> list[StoredSeries]:
    """Return the stored series of these ticks: metrics, configuration and memory."""
    found: dict[tuple[str, tuple[tuple[str, str], ...]], list[tuple[float, float]]] = {}
    for tick in ticks:
        for snapshot in tick.snapshots:
            for name, labels, value in exposed_whole(snapshot):
                key = name, tuple(sorted({"pod": snapshot.replica, "job": "engines", **labels}.items()))
                found.setdefault(key, []).append((tick.at, value))
    return [StoredSeries(name, dict(labels), samples) for (name, labels), samples in found.items()]


def exposed_whole(snapshot: ReplicaSnapshot) -> list[tuple[str, dict[str, str], float]]:
    assert snapshot.sample is not None
    assert snapshot.config is not None
    assert snapshot.ledger is not None
    ledger = snapshot.ledger
    mapped = ledger.blocks_total * ledger.bytes_per_block
    free = ledger.free_bytes or 0
    state = {"kv_mapped": mapped, "kv_used": 7, "free": free, "weights": ledger.device_bytes - mapped - free}
    blocks = {"total": ledger.blocks_total, "cap": ledger.blocks_total + 2000}
    return [
        *exposed(snapshot.sample),
        *(
            ("trimtab_config_value", {"field": parameter.value}, value)
            for parameter, value in snapshot.config.applied.items()
        ),
        *(("trimtab_memory_bytes", {"kind": kind}, float(size)) for kind, size in state.items()),
        *(("trimtab_kv_blocks", {"state": state}, float(count)) for state, count in blocks.items()),
    ]


def test_replay_from_prometheus_decides_alike() -> None:
    ticks, made = record_run(40)
    read = build_ticks(stored(ticks), PrometheusNaming(), every=TICK, limits=LIMITS, block_size=16)
    assert len(read) == len(ticks)
    snapshot = read[5].snapshots[0]
    assert snapshot.ledger is not None
    assert (snapshot.ledger.device_bytes, snapshot.ledger.blocks_total, snapshot.ledger.kv_tokens) == (
        16_000_000_000,
        10_000,
        160_000,
    )
    assert set(verdicts(made, replay(read, AUTO))) == {"same"}


def test_the_last_scrape_of_a_recording_is_seen() -> None:
    ticks, _ = record_run(3)
    late = [*ticks[:2], Tick(ticks[2].at + 0.4, ticks[2].snapshots)]
    last = (
        build_ticks(stored(late), PrometheusNaming(), every=TICK, limits=LIMITS, block_size=16)[-1].snapshots[0].sample
    )
    assert last is not None
    assert last.at == late[2].at


def test_repeated_samples_of_a_range_query_are_one_scrape() -> None:
    ticks, made = record_run(40)
    doubled = [Tick(tick.at + shift, tick.snapshots) for tick in ticks for shift in (0.0, 7.5)]
    read = build_ticks(stored(doubled), PrometheusNaming(), every=TICK, limits=LIMITS, block_size=16)
    assert set(verdicts(made, replay(read, AUTO))) == {"same"}


def test_temporary_replica_is_present_while_recorded() -> None:
    ticks, _ = record_run(20)
    pair = [
        Tick(
            tick.at, (*tick.snapshots, replace(tick.snapshots[0], replica="m-g1-0")) if 8 <= n < 12 else tick.snapshots
        )
        for n, tick in enumerate(ticks)
    ]
    read = build_ticks(stored(pair), PrometheusNaming(), every=TICK, limits=LIMITS, block_size=16)
    there = [len(tick.snapshots) for tick in read]
    assert there == [1] * 8 + [2] * 7 + [1] * 5  # its removal is unknown for three samples
    again = replay(read, AUTO)
    assert again.replicas == 2
    assert [(m.before, m.after) for m in again.moved if m.target == "replicas"] == [(1, 2), (2, 1)]


def test_replica_served_minutes_later_matches_its_request() -> None:
    asked = DecisionRecord(0.0, "replicas", 1, 2, Reason.TOO_FEW_REPLICAS.value)
    served = DecisionRecord(180.0, "replicas", 1, 2)
    assert [row.verdict for row in compare_decisions([served], [asked], within=60.0)] == [Verdict.SAME]
    decided = replace(served, reason=Reason.TOO_FEW_REPLICAS.value)
    assert {row.verdict for row in compare_decisions([decided], [asked], within=60.0)} == {
        Verdict.ONLY_RECORDED,
        Verdict.ONLY_REPLAYED,
    }


def test_recorded_replica_count_is_requested() -> None:
    """No requests arrive: the tuner would remove a replica again and again, and the recording stays at three."""
    still = []
    for n in range(80):
        now = BEGIN + TICK * n
        idle = replace(make_sample(50.0, running=0.0), at=now)
        still.append(Tick(now, tuple(make_replica_snapshot(f"m-g{r}-0", idle) for r in range(3))))
    scaled = replace(AUTO, scaling=Scaling(1, 3))
    (fewer,) = replay(still, scaled).decided
    assert (fewer.target, fewer.before, fewer.after) == ("replicas", 3, 2)
    assert fewer.until is not None


def test_recording_without_configuration_names_missing_series() -> None:
    ticks, _ = record_run(10)
    some = [series for series in stored(ticks) if series.name != "trimtab_config_value"]
    again = replay(build_ticks(some, PrometheusNaming(), every=TICK, limits=LIMITS, block_size=16), AUTO)
    assert {spell.reason for spell in again.periods} == {"MetricsMissing"}
    assert "the recording lacks trimtab_config_value" in again.periods[0].message


def test_a_recording_of_two_scrape_jobs_is_refused() -> None:
    ticks, _ = record_run(3)
    both = [*stored(ticks), *(replace(s, labels={**s.labels, "job": "other"}) for s in stored(ticks))]
    with pytest.raises(DuplicateTargets, match="2 targets"):
        build_ticks(both, PrometheusNaming(), every=TICK, limits=LIMITS, block_size=16)


def test_a_recording_of_something_else_is_refused() -> None:
    with pytest.raises(Unreadable, match="no series of an engine"):
        build_ticks(
            [StoredSeries("up", {"pod": "p"}, [(1.0, 1.0)])],
            PrometheusNaming(),
            every=TICK,
            limits=LIMITS,
            block_size=16,
        )


@pytest.mark.parametrize("count", [1, 7, 100])
def test_drawn_values_keep_the_sum_and_stay_in_their_buckets(count: int) -> None:
    histogram = Histogram((10.0, 100.0, math.inf), (0.3 * count, 0.9 * count, count), 50.0 * count)
    values = sample_histogram(histogram, count)
    assert math.fsum(values) == pytest.approx(50.0 * count)
    assert values == sorted(values)
    assert min(values) > 0

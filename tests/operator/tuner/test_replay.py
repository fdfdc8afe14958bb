"""Deciding again: a law decides the same over a recording of its own loop, and how another one differs is told."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from fake_prometheus import exposed
from trimtab_operator.tuner.decide import decide
from trimtab_operator.tuner.knobs import Knob, Value
from trimtab_operator.tuner.moves import Reason
from trimtab_operator.tuner.replay import Made, Replayed, Verdict, compared, made_of, replay
from trimtab_operator.tuner.samples import Histogram, Look
from trimtab_operator.tuner.samples.prometheus import Duplicated, Naming, StoredSeries
from trimtab_operator.tuner.samples.recorded import Limits, Tick, drawn, ticks_of
from trimtab_operator.tuner.samples.series import Unreadable
from trimtab_operator.tuner.settings import Bounds, Mode, Pace, Scaling, Settings
from trimtab_operator.tuner.state import Memory
from tuner_looks import FIELDS, KNOBS, a_look, a_sample

TICK, BEGIN = 15.0, 1000.0
UTILIZATION = Knob.GPU_MEMORY_UTILIZATION
AUTO = Settings(Mode.AUTO, starts=KNOBS, pace=Pace(tick_seconds=TICK))
LIMITS: Limits = {knob: (field.minimum, field.maximum) for knob, field in FIELDS.items()}


def lived(ticks: int, settings: Settings = AUTO) -> tuple[list[Tick], list[Made]]:
    """The loop as it ran: an engine that computes 14 % of its tokens twice, and runs what it is PATCHed to from the
    next look on."""
    memory, values, generation = Memory(), dict(KNOBS), 1
    seen: list[Tick] = []
    made: list[Made] = []
    for number in range(ticks):
        now = BEGIN + TICK * number
        sample = a_sample(
            now, generation=generation, kv_usage=0.99, preemptions={"capacity": now},
            recomputed_tokens=20.0 * now,
        )  # fmt: skip
        look = a_look("m-g0-0", sample, values=values)
        seen.append(Tick(now, (look,)))
        outcome = decide([look], memory, settings, now)
        memory = outcome.memory
        made += [made_of(decision) for decision in outcome.decisions]
        for patch in outcome.patches.values():
            values.update(patch)
            generation += 1
    return seen, made


def verdicts(then: Sequence[Made], again: Replayed) -> list[str]:
    return [row.verdict.value for row in compared(then, again.decided, within=120.0)]


def test_the_same_law_decides_the_same_over_its_own_recording() -> None:
    ticks, made = lived(40)
    assert [decision.after for decision in made] == [0.89, 0.92]
    again = replay(ticks, AUTO)
    assert set(verdicts(made, again)) == {"same"}
    assert {spell.reason for spell in again.spells} == {"Scraped"}


def test_what_the_recording_shows_to_have_been_moved_can_stand_for_what_was_decided() -> None:
    ticks, made = lived(40)
    again = replay(ticks, AUTO)
    assert [(m.target, m.after) for m in again.moved] == [(m.target, m.after) for m in made]
    assert set(verdicts(again.moved, again)) == {"same"}


def test_other_bounds_decide_otherwise_and_each_difference_is_one_row() -> None:
    ticks, made = lived(40)
    pinned = replace(AUTO, bounds={UTILIZATION: Bounds(0.8, 0.8)})
    rows = compared(made, replay(ticks, pinned).decided, within=120.0)
    then = [(row.then.target, row.verdict) for row in rows if row.then is not None]
    assert ("gpu_memory_utilization", Verdict.ONLY_THEN) in then
    smaller = replace(AUTO, bounds={UTILIZATION: Bounds(0.5, 0.85)})
    values = {row.verdict for row in compared(made, replay(ticks, smaller).decided, within=120.0)}
    assert Verdict.OTHER_VALUE in values


def test_what_nobody_did_is_wanted_once_for_as_long_as_it_lasts() -> None:
    """Recorded with the tuner off: the engine was never changed, whatever this law asks for."""
    ticks, _ = lived(40, replace(AUTO, mode=Mode.OFF))
    again = replay(ticks, AUTO)
    first = again.decided[0]
    assert (first.target, first.reason) == ("gpu_memory_utilization", Reason.KV_CACHE_TOO_SMALL.value)
    assert first.until is not None
    assert first.until > first.at + 300
    assert again.moved == ()
    assert len([made for made in again.decided if made.target == first.target]) == 1


def test_what_somebody_moved_by_hand_is_only_then() -> None:
    calm = []
    for number in range(20):
        now = BEGIN + TICK * number
        values: dict[Knob, Value] = {Knob.MAX_NUM_SEQS: 64 if number < 10 else 32}
        calm.append(Tick(now, (a_look("m", a_sample(now, kv_usage=0.3), values=values),)))
    again = replay(calm, AUTO)
    (row,) = compared(again.moved, again.decided, within=120.0)
    assert (row.verdict, row.then and row.then.after) == (Verdict.ONLY_THEN, 32)


def test_a_recording_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no moment"):
        replay([], AUTO)


def at(seconds: float, after: float, *, before: float = 1.0, until: float | None = None) -> Made:
    return Made(seconds, "max_num_seqs", before, after, until=until)


@pytest.mark.parametrize(
    ("then", "now", "verdicts"),
    [
        ([at(0, 2)], [at(100, 2)], ["same"]),
        ([at(0, 2)], [at(100, 3)], ["other value"]),
        ([at(0, 2)], [at(130, 2)], ["only then", "only now"]),
        ([at(0, 2)], [at(0, 0.5)], ["only then", "only now"]),  # the other way
        ([at(300, 2)], [at(0, 2, until=290)], ["same"]),  # wanted all the while
        ([at(0, 2), at(60, 2)], [at(50, 2)], ["only then", "same"]),  # the nearest belong together
    ],
)
def test_decisions_are_paired_by_what_they_move_which_way_and_when(
    then: list[Made], now: list[Made], verdicts: list[str]
) -> None:
    assert sorted(row.verdict.value for row in compared(then, now, within=120.0)) == sorted(verdicts)


# --- what Prometheus stored -------------------------------------------------------------------------------------------


def stored(ticks: Sequence[Tick]) -> list[StoredSeries]:
    """What a Prometheus has of these looks: metrics, configuration and memory."""
    found: dict[tuple[str, tuple[tuple[str, str], ...]], list[tuple[float, float]]] = {}
    for tick in ticks:
        for look in tick.looks:
            for name, labels, value in exposed_whole(look):
                key = name, tuple(sorted({"pod": look.replica, "job": "engines", **labels}.items()))
                found.setdefault(key, []).append((tick.at, value))
    return [StoredSeries(name, dict(labels), samples) for (name, labels), samples in found.items()]


def exposed_whole(look: Look) -> list[tuple[str, dict[str, str], float]]:
    assert look.sample is not None
    assert look.config is not None
    assert look.ledger is not None
    ledger = look.ledger
    mapped = ledger.blocks_total * ledger.bytes_per_block
    free = ledger.free_bytes or 0
    memory = {"kv_mapped": mapped, "kv_used": 7, "free": free, "weights": ledger.device_bytes - mapped - free}
    blocks = {"total": ledger.blocks_total, "cap": ledger.blocks_total + 2000}
    return [
        *exposed(look.sample),
        *(("trimtab_config_value", {"field": knob.value}, value) for knob, value in look.config.applied.items()),
        *(("trimtab_memory_bytes", {"kind": kind}, float(size)) for kind, size in memory.items()),
        *(("trimtab_kv_blocks", {"state": state}, float(count)) for state, count in blocks.items()),
    ]


def test_what_prometheus_stored_is_decided_alike() -> None:
    ticks, made = lived(40)
    read = ticks_of(stored(ticks), Naming(), every=TICK, limits=LIMITS, block_size=16)
    assert len(read) == len(ticks)
    look = read[5].looks[0]
    assert look.ledger is not None
    assert (look.ledger.device_bytes, look.ledger.blocks_total, look.ledger.kv_tokens) == (
        16_000_000_000,
        10_000,
        160_000,
    )
    assert set(verdicts(made, replay(read, AUTO))) == {"same"}


def test_the_last_scrape_of_a_recording_is_seen() -> None:
    ticks, _ = lived(3)
    late = [*ticks[:2], Tick(ticks[2].at + 0.4, ticks[2].looks)]
    last = ticks_of(stored(late), Naming(), every=TICK, limits=LIMITS, block_size=16)[-1].looks[0].sample
    assert last is not None
    assert last.at == late[2].at


def test_repeated_samples_of_a_range_query_are_one_scrape() -> None:
    ticks, made = lived(40)
    doubled = [Tick(tick.at + shift, tick.looks) for tick in ticks for shift in (0.0, 7.5)]
    read = ticks_of(stored(doubled), Naming(), every=TICK, limits=LIMITS, block_size=16)
    assert set(verdicts(made, replay(read, AUTO))) == {"same"}


def test_a_replica_that_comes_later_or_goes_is_there_for_as_long_as_it_was() -> None:
    ticks, _ = lived(20)
    pair = [
        Tick(tick.at, (*tick.looks, replace(tick.looks[0], replica="m-g1-0")) if 8 <= n < 12 else tick.looks)
        for n, tick in enumerate(ticks)
    ]
    read = ticks_of(stored(pair), Naming(), every=TICK, limits=LIMITS, block_size=16)
    there = [len(tick.looks) for tick in read]
    assert there == [1] * 8 + [2] * 7 + [1] * 5  # three looks long nobody knows that it has gone
    again = replay(read, AUTO)
    assert again.replicas == 2
    assert [(m.before, m.after) for m in again.moved if m.target == "replicas"] == [(1, 2), (2, 1)]


def test_a_replica_that_served_minutes_later_is_the_one_that_was_asked_for() -> None:
    asked = Made(0.0, "replicas", 1, 2, Reason.TOO_FEW_REPLICAS.value)
    served = Made(180.0, "replicas", 1, 2)
    assert [row.verdict for row in compared([served], [asked], within=60.0)] == [Verdict.SAME]
    decided = replace(served, reason=Reason.TOO_FEW_REPLICAS.value)
    assert {row.verdict for row in compared([decided], [asked], within=60.0)} == {Verdict.ONLY_THEN, Verdict.ONLY_NOW}


def test_while_replicas_are_recorded_as_many_are_asked_for_as_there_were() -> None:
    """No request comes: this law would go to one replica again and again, and the recording stays at three."""
    still = [
        Tick(BEGIN + TICK * n, tuple(a_look(f"m-g{r}-0", replace(a_sample(50.0, running=0.0), at=BEGIN + TICK * n))
                                     for r in range(3)))
        for n in range(80)
    ]  # fmt: skip
    scaled = replace(AUTO, scaling=Scaling(1, 3))
    (fewer,) = replay(still, scaled).decided
    assert (fewer.target, fewer.before, fewer.after) == ("replicas", 3, 1)
    assert fewer.until is not None


def test_a_recording_without_the_configuration_says_what_it_lacks() -> None:
    ticks, _ = lived(10)
    some = [series for series in stored(ticks) if series.name != "trimtab_config_value"]
    again = replay(ticks_of(some, Naming(), every=TICK, limits=LIMITS, block_size=16), AUTO)
    assert {spell.reason for spell in again.spells} == {"MetricsMissing"}
    assert "the recording lacks trimtab_config_value" in again.spells[0].message


def test_a_recording_of_two_scrape_jobs_is_refused() -> None:
    ticks, _ = lived(3)
    both = [*stored(ticks), *(replace(s, labels={**s.labels, "job": "other"}) for s in stored(ticks))]
    with pytest.raises(Duplicated, match="2 targets"):
        ticks_of(both, Naming(), every=TICK, limits=LIMITS, block_size=16)


def test_a_recording_of_something_else_is_refused() -> None:
    with pytest.raises(Unreadable, match="no series of an engine"):
        ticks_of([StoredSeries("up", {"pod": "p"}, [(1.0, 1.0)])], Naming(), every=TICK, limits=LIMITS, block_size=16)


@pytest.mark.parametrize("count", [1, 7, 100])
def test_drawn_values_keep_the_sum_and_stay_in_their_buckets(count: int) -> None:
    histogram = Histogram((10.0, 100.0, math.inf), (0.3 * count, 0.9 * count, count), 50.0 * count)
    values = drawn(histogram, count)
    assert math.fsum(values) == pytest.approx(50.0 * count)
    assert values == sorted(values)
    assert min(values) > 0

"""The persistent state survives an operator restart; invalid text is rejected."""

import json
from dataclasses import replace
from typing import Any

import pytest
from trimtab_operator.tuner.evidence import Evidence, Record
from trimtab_operator.tuner.load import Forecast
from trimtab_operator.tuner.load.demand import Point
from trimtab_operator.tuner.load.season import BUCKETS_PER_DAY, DAY_SECONDS, Bucket, Season
from trimtab_operator.tuner.moves import Decision, Expectation, Measure, Move, Reason, ReplicaCount, Restart
from trimtab_operator.tuner.parameters import Parameter
from trimtab_operator.tuner.prediction import Candidate
from trimtab_operator.tuner.scaling.behavior import ScaleEvent
from trimtab_operator.tuner.scaling.control_law import ScalingState
from trimtab_operator.tuner.state import Pin, Trial, TunerState
from trimtab_operator.tuner.stored import from_json, rebuild_state, to_json

EXPECTED = (Expectation(Measure.KV_TOKENS, 1.0, 2.0, 1.5, float("inf")),)
MOVE = Move(Reason.KV_CACHE_TOO_SMALL, Parameter.GPU_MEMORY_UTILIZATION, 0.8, 0.9, {"kv_usage": 0.99}, EXPECTED)
WHOLE = TunerState(
    applied={Parameter.GPU_MEMORY_UTILIZATION: 0.9, Parameter.MAX_NUM_SEQS: 64},
    starts={Parameter.GPU_MEMORY_UTILIZATION: 0.8},
    moved_at={"replicas": 5.0},
    trial=Trial("abc", Parameter.WATERMARK, 0.0, 0.05, 10.0, EXPECTED, 0.98, 0.02, 3.0),
    pins=(Pin(Parameter.MAX_NUM_SEQS, 9, 32, 100.0), Pin(Parameter.WATERMARK, 0.1, 0.05, 200.0, is_for_mix=True)),
    crashes=(7.0,),
    raised={"uid": 2},
    recommendation=Decision("r", 1.0, Move(Reason.SATURATED, Restart("parallelism.tensor"), None, None), "Saturated."),
    history=(
        Decision("d", 2.0, MOVE, "Raised.", "kept"),
        Decision("e", 3.0, Move(Reason.TOO_FEW_REPLICAS, ReplicaCount(), 1, 2), "Raised."),
    ),
    scaling=ScalingState(
        3,
        events=(ScaleEvent(4.0, 1),),
        began_at=1.0,
    ),
    cold_starts=(42.5, 61.0),
    evidence=Evidence((Record(6.0, Candidate(3, 256, 1024, 62_500, 16, 0.05), 12.5, 0.2, 1300.0, is_attained=True),)),
    forecast=Forecast(Season(7200.0, (1.25, None, 3.0, 0.0), (2, 0, 1, 9999), (Bucket(6, 1.5), Bucket(7, 0.25)))),
)


def test_state_survives_round_trip() -> None:
    assert from_json(to_json(WHOLE)) == WHOLE
    assert from_json(to_json(TunerState())) == TunerState()


def test_cold_starts_are_stored_only_with_scaling() -> None:
    without_scaling = replace(WHOLE, scaling=ScalingState())
    assert to_json(without_scaling) == to_json(replace(without_scaling, cold_starts=()))


def changed(path: list[Any], value: Any) -> str:
    data = json.loads(to_json(WHOLE))
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "x" * 500_000,
        changed(["version"], 1),
        changed(["applied", "gpu_memory_utilization"], float("nan")),
        changed(["applied", "gpu_memory_utilization"], "0.9"),
        changed(["applied", "unknown"], 1),
        changed(["pins", 0, "limit"], True),
        changed(["trial", "parameter"], "color"),
        changed(["history", 0, "reason"], "Because"),
        changed(["scaling", "desired"], -1),
        changed(["scaling", "desired"], 1.5),
        changed(["history", 0, "expected", 0, "low"], None),
        changed(["evidence", 0, "rate"], 0.0),
        changed(["evidence", 0, "candidate", 3], -5),
        changed(["evidence", 0, "candidate"], [1]),
        changed(["forecast", "rates", 0], -1.0),
        changed(["forecast", "rates"], [1.0]),
        changed(["forecast", "rates"], []),
        changed(["forecast", "periods", 0], 1.5),
        changed(["forecast", "period"], 0),
        changed(["forecast", "fresh"], [[1, 1.0]] * 5),
        changed(["forecast", "fresh", 0, 1], "1"),
    ],
)
def test_damaged_state_is_not_read(text: str) -> None:
    assert from_json(text) is None


def test_rebuilt_state_keeps_applied_values_of_status() -> None:
    found = rebuild_state(
        {"max_num_seqs": 32, "watermark": float("nan"), "color": 3, "gpu_memory_utilization": "x"}, starts={}
    )
    assert found.applied == {Parameter.MAX_NUM_SEQS: 32}


def test_state_without_forecast_is_read() -> None:
    data = json.loads(to_json(WHOLE))
    del data["forecast"]
    assert from_json(json.dumps(data)) == replace(WHOLE, forecast=None)


@pytest.mark.parametrize(("days", "most_bytes"), [(1, 2_500), (7, 18_000)])
def test_season_is_small_and_changes_once_per_bucket(days: int, most_bytes: int) -> None:
    season = Season.of(days * DAY_SECONDS, buckets=days * BUCKETS_PER_DAY)
    texts = set()
    for index in range(12 * 24 * 12 * days):
        season = season.with_point(Point(1.7e9 + 300.0 * index, 300.0, 123_456.7 + index % 1_009))
        texts.add(to_json(TunerState(forecast=Forecast(season))))
    assert len(texts) <= 12 * days * BUCKETS_PER_DAY + 1
    text = to_json(TunerState(forecast=Forecast(season)))
    assert len(text) - len(to_json(TunerState())) < most_bytes
    read = from_json(text)
    assert read is not None
    assert read.forecast is not None
    assert (read.forecast.season.rates, read.forecast.season.fresh) == (season.rates, season.fresh)

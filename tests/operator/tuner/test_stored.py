"""What outlives the operator is read back as it was, and nothing else is."""

import json
from typing import Any

import pytest
from trimtab_operator.tuner.knobs import Knob
from trimtab_operator.tuner.moves import Decision, Expectation, Measure, Move, Reason, ReplicaCount, Restart
from trimtab_operator.tuner.scaling.behavior import ScaleEvent
from trimtab_operator.tuner.scaling.law import ScalingMemory
from trimtab_operator.tuner.state import Memory, Pin, Trial
from trimtab_operator.tuner.stored import from_json, rebuilt, to_json

EXPECTED = (Expectation(Measure.KV_TOKENS, 1.0, 2.0, 1.5, float("inf")),)
MOVE = Move(Reason.KV_CACHE_TOO_SMALL, Knob.GPU_MEMORY_UTILIZATION, 0.8, 0.9, {"kv_usage": 0.99}, EXPECTED)
WHOLE = Memory(
    applied={Knob.GPU_MEMORY_UTILIZATION: 0.9, Knob.MAX_NUM_SEQS: 64},
    starts={Knob.GPU_MEMORY_UTILIZATION: 0.8},
    moved_at={"replicas": 5.0},
    trial=Trial("abc", Knob.WATERMARK, 0.0, 0.05, 10.0, EXPECTED, 0.98, 0.02, 3.0),
    pins=(Pin(Knob.MAX_NUM_SEQS, 9, 32, 100.0),),
    crashes=(7.0,),
    raised={"uid": 2},
    recommendation=Decision("r", 1.0, Move(Reason.SATURATED, Restart("parallelism.tensor"), None, None), "Saturated."),
    history=(
        Decision("d", 2.0, MOVE, "Raised.", "kept"),
        Decision("e", 3.0, Move(Reason.TOO_FEW_REPLICAS, ReplicaCount(), 1, 2), "Raised."),
    ),
    scaling=ScalingMemory(
        3,
        events=(ScaleEvent(4.0, 1),),
        hold_seconds=180.0,
        last_in_at=2.0,
        last_in_from=4,
        regretted_at=5.0,
        regretted=3,
        began_at=1.0,
        burst_at=3.0,
        meant=4,
    ),
    cold_starts=(42.5, 61.0),
)


def test_what_was_written_is_read_back() -> None:
    assert from_json(to_json(WHOLE)) == WHOLE
    assert from_json(to_json(Memory())) == Memory()


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
        changed(["trial", "knob"], "color"),
        changed(["history", 0, "reason"], "Because"),
        changed(["scaling", "desired"], -1),
        changed(["scaling", "desired"], 1.5),
        changed(["history", 0, "expected", 0, "low"], None),
    ],
)
def test_what_is_damaged_is_not_read(text: str) -> None:
    assert from_json(text) is None


def test_a_lost_memory_keeps_what_status_says_is_applied() -> None:
    found = rebuilt(
        {"max_num_seqs": 32, "watermark": float("nan"), "color": 3, "gpu_memory_utilization": "x"}, starts={}
    )
    assert found.applied == {Knob.MAX_NUM_SEQS: 32}

"""JSON format of snapshots."""

import math

import pytest
from trimtab_operator.tuner.parameters import FieldRange, Parameter
from trimtab_operator.tuner.samples import (
    Config,
    Counters,
    Finished,
    Gauges,
    Histogram,
    Ledger,
    Phase,
    ReplicaSnapshot,
    RequestUpdates,
    Sample,
    Unfinished,
    Work,
)
from trimtab_operator.tuner.samples.codec import from_json, to_json

WHOLE = ReplicaSnapshot(
    replica="m-0",
    phase=Phase.READY,
    instance="uid",
    since=3.0,
    sample=Sample(
        at=10.0,
        counters=Counters(1.0, 2.0, 3.0, {"capacity": 4.0}, arrived=5.0, decode=Work(1, 2, 3, 4, 5, 6.5)),
        gauges=Gauges(1.0, 2.0, 0.5, 3),
        ttft=Histogram((0.1, math.inf), (1.0, 2.0), 0.5),
        requests=RequestUpdates((Finished(1.0, 2.0, 3, 4, 0.1, None),), (Unfinished(1.0, 2, 3),), 6),
    ),
    config=Config(
        2,
        {Parameter.WATERMARK: 0.05, Parameter.MAX_NUM_SEQS: 8},
        {Parameter.WATERMARK: FieldRange(True, 0.0, 0.9)},
        4096,
    ),
    ledger=Ledger(100, 20, 16, 2),
)


def test_snapshots_survive_round_trip() -> None:
    bare = ReplicaSnapshot("m-1", Phase.PENDING, problem="no node has room")
    assert from_json(to_json((WHOLE, bare), now=12.5)) == ((WHOLE, bare), 12.5)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"version":9,"now":1,"snapshots":[]}', '{"version":1,"now":1,"snapshots":[{}]}']
)
def test_foreign_text_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        from_json(text)

"""Autoscaling under load in virtual time, with whole reconcile iterations and the real control law.

Each replica is a simulated CPU engine. Clients wait for the response before they send the next request.
"""

from __future__ import annotations

import pytest
from loaded_cluster import LoadedCluster

SCALING = {"minReplicas": 1, "maxReplicas": 3, "behavior": {"scaleDown": {"stabilizationWindowSeconds": 10}}}
ENGINE = {"gpuMemoryUtilization": "0.74", "maxNumSeqs": 32, "maxNumBatchedTokens": 512}
PINNED = {
    "gpuMemoryUtilization": {"min": "0.74", "max": "0.74"},
    "maxNumSeqs": {"min": 32, "max": 32},
    "maxNumBatchedTokens": {"min": 512, "max": 512},
    "watermark": {"max": "0.0"},
}


def changes(counts: list[int]) -> list[int]:
    """Return the counts without repetitions."""
    return [count for index, count in enumerate(counts) if index == 0 or counts[index - 1] != count]


@pytest.mark.parametrize("restarts", [False, True])
def test_replicas_follow_load(restarts: bool) -> None:
    """With `restarts`, a new operator continues from the persisted state in the middle of each phase."""
    cluster = LoadedCluster(engine=ENGINE, scaling=SCALING, tuning={"mode": "Auto", "bounds": PINNED})
    counts = list(cluster.counts(60))
    assert set(counts) == {1}
    cluster.load(24)
    up = list(cluster.counts(120))
    if restarts:
        cluster.restart_operator()
    up += cluster.counts(240)
    assert changes(up)[-1] > 1
    assert changes(up) == sorted(changes(up))  # no scale-in while the load lasts
    assert cluster.status["readyReplicas"] == up[-1]
    cluster.load(2, pause_seconds=20.0)
    down = list(cluster.counts(120))
    if restarts:
        cluster.restart_operator()
    down += cluster.counts(600)
    assert 1 in down
    assert len(changes([*counts, *up, *down])) <= 6  # it does not swing, though the owner's window is short
    assert all(1 <= count <= 3 for count in (*up, *down))
    history = [entry for entry in cluster.status["tuning"]["history"] if entry["knob"] == "replicas"]
    assert history[-1]["reason"] == "TooFewReplicas"
    assert "TooManyReplicas" in [entry["reason"] for entry in history]
    assert "replicas were ready" in history[-1]["outcome"]

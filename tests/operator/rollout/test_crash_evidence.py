"""Crash evidence: rates against the former revision, distinct pods, and nothing that the node caused."""

from __future__ import annotations

import random
from datetime import UTC, datetime
from typing import Any

import pytest
from trimtab_operator.builders.pod import CONTAINER
from trimtab_operator.observed.groups import Group
from trimtab_operator.observed.terminations import num_crashes
from trimtab_operator.rollout import crash_evidence
from trimtab_operator.rollout.crash_evidence import CrashEvidence, crashes_per_pod_hour, find_crash_evidence

NOW = 1_000_000.0
HOUR = 3600.0


def time_text(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def make_pod(
    restarts: int = 0,
    *,
    age: float = HOUR,
    ended: float | None = None,
    state: dict[str, Any] | None = None,
    **status: Any,
) -> dict[str, Any]:
    """Return a pod whose engine restarted this often, the last time at `ended`."""
    last = {"terminated": {"exitCode": 1, "reason": "Error", "finishedAt": time_text(ended or NOW)}} if restarts else {}
    container = {"name": CONTAINER, "restartCount": restarts, "state": state or {"running": {}}, "lastState": last}
    return {
        "metadata": {"name": "m-g0-0", "creationTimestamp": time_text(NOW - age)},
        "status": {"containerStatuses": [container], **status},
    }


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes one group of some pods."""
    monkeypatch.setattr(crash_evidence, "own_pods", lambda group: group)

    def make(*pods: dict[str, Any]) -> list[Group]:
        return [pods]  # type: ignore[list-item]

    return make


def evidence(groups: list[Group], *, rate: float | None, known: int = 0) -> CrashEvidence:
    return find_crash_evidence(groups, since=NOW - HOUR, known=known, rate=rate, now=NOW)


def test_base_rate_of_large_fleet_is_no_regression(groups: Any) -> None:
    fleet = [make_pod() for _ in range(57)]
    assert not evidence(groups(*fleet, *(make_pod(1) for _ in range(3))), rate=0.05).is_regression
    assert evidence(groups(*fleet, *(make_pod(1) for _ in range(15))), rate=0.05).is_regression


def test_repeated_crashes_of_one_pod_are_a_regression(groups: Any) -> None:
    assert evidence(groups(make_pod(4), make_pod()), rate=None).is_regression
    assert not evidence(groups(make_pod(2), make_pod()), rate=None).is_regression
    assert not evidence(groups(make_pod(4), make_pod()), rate=None, known=2).is_regression


def test_crashes_before_the_watch_do_not_count(groups: Any) -> None:
    old = make_pod(5, age=9 * HOUR, ended=NOW - 2 * HOUR)
    assert not evidence(groups(old, make_pod(1)), rate=None, known=5).is_regression


def test_rate_of_former_revision_has_a_prior(groups: Any) -> None:
    assert crashes_per_pod_hour([], NOW) == 0.05
    assert crashes_per_pod_hour(groups(make_pod(1, age=80 * HOUR)), NOW) == pytest.approx(0.02)
    assert crashes_per_pod_hour(groups(*(make_pod(age=1000 * HOUR) for _ in range(10))), NOW) < 0.001


KILLED = {"terminated": {"exitCode": 137, "reason": "Error"}}


@pytest.mark.parametrize(
    "pod",
    [
        make_pod(state=KILLED, reason="Evicted", message="The node was low on resource: ephemeral-storage"),
        make_pod(
            state=KILLED, reason="Terminated", message="Pod was terminated in response to imminent node shutdown."
        ),
        make_pod(state=KILLED, conditions=[{"type": "DisruptionTarget", "status": "True"}]),
        {**make_pod(state=KILLED), "metadata": {"name": "m", "deletionTimestamp": time_text(NOW)}},
        make_pod(state={"terminated": {"exitCode": 137, "reason": "ContainerStatusUnknown"}}),
        make_pod(reason="Evicted", containerStatuses=[]),
    ],
)
def test_ends_that_the_node_caused_do_not_count(pod: dict[str, Any]) -> None:
    assert num_crashes(pod) == 0


def test_own_ends_count() -> None:
    assert num_crashes(make_pod(2)) == 2
    assert num_crashes(make_pod(2, state=KILLED)) == 3
    assert num_crashes(make_pod(2, state=KILLED, reason="Evicted")) == 2


def first_regression(chance: random.Random, *, rate: float, days: int, pods: int = 60) -> float | None:
    """Return after how many hours crashes at `rate` per pod and hour are a regression; the former rate was 0.05."""
    hours, counts = 0.0, dict.fromkeys(range(pods), 0)
    while True:
        hours += chance.expovariate(rate * pods)
        if hours > 24 * days:
            return None
        counts[chance.randrange(pods)] += 1
        crashed = [count for count in counts.values() if count]
        if CrashEvidence(sum(crashed), len(crashed), max(crashed), pods, 0.05 * pods * hours).is_regression:
            return hours


def test_base_rate_of_60_replicas_rolls_nothing_back() -> None:
    """A change is watched for a day: 300 of them, of which seven would fill a week."""
    found = [first_regression(random.Random(seed), rate=0.05, days=1) for seed in range(300)]
    assert found == [None] * 300


def test_doubled_rate_of_60_replicas_is_found_within_a_day() -> None:
    found = [first_regression(random.Random(seed), rate=0.1, days=1) for seed in range(100)]
    assert None not in found

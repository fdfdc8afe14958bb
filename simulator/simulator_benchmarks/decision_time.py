"""How long the tuner's turns take, and what they decided: `python -m simulator_benchmarks.decision_time --traces FOLDER`.

Slices of three scenarios that ask for most, or the scenarios as they are with `--whole`. Time is the turn's own CPU
time (others of this machine do not count); the decisions are printed as one fingerprint, so that who makes a turn
cheaper can show that it decides the same. Parsing is not in it: the simulator hands out values.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from trimtab_simulator.contest import Contest
from trimtab_simulator.policies.policy import PolicyActions, View
from trimtab_simulator.policies.trimtab import Trimtab
from trimtab_simulator.results import without_plots
from trimtab_simulator.scores import percentile

from simulator_benchmarks.scenarios import SCENARIOS


@dataclass(frozen=True, slots=True)
class Slice:
    """A part of a scenario, in seconds of its replay."""

    scenario: str
    start: float
    seconds: float


SLICES = (Slice("mix", 0.0, 1800.0), Slice("day", 600.0, 2400.0), Slice("r1", 3000.0, 1500.0))


@dataclass(frozen=True, slots=True)
class Turns:
    """What came of one slice. Times are in milliseconds; `per_replica` ones are divided by the replicas looked at."""

    scenario: str
    gpu_hours: float
    attainment: float
    turns: int
    p50: float
    p90: float
    p99: float
    longest: float
    per_replica_p50: float
    per_replica_p99: float
    decisions: str
    """A fingerprint of all that was moved, and when."""


class Timed:
    """The tuner, and how long each of its turns took."""

    def __init__(self, policy: Trimtab) -> None:
        self.name = policy.name
        self.tick_seconds = policy.tick_seconds
        self.reads_requests = policy.reads_requests
        self.took: list[tuple[float, int]] = []
        """Seconds of CPU time, and replicas looked at."""
        self._policy = policy

    def decide(self, view: View) -> PolicyActions:
        """One turn of the tuner."""
        began = time.thread_time()
        moves = self._policy.decide(view)
        self.took.append((time.thread_time() - began, max(1, len(view.snapshots))))
        return moves


def cut(contest: Contest, part: Slice) -> Contest:
    """The same field with only that part of the load."""
    trace, end = contest.trace, part.start + part.seconds
    arrivals = [a._replace(at=a.at - part.start) for a in trace.arrivals if part.start <= a.at < end]
    return replace(contest, trace=replace(trace, arrivals=arrivals, seconds=part.seconds))


def measured(folder: Path, part: Slice, *, seed: int, whole: bool = False) -> Turns:
    """Replay a slice under the tuner, or the scenario that it is a part of."""
    (scenario,) = (each for each in SCENARIOS if each.name == part.scenario)
    contest = without_plots(scenario.contest(folder, seed=seed))
    return turns_of(part.scenario, contest if whole else cut(contest, part))


def turns_of(name: str, contest: Contest) -> Turns:
    """Replay it under the tuner, and tell how long its turns took."""
    policy = Timed(Trimtab(contest.setup))
    outcome = contest.play(policy)
    judged = contest.judge(policy.name, outcome)
    whole = sorted(1000 * seconds for seconds, _ in policy.took)
    each = sorted(1000 * seconds / replicas for seconds, replicas in policy.took)
    moved = repr([(change.at, change.target, change.before, change.after) for change in outcome.changes])
    return Turns(
        scenario=name,
        gpu_hours=round(judged.gpu_hours, 4),
        attainment=round(judged.attainment, 5),
        turns=len(whole),
        p50=_quantile(whole, 50),
        p90=_quantile(whole, 90),
        p99=_quantile(whole, 99),
        longest=_quantile(whole, 100),
        per_replica_p50=_quantile(each, 50),
        per_replica_p99=_quantile(each, 99),
        decisions=hashlib.sha256(moved.encode()).hexdigest()[:12],
    )


def _quantile(ordered: Sequence[float], percent: float) -> float:
    return round(percentile(ordered, percent) or 0.0, 2)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print one JSON object a slice."""
    parser = argparse.ArgumentParser(prog="python -m simulator_benchmarks.decision_time", description=__doc__)
    parser.add_argument("--traces", type=Path, required=True, help="folder of the development slice")
    parser.add_argument("--scenarios", default=",".join(part.scenario for part in SLICES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--whole", action="store_true", help="replay the scenarios from their beginning to their end")
    given = parser.parse_args(arguments)
    known = {part.scenario: part for part in SLICES}
    names = given.scenarios.split(",")
    unknown = sorted(set(names) - set(known))
    if unknown:
        parser.error(f"--scenarios has {', '.join(unknown)}; known are {', '.join(known)}")
    for name in names:
        print(json.dumps(asdict(measured(given.traces, known[name], seed=given.seed, whole=given.whole))), flush=True)


if __name__ == "__main__":
    main()

"""CPU time of tuner steps and their decisions: `python -m simulator_benchmarks.decision_time --traces FOLDER`.

Slices of three demanding scenarios, or whole scenarios with `--whole`. Time is the step's own CPU time, so other
processes do not count. The decisions are printed as a fingerprint, which shows whether an optimization keeps them.
Parsing is not included: the simulator passes values.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from trimtab_simulator.experiment import Experiment, without_timeline
from trimtab_simulator.policies.policy import PolicyActions, PolicyInput
from trimtab_simulator.policies.trimtab import Trimtab
from trimtab_simulator.scores import percentile

from simulator_benchmarks.scenarios import SCENARIOS


@dataclass(frozen=True, slots=True)
class Slice:
    """Part of a scenario, in seconds of its replay."""

    scenario: str
    start: float
    seconds: float


SLICES = (Slice("mix", 0.0, 1800.0), Slice("day", 600.0, 2400.0), Slice("r1", 3000.0, 1500.0))


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Result of one slice. Times are in milliseconds; `per_replica` ones are divided by the number of replicas."""

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
    """Fingerprint of all changes and their times."""


class TimedTuner:
    """The tuner, with the duration of each step."""

    def __init__(self, policy: Trimtab) -> None:
        self.name = policy.name
        self.tick_seconds = policy.tick_seconds
        self.reads_requests = policy.reads_requests
        self.took: list[tuple[float, int]] = []
        """CPU seconds, and the number of replicas."""
        self._policy = policy

    def decide(self, view: PolicyInput) -> PolicyActions:
        """Run one tuner step."""
        began = time.thread_time()
        moves = self._policy.decide(view)
        self.took.append((time.thread_time() - began, max(1, len(view.snapshots))))
        return moves


def cut(experiment: Experiment, part: Slice) -> Experiment:
    """Return the experiment with only that part of the load."""
    trace, end = experiment.trace, part.start + part.seconds
    arrivals = [a._replace(at=a.at - part.start) for a in trace.arrivals if part.start <= a.at < end]
    return replace(experiment, trace=replace(trace, arrivals=arrivals, seconds=part.seconds))


def measure_slice(folder: Path, part: Slice, *, seed: int, whole: bool = False) -> StepTimes:
    """Replay a slice under the tuner, or its whole scenario."""
    (scenario,) = (each for each in SCENARIOS if each.name == part.scenario)
    experiment = without_timeline(scenario.experiment(folder, seed=seed))
    return measure_steps(part.scenario, experiment if whole else cut(experiment, part))


def measure_steps(name: str, experiment: Experiment) -> StepTimes:
    """Replay the experiment under the tuner, and return the durations of its steps."""
    policy = TimedTuner(Trimtab(experiment.setup))
    outcome = experiment.run(policy)
    judged = experiment.judge(policy.name, outcome)
    whole = sorted(1000 * seconds for seconds, _ in policy.took)
    each = sorted(1000 * seconds / replicas for seconds, replicas in policy.took)
    moved = repr([(change.at, change.target, change.before, change.after) for change in outcome.changes])
    return StepTimes(
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
    """Measure, and print one JSON object per slice."""
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
        print(
            json.dumps(asdict(measure_slice(given.traces, known[name], seed=given.seed, whole=given.whole))), flush=True
        )


if __name__ == "__main__":
    main()

"""Results of all policies on one experiment: each policy's replay and score, and their JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trimtab_operator.tuner.parameters import Parameter, Value

from trimtab_simulator import search_cache
from trimtab_simulator.experiment import Experiment
from trimtab_simulator.hindsight.fixed_values import static_best, static_n
from trimtab_simulator.hindsight.oracle import Plan, find_plan, replay_plan
from trimtab_simulator.hindsight.targets import best_target
from trimtab_simulator.policies.aimd import Aimd
from trimtab_simulator.policies.names import WITH_OBJECTIVES, WITH_TARGET, PolicySpec
from trimtab_simulator.policies.trimtab import HOUR_SECONDS, Trimtab
from trimtab_simulator.replay import SimulationResult
from trimtab_simulator.scores import Score


@dataclass(frozen=True, slots=True)
class Result:
    """One policy's result on an experiment."""

    entry: PolicySpec
    score: Score
    outcome: SimulationResult
    start_replicas: int
    target: float | None = None
    """Target of a baseline: as given, or the best in hindsight."""

    def to_json(self) -> dict[str, Any]:
        """Return its score with its settings."""
        data = self.score.to_json() | {"start_replicas": self.start_replicas}
        return data if self.target is None else data | {"target": self.target}


def run_policy(experiment: Experiment, entry: PolicySpec) -> Result:
    """Replay the trace under one policy.

    Policies in hindsight use engines with the queue order `deadline`, as Trimtab does; baselines use order of arrival,
    as they are published.
    """
    start = experiment.settings.start_replicas
    target = entry.target
    match entry.name:
        case "static-default":
            machine = experiment.settings.machine
            field = experiment.with_parameters(
                {
                    Parameter.MAX_NUM_SEQS: machine.max_num_seqs,
                    Parameter.MAX_NUM_BATCHED_TOKENS: machine.max_num_batched_tokens,
                    Parameter.WATERMARK: 0.0,
                }
            )
            outcome = field.run_fixed(entry.name)
        case "static-best":
            outcome = _cached_fixed(experiment.with_queues_ordered, entry.name, static_best)[1]
        case "static-n":
            field, outcome = _cached_fixed(experiment.with_queues_ordered, entry.name, static_n)
            start = field.settings.start_replicas
        case "oracle":
            outcome, start = _oracle(experiment.with_queues_ordered)
        case "aimd":
            outcome = experiment.run(Aimd(experiment.settings.machine.max_num_seqs_cap))
        case "trimtab" | "replicas-only":
            policy = Trimtab(experiment.setup, pinned=entry.name == "replicas-only", name=entry.name)
            outcome = experiment.run(policy)
        case "trimtab-restarted":
            outcome = experiment.run(Trimtab(experiment.setup, name=entry.name, restart_seconds=HOUR_SECONDS))
        case baseline if baseline in WITH_OBJECTIVES:
            outcome = experiment.run(WITH_OBJECTIVES[baseline](experiment.setup))
        case baseline:
            target, outcome = _baseline(experiment, baseline, target)
    return Result(entry, experiment.judge(entry.label, outcome), outcome, start, target)


def _baseline(experiment: Experiment, name: str, target: float | None) -> tuple[float, SimulationResult]:
    make = WITH_TARGET[name]
    found = hindsight_target(experiment, name) if target is None else target
    return found, experiment.run(make(found))


def hindsight_target(experiment: Experiment, name: str) -> float:
    """Return the baseline's best target on this experiment."""
    key = search_cache.key_of(experiment, name)
    found = search_cache.load_result(key)
    if found is not None:
        return float(found["target"])
    target, _ = best_target(experiment, WITH_TARGET[name])
    search_cache.store_result(key, {"target": target})
    return target


Search = Callable[[Experiment], tuple[Experiment, SimulationResult]]


def _cached_fixed(experiment: Experiment, name: str, search: Search) -> tuple[Experiment, SimulationResult]:
    """Return the cached or new search result. With fixed replicas none starts later, so one result serves all cold
    starts; static-n also sets their number, so that it serves all starts.
    """
    anywhere = replace(experiment.settings, cold_start_seconds=0.0)
    if name == "static-n":
        anywhere = replace(anywhere, start_replicas=anywhere.min_replicas)
    key = search_cache.key_of(replace(experiment, settings=anywhere), name)
    found = search_cache.load_result(key)
    if found is not None:
        parameters: dict[Parameter, Value] = {
            Parameter(parameter): value for parameter, value in found["parameters"].items()
        }
        field = experiment.with_parameters(parameters).with_replicas(found["start"])
        return field, field.run_fixed(name)
    field, outcome = search(experiment)
    search_cache.store_result(
        key, {"parameters": dict(field.settings.parameters), "start": field.settings.start_replicas}
    )
    return field, outcome


def _oracle(experiment: Experiment) -> tuple[SimulationResult, int]:
    """Return the oracle's result with the parameters of the best fixed replicas."""
    key = search_cache.key_of(experiment, "oracle")
    found = search_cache.load_result(key)
    fixed, _ = _cached_fixed(experiment, "static-n", static_n)
    base = experiment.with_parameters(fixed.settings.parameters)
    plan = Plan(tuple(found["counts"]), found["seconds"]) if found is not None else find_plan(base)
    if found is None:
        search_cache.store_result(key, {"counts": list(plan.counts), "seconds": plan.seconds})
    return replay_plan(base, plan), plan.counts[0]


def to_json(experiment: Experiment, results: Sequence[Result]) -> dict[str, Any]:
    """Return the output of `trimtab simulate -o json`, in seconds and tokens."""
    trace, settings = experiment.trace, experiment.settings
    return {
        "trace": {
            "name": trace.name,
            "requests": len(trace.arrivals),
            "seconds": trace.seconds,
            "prompt_tokens_mean": sum(a.prompt for a in trace.arrivals) / len(trace.arrivals),
            "output_tokens_mean": sum(a.output for a in trace.arrivals) / len(trace.arrivals),
            "notes": list(trace.notes),
            "seed": experiment.loop.seed,
        },
        "objectives": experiment.objectives.to_json(),
        "fleet": {
            "model": settings.machine.model,
            "gpu": settings.machine.gpu,
            "min_replicas": settings.min_replicas,
            "max_replicas": settings.max_replicas,
            "start_replicas": settings.start_replicas,
            "cold_start_seconds": settings.cold_start_seconds,
            "router": experiment.loop.router.kind.value,
            "parameters": {parameter.value: value for parameter, value in settings.parameters.items()},
        },
        "policies": [result.to_json() for result in results],
    }

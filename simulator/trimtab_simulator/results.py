"""Everybody on one field: each contestant's replay and score, and what is printed of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trimtab_operator.tuner.parameters import Parameter, Value

from trimtab_simulator import memo
from trimtab_simulator.contest import Contest
from trimtab_simulator.hindsight.fixed_values import static_best, static_n
from trimtab_simulator.hindsight.oracle import Plan, find_plan, follow
from trimtab_simulator.hindsight.targets import best_target
from trimtab_simulator.policies.aimd import Aimd
from trimtab_simulator.policies.names import WITH_TARGET, Entry
from trimtab_simulator.policies.trimtab import Trimtab
from trimtab_simulator.replay import SimulationResult
from trimtab_simulator.scores import Score


@dataclass(frozen=True, slots=True)
class Result:
    """One contestant on one field."""

    entry: Entry
    score: Score
    outcome: SimulationResult
    start_replicas: int
    target: float | None = None
    """The target of a rival that follows one: as given, or the best in hindsight."""

    def to_json(self) -> dict[str, Any]:
        """Its score, with what it was set to."""
        told = self.score.to_json() | {"start_replicas": self.start_replicas}
        return told if self.target is None else told | {"target": self.target}


def compete(contest: Contest, entry: Entry) -> Result:
    """Let one contestant replay the trace. Whoever knows it beforehand has engines that order their queues by what is
    promised, as ours do; engines of rivals serve by arrival, as those that are published do."""
    start = contest.settings.start_replicas
    target = entry.target
    match entry.name:
        case "static-default":
            machine = contest.settings.machine
            field = contest.with_parameters(
                {
                    Parameter.MAX_NUM_SEQS: machine.max_num_seqs,
                    Parameter.MAX_NUM_BATCHED_TOKENS: machine.max_num_batched_tokens,
                    Parameter.WATERMARK: 0.0,
                }
            )
            outcome = field.play_fixed(entry.name)
        case "static-best":
            outcome = _recalled_fixed(contest.with_queues_ordered, entry.name, static_best)[1]
        case "static-n":
            field, outcome = _recalled_fixed(contest.with_queues_ordered, entry.name, static_n)
            start = field.settings.start_replicas
        case "oracle":
            outcome, start = _oracle(contest.with_queues_ordered)
        case "aimd":
            outcome = contest.play(Aimd(contest.settings.machine.max_num_seqs_cap))
        case "trimtab" | "replicas-only":
            ours = Trimtab(contest.setup, pinned=entry.name == "replicas-only", name=entry.name)
            outcome = contest.play(ours)
        case rival:
            target, outcome = _rival(contest, rival, target)
    return Result(entry, contest.judge(entry.label, outcome), outcome, start, target)


def _rival(contest: Contest, name: str, target: float | None) -> tuple[float, SimulationResult]:
    make = WITH_TARGET[name]
    found = hindsight_target(contest, name) if target is None else target
    return found, contest.play(make(found))


def hindsight_target(contest: Contest, name: str) -> float:
    """The rival's best target on this field."""
    key = memo.key_of(contest, name)
    found = memo.recall(key)
    if found is not None:
        return float(found["target"])
    target, _ = best_target(contest, WITH_TARGET[name])
    memo.remember(key, {"target": target})
    return target


Search = Callable[[Contest], tuple[Contest, SimulationResult]]


def _recalled_fixed(contest: Contest, name: str, search: Search) -> tuple[Contest, SimulationResult]:
    """Where replicas are fixed none starts later and each search sets how many, so one finding serves them all."""
    anywhere = replace(contest.settings, cold_start_seconds=0.0)
    key = memo.key_of(replace(contest, settings=anywhere), name)
    found = memo.recall(key)
    if found is not None:
        parameters: dict[Parameter, Value] = {
            Parameter(parameter): value for parameter, value in found["knobs"].items()
        }
        field = contest.with_parameters(parameters).with_replicas(found["start"])
        return field, field.play_fixed(name)
    field, outcome = search(contest)
    memo.remember(key, {"knobs": dict(field.settings.parameters), "start": field.settings.start_replicas})
    return field, outcome


def _oracle(contest: Contest) -> tuple[SimulationResult, int]:
    """The oracle plans with the knobs of the best fixed replicas."""
    key = memo.key_of(contest, "oracle")
    found = memo.recall(key)
    fixed, _ = _recalled_fixed(contest, "static-n", static_n)
    base = contest.with_parameters(fixed.settings.parameters)
    plan = Plan(tuple(found["counts"]), found["seconds"]) if found is not None else find_plan(base)
    if found is None:
        memo.remember(key, {"counts": list(plan.counts), "seconds": plan.seconds})
    return follow(base, plan), plan.counts[0]


def to_json(contest: Contest, results: Sequence[Result]) -> dict[str, Any]:
    """As `trimtab simulate -o json` prints it. Seconds and tokens."""
    trace, settings = contest.trace, contest.settings
    return {
        "trace": {
            "name": trace.name,
            "requests": len(trace.arrivals),
            "seconds": trace.seconds,
            "prompt_tokens_mean": sum(a.prompt for a in trace.arrivals) / len(trace.arrivals),
            "output_tokens_mean": sum(a.output for a in trace.arrivals) / len(trace.arrivals),
            "notes": list(trace.notes),
            "seed": contest.loop.seed,
        },
        "objectives": contest.objectives.to_json(),
        "fleet": {
            "model": settings.machine.model,
            "gpu": settings.machine.gpu,
            "min_replicas": settings.min_replicas,
            "max_replicas": settings.max_replicas,
            "start_replicas": settings.start_replicas,
            "cold_start_seconds": settings.cold_start_seconds,
            "router": contest.loop.router.value,
            "knobs": {parameter.value: value for parameter, value in settings.parameters.items()},
        },
        "policies": [result.to_json() for result in results],
    }


def without_plots(contest: Contest) -> Contest:
    """The same where nobody will look at how things stood in between."""
    return replace(contest, loop=replace(contest.loop, moment_seconds=float("inf")))

"""Stages two to four of a plan: the revision, the live values and the replica count to aim for. Pure.

The tuner runs before the count is chosen, so that its replica count takes effect in the same iteration. A GPU budget
without room for the revision's GPUs changes the revision back to the last known-good one.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from trimtab_operator.layout.node_gpus import gpu_for
from trimtab_operator.observed.engines import ReportedScheduling, observe_replica
from trimtab_operator.observed.router import router_load
from trimtab_operator.planning.gpu_budget import BudgetShare, GpuClaim, build_gpu_claim, compute_share
from trimtab_operator.planning.model_facts import ModelKnown
from trimtab_operator.planning.resolve import Resolution
from trimtab_operator.planning.router import IdleWatch, scale_from_or_to_zero, watch_idle
from trimtab_operator.planning.scheduling_policy import (
    SchedulingPlan,
    is_deadline_active,
    plan_scheduling,
    wanted_scheduling,
)
from trimtab_operator.planning.tuning import current_replicas, desired_replicas, settings_of, step_cost_prior
from trimtab_operator.resource.spec import InferenceDeployment
from trimtab_operator.rollout.canary_comparison import CanaryComparison, find_regression
from trimtab_operator.rollout.rollback import RolloutPlan, change_of, plan_rollout
from trimtab_operator.tuner.decide import TunerOutput, decide
from trimtab_operator.tuner.settings import Pace, Settings


@dataclass(frozen=True, slots=True)
class RevisionChoice:
    """The revision that replicas are updated to, and the comparison of a canary with the other replicas."""

    rollout: RolloutPlan
    comparison: CanaryComparison | None


@dataclass(frozen=True, slots=True)
class ValuesChoice:
    """Live values and scheduling policy of the engines, and since when there has been no request."""

    tuned: TunerOutput
    queue: SchedulingPlan
    idle: IdleWatch | None


@dataclass(frozen=True, slots=True)
class CountChoice:
    """The replica count, and the revision that it has room for. Claim and share are None without a GPU budget."""

    count: int
    rollout: RolloutPlan
    gpu_claim: GpuClaim | None = None
    share: BudgetShare | None = None


# --- revision ---------------------------------------------------------------------------------------------------------


def choose_revision(found: Resolution) -> RevisionChoice:
    """Choose the revision of the spec, or the last known-good one if it fails or is worse."""
    comparison = _update_comparison(found)
    rollout = plan_rollout(
        found.rollout,
        found.wanted,
        found.known_good,
        found.known.groups,
        found.known.state.layouts_of(found.known.groups),
        may_start=found.gate.is_open,
        now=found.snapshot.at,
        find_regression=functools.partial(_find_regression, found, comparison),
    )
    return RevisionChoice(rollout, comparison)


def _update_comparison(found: Resolution) -> CanaryComparison | None:
    """Return the comparison of the canary with the other replicas while a change is being tried."""
    attempt, revision = found.rollout.attempt, found.wanted.revision
    if attempt is None or attempt.ready_since is None or attempt.change != change_of(found.deployment, revision):
        return None
    ready = [group for group in found.known.groups if group.is_ready]
    new = {group.name for group in ready if group.revision == revision}
    before = found.known.state.comparison
    kept = before if before is not None and before.change == attempt.change else CanaryComparison(attempt.change)
    return kept.with_finished(found.snapshot.engines, new, {group.name for group in ready} - new)


def _find_regression(found: Resolution, comparison: CanaryComparison | None) -> str | None:
    """Return the regression of a change; times count only if the model and the layout are unchanged."""
    if comparison is None or found.known_good is None:
        return None
    new, old = found.wanted.deployment.spec, found.known_good.deployment.spec
    return find_regression(comparison, is_same_model=(new.model, new.parallelism) == (old.model, old.parallelism))


# --- values -----------------------------------------------------------------------------------------------------------


def choose_values(found: Resolution, revision: RevisionChoice) -> ValuesChoice:
    """Choose the live values by the engines' metrics, and the replica count that the load needs."""
    known, snapshot = found.known, found.snapshot
    load = router_load(known.observed.router_pods, snapshot.routers, now=snapshot.at)
    idle = watch_idle(known.state.idle, load, known.groups, snapshot.engines, now=snapshot.at)
    tuned = scale_from_or_to_zero(
        found.deployment, _run_tuner(found, revision), load, idle, known.groups, now=snapshot.at
    )
    queue = plan_scheduling(found.deployment, _reported_scheduling(found), known.state.queue)
    return ValuesChoice(tuned, queue, idle)


def _run_tuner(found: Resolution, revision: RevisionChoice) -> TunerOutput:
    """Run the tuner on the observed replicas. The prior is the roofline of the model on its GPU if both are known,
    otherwise the stored one.
    """
    known, snapshot = found.known, found.snapshot
    target = found.deployment if revision.rollout.target is None else revision.rollout.target.deployment
    settings, state = _tuner_settings(found, target), known.state.tuner
    assert state is not None
    gpu = gpu_for(target, snapshot.nodes or ())
    if isinstance(found.gate.model, ModelKnown) and gpu is not None:
        prior = step_cost_prior(found.gate.model.facts, target.spec.parallelism, gpu)
        settings = replace(settings, prior=prior)
    elif state.model is not None:
        settings = replace(settings, prior=state.model.prior)
    observations = [observe_replica(group, snapshot.engines.get(group.name)) for group in known.groups]
    return decide(observations, state, settings, snapshot.at)


def _tuner_settings(found: Resolution, target: InferenceDeployment) -> Settings:
    """Return start values and bounds of the running revision, with mode, objectives and scaling of the spec."""
    latest, snapshot = settings_of(found.deployment.spec), found.snapshot
    by_deadline = is_deadline_active(_reported_scheduling(found), wanted_scheduling(found.deployment.spec))
    return replace(
        settings_of(target.spec),
        mode=latest.mode,
        objectives=replace(latest.objectives, order_queues=by_deadline),
        scaling=latest.scaling,
        pace=Pace(tick_seconds=snapshot.tick_seconds, sample_seconds=snapshot.sample_seconds),
    )


def _reported_scheduling(found: Resolution) -> dict[str, ReportedScheduling | None]:
    """Return each engine's scheduling policy by group; None if not reported."""
    engines = {group.name: found.snapshot.engines.get(group.name) for group in found.known.groups}
    return {name: None if seen is None else seen.queue for name, seen in engines.items()}


# --- count ------------------------------------------------------------------------------------------------------------


def choose_count(found: Resolution, revision: RevisionChoice, values: ValuesChoice) -> CountChoice:
    """Choose the replica count, within the GPU budget if there is one."""
    deployment, rollout = found.deployment, revision.rollout
    if deployment.is_paused:
        return CountChoice(current_replicas(deployment, found.known.state.tuner), rollout)
    count = desired_replicas(deployment, values.tuned)
    if rollout.target is None or found.snapshot.installation.gpu_budget is None:
        return CountChoice(count, rollout)
    known_good = found.known_good.deployment if found.known_good is not None and rollout.is_canary else None
    claim = build_gpu_claim(
        rollout.target.deployment,
        found.known.observed,
        wanted=count,
        revision=rollout.target.revision,
        known_good=known_good,
    )
    share = compute_share(claim, found.snapshot.gpu_claims, found.snapshot.installation.gpu_budget)
    if share.is_growth_pending:
        return _count_without_growth(found, rollout, claim, share)
    return CountChoice(share.replicas, rollout, claim, share)


def _count_without_growth(found: Resolution, rollout: RolloutPlan, claim: GpuClaim, share: BudgetShare) -> CountChoice:
    """Return the count while the wanted revision needs more GPUs than are free.

    The revision is the last known-good one if that needs no additional GPUs; otherwise replicas stay as they are.
    """
    good, observed = found.known_good, found.known.observed
    fits = good is not None and not build_gpu_claim(good.deployment, observed, wanted=0).smaller_replicas
    rollout = RolloutPlan(rollout.state, good if fits else None, rollout.failed)
    if not fits:
        claim = replace(claim, min_replicas=claim.running, wanted=max(claim.wanted, claim.running))
        share = replace(share, replicas=claim.running)
    return CountChoice(share.replicas, rollout, claim, share)

"""Scheduling policy of the engines: the wanted one, and the patches that apply it. Pure.

The policy is sent to running engines and never rendered into pods, so that editing it or the objectives restarts no
engine (ADR-0055). `status.tuning.schedulingPolicy` records what engines report as active; from it the operator knows
that there is a policy to reset when the spec no longer sets one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from trimtab_operator.observed.actions import Event, LiveValues
from trimtab_operator.observed.engines import ReportedScheduling
from trimtab_operator.planning.objectives import objectives_of
from trimtab_operator.resource.quantity import parse_seconds
from trimtab_operator.resource.spec import InferenceDeployment, Spec
from trimtab_operator.tuner.objectives import Ttft
from trimtab_operator.validation.scheduling_flags import scheduling_flags

POLICY = "scheduling_policy"
TARGET = "ttft_target"
PER_PROMPT_TOKEN = "ttft_target_per_prompt_token"  # noqa: S105 - the name of a live field
MAX_TARGET_SECONDS = 86_400.0  # engines reject higher values (docs/concepts/live-configuration.md)
TIME_TOLERANCE = 1e-6  # relative: closer values are equal
FCFS_DESCRIPTION = "requests are scheduled in order of arrival"


class SchedulingPolicy(StrEnum):
    """A value of the engine's `scheduling_policy`."""

    FCFS = "fcfs"
    PRIORITY = "priority"
    DEADLINE = "deadline"


class SchedulingSource(StrEnum):
    """The part of the spec that a policy comes from."""

    SPEC = "Spec"  # spec.engine.schedulingPolicy
    OBJECTIVES = "Objectives"  # spec.objectives.ttft, if schedulingPolicy is not set and tuning is Auto


@dataclass(frozen=True, slots=True)
class SchedulingSetting:
    """A policy with the TTFT targets of `deadline` in seconds."""

    policy: SchedulingPolicy
    source: SchedulingSource
    ttft_target: float = 0.0
    ttft_target_per_prompt_token: float = 0.0

    @property
    def values(self) -> LiveValues:
        """Live parameters of the engine; other policies than `deadline` leave the targets unchanged."""
        if self.policy is not SchedulingPolicy.DEADLINE:
            return {POLICY: self.policy.value}
        return {
            POLICY: self.policy.value,
            TARGET: self.ttft_target,
            PER_PROMPT_TOKEN: self.ttft_target_per_prompt_token,
        }


@dataclass(frozen=True, slots=True)
class SchedulingPlan:
    """Scheduling policies of one reconcile plan, and the patches by replica.

    `sent` is what engines were sent once the plan is executed; None if there is nothing to reset later. `active` is
    what engines report, or reported last; it is shown in the status. `unsupported` are replicas whose engine does not
    support the wanted policy, `pending` those that have not applied it although it was sent.
    """

    sent: SchedulingSetting | None = None
    active: SchedulingSetting | None = None
    patches: Mapping[str, LiveValues] = field(default_factory=dict)
    unsupported: tuple[str, ...] = ()
    pending: tuple[str, ...] = ()
    wanted: SchedulingSetting | None = None
    events: tuple[Event, ...] = ()


def plan_scheduling(
    deployment: InferenceDeployment,
    seen: Mapping[str, ReportedScheduling | None],
    sent: SchedulingSetting | None = None,
) -> SchedulingPlan:
    """Plan the patches that bring every engine that reports to the wanted policy.

    `seen` is each replica's report; engines without one are patched once they report. `sent` is what this loop sent
    last.
    """
    active = stored_scheduling(deployment.status)
    sent = sent or active
    wanted = wanted_scheduling(deployment.spec)
    if wanted is None:
        return _plan_reset(deployment, seen, active, sent)
    reported = {name: state for name, state in sorted(seen.items()) if state is not None}
    supporting = {name: state for name, state in reported.items() if _supports(state, wanted)}
    patches = {name: wanted.values for name, state in supporting.items() if not _applies(state, wanted)}
    is_always_supported = wanted.policy is SchedulingPolicy.FCFS
    is_sent = sent is not None and _is_equivalent(sent, wanted)
    return SchedulingPlan(
        sent=wanted if supporting else _if_in_use(sent, seen),
        active=wanted if len(patches) < len(supporting) else _if_in_use(active, seen),
        patches=patches,
        unsupported=() if is_always_supported else tuple(name for name in reported if name not in supporting),
        pending=tuple(patches) if is_sent else (),
        wanted=wanted,
        events=() if is_sent or not patches else tuple(_change_events(deployment, reported[min(patches)], wanted)),
    )


def _plan_reset(
    deployment: InferenceDeployment,
    seen: Mapping[str, ReportedScheduling | None],
    active: SchedulingSetting | None,
    sent: SchedulingSetting | None,
) -> SchedulingPlan:
    """Reset a policy that the spec no longer sets, on engines that applied it or may have.

    An engine with another policy is left alone, because a user set it.
    """
    orders = tuple(_remaining_settings((sent, active), seen))
    if not orders or any(scheduling_flags(deployment.spec)):
        return SchedulingPlan()
    reported = {name: state for name, state in sorted(seen.items()) if state is not None}
    runs = next((order for order in orders if any(_may_apply(state, order) for state in reported.values())), orders[-1])
    is_tuned = deployment.spec.tuning.mode == "Auto"
    ending = tuple(order for order in orders if is_tuned or order.source is not SchedulingSource.OBJECTIVES)
    if not ending:
        return SchedulingPlan(orders[0], runs)  # without tuning the policy stays as it is
    wanted = SchedulingSetting(SchedulingPolicy.FCFS, ending[0].source)
    patches = {
        name: wanted.values for name, state in reported.items() if any(_may_apply(state, order) for order in ending)
    }
    is_news = bool(patches) and (sent is None or sent.policy is not SchedulingPolicy.FCFS)
    events = tuple(_change_events(deployment, reported[min(patches)], wanted)) if is_news else ()
    pending = tuple(name for name in sorted(seen) if name in patches or name not in reported)
    other = next((order for order in orders if order is not runs), wanted)  # the status has room for one
    return SchedulingPlan(other, runs, patches, pending=pending, wanted=wanted, events=events)


def _remaining_settings(
    orders: Iterable[SchedulingSetting | None], seen: Mapping[str, ReportedScheduling | None]
) -> Iterator[SchedulingSetting]:
    """Yield the settings, one per policy, that an engine uses or may use and that are not its default."""
    policies = {SchedulingPolicy.FCFS}
    for order in orders:
        if order is not None and order.policy not in policies and _if_in_use(order, seen) is not None:
            policies.add(order.policy)
            yield order


def wanted_scheduling(spec: Spec) -> SchedulingSetting | None:
    """Return the policy that the spec sets; None if engines keep the one that they started with."""
    ttft = objectives_of(spec.objectives).ttft
    written = spec.engine.scheduling_policy
    if written is None:
        if ttft is None or spec.tuning.mode != "Auto" or any(scheduling_flags(spec)):
            return None
        return _by_deadline(ttft, SchedulingSource.OBJECTIVES)
    if written != "deadline":
        return SchedulingSetting(SchedulingPolicy(written), SchedulingSource.SPEC)
    return (
        None if ttft is None else _by_deadline(ttft, SchedulingSource.SPEC)
    )  # without a TTFT objective the spec is invalid


def _by_deadline(ttft: Ttft, source: SchedulingSource) -> SchedulingSetting:
    target = min(ttft.seconds, MAX_TARGET_SECONDS)
    return SchedulingSetting(SchedulingPolicy.DEADLINE, source, target, ttft.seconds_per_prompt_token)


def is_deadline_active(seen: Mapping[str, ReportedScheduling | None], wanted: SchedulingSetting | None) -> bool:
    """Return True if most engines report `deadline`; without reports, if the spec sets it."""
    reported = [state.policy for state in seen.values() if state is not None]
    if not reported:
        return wanted is not None and wanted.policy is SchedulingPolicy.DEADLINE
    return 2 * reported.count(SchedulingPolicy.DEADLINE) > len(reported)


# --- one engine -------------------------------------------------------------------------------------------------------


def _supports(state: ReportedScheduling, wanted: SchedulingSetting) -> bool:
    """Return True if the engine's configuration lists the policy and its parameters."""
    return wanted.policy in state.policies and all(name in state.times for name in wanted.values if name != POLICY)


def _applies(state: ReportedScheduling, wanted: SchedulingSetting) -> bool:
    times = ((value, state.times[name]) for name, value in wanted.values.items() if name != POLICY)
    return state.policy == wanted.policy and all(_is_same_time(float(wanted), now) for wanted, now in times)


def _if_in_use(
    order: SchedulingSetting | None, seen: Mapping[str, ReportedScheduling | None]
) -> SchedulingSetting | None:
    """Return the setting if an engine uses it or may use it because it did not report; otherwise None."""
    return order if order is not None and any(s is None or _may_apply(s, order) for s in seen.values()) else None


def _may_apply(state: ReportedScheduling, order: SchedulingSetting) -> bool:
    """Return True if the engine has this policy, with any targets: it may have been set before they were edited."""
    return state.policy == order.policy


def _is_equivalent(one: SchedulingSetting, other: SchedulingSetting) -> bool:
    """Return True if both settings send the same values."""
    return (
        one.policy is other.policy
        and _is_same_time(one.ttft_target, other.ttft_target)
        and _is_same_time(one.ttft_target_per_prompt_token, other.ttft_target_per_prompt_token)
    )


def _is_same_time(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=TIME_TOLERANCE, abs_tol=TIME_TOLERANCE * TIME_TOLERANCE)


# --- messages ---------------------------------------------------------------------------------------------------------


def _change_events(
    deployment: InferenceDeployment, before: ReportedScheduling, wanted: SchedulingSetting
) -> Iterator[Event]:
    is_same_policy = before.policy == wanted.policy
    change = f"{wanted.policy}, with other targets" if is_same_policy else f"{before.policy} -> {wanted.policy}"
    message = f"scheduling policy {change}: {describe_policy(wanted)}"
    yield Event("Normal", "SchedulingPolicyChanged", message, str(deployment.generation))


def describe_policy(order: SchedulingSetting) -> str:
    """Return a clause that describes which requests run first."""
    if order.policy is SchedulingPolicy.FCFS:
        return FCFS_DESCRIPTION
    if order.policy is SchedulingPolicy.PRIORITY:
        return "requests with the lowest priority value run first"
    more = order.ttft_target_per_prompt_token
    allowance = f" (+{_spaced(more)} per prompt token)" if more else ""
    return f"requests that can still meet a TTFT of {_spaced(order.ttft_target)}{allowance} run first"


def exceptions_message(found: SchedulingPlan) -> str | None:
    """Return which replicas do not follow the wanted policy, and why; None if all do."""
    if found.wanted is None:
        return None
    policy, problems = found.wanted.policy, []
    if found.unsupported:
        verb = "does" if len(found.unsupported) == 1 else "do"
        problems.append(
            f"{', '.join(found.unsupported)} {verb} not support the scheduling policy {policy} and keeps its own; "
            "set spec.runtime.image to a newer engine"
        )
    if found.pending:
        verb = "has" if len(found.pending) == 1 else "have"
        problems.append(f"{', '.join(found.pending)} {verb} not applied the scheduling policy {policy} yet")
    return "; ".join(problems) or None


def duration(seconds: float) -> str:
    """Return a duration as the spec writes it: 2.0 → `2s`, 0.5 → `500ms`, 0.000125 → `125us`."""
    microseconds = round(seconds * 1e6)
    for unit, size in (("s", 1_000_000), ("ms", 1000)):
        if microseconds % size == 0:
            return f"{microseconds // size}{unit}"
    return f"{microseconds}us"


def _spaced(seconds: float) -> str:
    text = duration(seconds)
    digits = text.rstrip("mus")
    return f"{digits} {text.removeprefix(digits)}"


# --- status -----------------------------------------------------------------------------------------------------------


def scheduling_status(found: SchedulingPlan) -> dict[str, str]:
    """Return `status.tuning.schedulingPolicy`: the active policy and replicas that do not follow it; may be empty."""
    entry: dict[str, str] = {}
    active = found.active
    if active is not None:
        entry |= {"policy": active.policy.value, "source": active.source.value}
        if active.policy is SchedulingPolicy.DEADLINE:
            entry["ttftTarget"] = duration(active.ttft_target)
            if active.ttft_target_per_prompt_token:
                entry["perPromptToken"] = duration(active.ttft_target_per_prompt_token)
    message = exceptions_message(found)
    return entry if message is None else {**entry, "message": message}


def stored_scheduling(status: Mapping[str, Any]) -> SchedulingSetting | None:
    """Return the setting that `scheduling_status` wrote; None if there is none or it cannot be parsed."""
    entry = (status.get("tuning") or {}).get("schedulingPolicy") or {}
    try:
        return SchedulingSetting(
            SchedulingPolicy(entry["policy"]),
            SchedulingSource(entry["source"]),
            parse_seconds(entry.get("ttftTarget", "0s")),
            parse_seconds(entry.get("perPromptToken", "0s")),
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return None

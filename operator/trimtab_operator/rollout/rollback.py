"""Rollback of changes whose replicas do not become Ready. Pure.

A revision is *known good* once a replica that runs it is Ready with the wanted layout. The spec of the last known-good
revision is stored in the ConfigMap NAME-rollout. If no replica of a new revision becomes Ready within
`spec.rollout.startTimeout`, or its engine rejects the configuration, replicas return to the last known-good spec. The
change is retried only after the spec, or what is rendered from it, changes.

                change                 one replica Ready
    known good ────────► attempt ──────────────────────► known good (the new revision)
       ▲                    │ timed out, or rejected
       └────────────────────┴──► rolled back ── the spec changes ──► attempt
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any

from trimtab_operator.builders.admin_token import TokenHashes
from trimtab_operator.builders.config_map import ROLLOUT_KEY, rollout_config_map
from trimtab_operator.builders.labels import rollout_config_map_name
from trimtab_operator.builders.pod import grace_seconds
from trimtab_operator.builders.record import Record
from trimtab_operator.builders.startup import describe_start_timeout, start_seconds
from trimtab_operator.builders.stateful_set import NO_RECORDS, Rendered, rendered
from trimtab_operator.errors import InvalidSpec
from trimtab_operator.layout.degrees import Degrees
from trimtab_operator.observed.actions import Apply, Event
from trimtab_operator.observed.drift import plan_applies
from trimtab_operator.observed.groups import Group, ObservedChildren
from trimtab_operator.observed.phases import EngineView, phase_of
from trimtab_operator.observed.terminations import NO_TERMINATION_MESSAGE, last_termination_message, num_crashes
from trimtab_operator.resource.canonical_json import compact
from trimtab_operator.resource.live_parameters import caps_of
from trimtab_operator.resource.manifest import Manifest
from trimtab_operator.resource.quantity import parse_seconds
from trimtab_operator.resource.signed_text import sign, verify
from trimtab_operator.resource.spec import Caps, InferenceDeployment
from trimtab_operator.resource.time import parse_time
from trimtab_operator.rollout.crash_evidence import (
    count_crashes,
    crashes_per_pod_hour,
    find_crash_evidence,
    own_pods,
)
from trimtab_operator.rollout.surge import NoSurgeRoom, allowed_surge, surge_obstacle
from trimtab_operator.validation.rules import validation_errors

# docs/reference/contract.md section 1: the command line, the model or the machine does not allow it
CONFIGURATION_ERROR_EXIT_CODE = 2
MAX_KEPT_TEXTS = 1024
SIGNED_KIND = "rollout"  # kind of the signed text
WATCH_SECONDS = 86400.0  # a doubled crash rate of 60 replicas shows within a day; later crashes have other causes
UNSTORED_ATTEMPT_SECONDS = 60.0  # younger attempts are not stored: most succeed or are edited by then
MIN_REFUSED_STARTS = 3  # so many terminations are not the node's fault, and waiting does not help
REPLICA_FIELDS = ("replicas", "priority", "scaling", "router")  # always taken from the latest spec
UNRENDERED_FIELDS = (
    "replicas",
    "scaling",
    "metrics",
    "objectives",
    "tuning",
    "router",
)  # the caps of `tuning` are part of the revision


@dataclass(frozen=True, slots=True)
class RevisionSpec:
    """Everything needed to render a revision again: spec as JSON, image, time of the last requested restart, and caps,
    which a later start value may not have changed.
    """

    spec: str
    image: str | None
    restarted_at: str | None = None
    commit: str | None = None
    """Commit that the revision of a downloaded model resolved to."""
    caps: Caps | None = None
    """Caps of the live parameters."""


@dataclass(frozen=True, slots=True)
class RolloutAttempt:
    """A change that is being rolled out since Unix time `since`.

    `ready_since` is when its first replica became Ready, None before. `terminations` counts engine crashes by then.
    """

    change: str
    since: float
    ready_since: float | None = None
    terminations: int = 0


@dataclass(frozen=True, slots=True)
class PostRolloutWatch:
    """When the newest known-good revision was verified (Unix time), and the number of engine crashes by then.

    `former_rate` is the number of crashes per pod and hour of the revision before it; None if unknown.
    """

    since: float
    terminations: int
    former_rate: float | None = None


@dataclass(frozen=True, slots=True)
class RolledBackChange:
    """A change that was rolled back, and why."""

    change: str
    message: str


@dataclass(frozen=True, slots=True)
class RolloutState:
    """Rollout state that is kept between iterations and across operator restarts.

    `previous` is the known-good revision before the newest one.
    """

    known_good: RevisionSpec | None = None
    attempt: RolloutAttempt | None = None
    rolled_back: RolledBackChange | None = None
    surge_obstacle: NoSurgeRoom | None = None
    previous: RevisionSpec | None = None
    watch: PostRolloutWatch | None = None


@dataclass(frozen=True, slots=True)
class RolloutStep:
    """The new rollout state, and whether replicas should run the last known-good revision instead of the spec.

    `failure` says why a first revision, without a known-good one, does not become Ready. `canary_message` says what a
    change that is being tried waits for.
    """

    state: RolloutState
    uses_known_good: bool = False
    failure: str | None = None
    canary_message: str | None = None


@dataclass(frozen=True, slots=True)
class FailedChange:
    """A change that failed. `returns_to` is the revision of the replicas after the rollback, None without a known-good
    one.
    """

    message: str
    rolled_back_to: str | None


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """Rollout decision of one iteration. `target` is the wanted revision; None to leave replicas as they are."""

    state: RolloutState
    target: Rendered | None
    failed: FailedChange | None = None
    unverified: frozenset[str] = frozenset()
    is_canary: bool = False
    """True if only one replica may run the change for now."""
    canary_message: str | None = None
    """What a change that is being tried waits for."""


def plan_rollout(
    state: RolloutState,
    wanted: Rendered,
    known_good: Rendered | None,
    groups: tuple[Group, ...],
    layouts: Mapping[str, Degrees],
    *,
    may_start: bool,
    now: float,
    find_regression: Callable[[], str | None] = lambda: None,
) -> RolloutPlan:
    """Choose the revision that replicas should run: `wanted`, or `known_good` while the spec may not start or after it
    failed.

    `layouts` are the layouts reported by engines of Ready groups, by group name; `now` is Unix time. `find_regression`
    returns how the canary is worse than the other replicas, None if it is not.
    """
    if not may_start:
        return RolloutPlan(state, known_good)
    known_good_revision = None if known_good is None else known_good.revision
    step = decide_rollout_step(
        state,
        wanted.deployment,
        groups,
        layouts,
        revision=wanted.revision,
        known_good_revision=known_good_revision,
        now=now,
        find_regression=find_regression,
    )
    after = replace(step.state, surge_obstacle=state.surge_obstacle)
    if step.uses_known_good and after.rolled_back is not None:
        return RolloutPlan(after, known_good, FailedChange(after.rolled_back.message, known_good_revision))
    failed = None if step.failure is None else FailedChange(step.failure, None)
    if is_canary_phase(wanted.deployment, wanted.revision, known_good_revision, after):
        updated = frozenset(group.name for group in groups if group.revision == wanted.revision)
        return RolloutPlan(after, wanted, failed, updated, is_canary=True, canary_message=step.canary_message)
    unverified = unverified_groups(wanted.deployment, groups, layouts, revision=wanted.revision)
    return RolloutPlan(after, wanted, failed, unverified)


def is_canary_phase(
    deployment: InferenceDeployment, revision: str, known_good_revision: str | None, state: RolloutState
) -> bool:
    """Return True if one replica must verify the change first, because there is a known-good revision to return to."""
    is_known_good = (
        known_good_revision is None
        or revision == known_good_revision
        or state.known_good == revision_spec_of(deployment)
    )
    return not is_known_good and bake_seconds(deployment) > 0


@dataclass(frozen=True, slots=True)
class SurgePlan:
    """Number of surge groups in this iteration, and what to remember and report."""

    groups: int
    surge_obstacle: NoSurgeRoom | None = None
    events: tuple[Event, ...] = ()


def plan_surge(
    known: NoSurgeRoom | None,
    target: Rendered,
    observed: ObservedChildren,
    *,
    replicas: int,
    now: datetime,
    rejected: str | None = None,
) -> SurgePlan:
    """Decide how many surge groups may be created. `known` is the change for which there was no room, and `rejected`
    gives the reason why the API server just rejected another group.

    A newly found obstacle is reported now; replicas are replaced in place from the next iteration on.
    """
    allowed = allowed_surge(target.deployment, replicas)
    change = change_of(target.deployment, target.revision)
    if known is not None and known.change == change:
        return SurgePlan(0, known)
    timeout = start_seconds(target.deployment)
    why = surge_obstacle(observed, target.revision, replicas=replicas, start_seconds=timeout, now=now)
    if why is None and rejected is not None and len(observed.groups) >= replicas:
        why = f"no additional replica can be created: {rejected}"
    if allowed == 0 or why is None:
        return SurgePlan(allowed)
    gap = "requests fail until the new one is Ready" if replicas == 1 else "each is unavailable for a while"
    message = f"{why}; replicas are replaced in place: {gap}"
    return SurgePlan(allowed, NoSurgeRoom(change, message), (Event("Warning", "SurgeUnschedulable", message, change),))


def render_known_good(
    state: RolloutState, wanted: Rendered, *, token_hashes: TokenHashes, records: Mapping[str, Record] = NO_RECORDS
) -> Rendered | None:
    """Render the last known-good revision; None if there is none. Usually this is `wanted`."""
    if state.known_good is None:
        return None
    if state.known_good == revision_spec_of(wanted.deployment):
        return wanted
    known_good = known_good_deployment(wanted.deployment, state.known_good)
    return None if known_good is None else rendered(known_good, token_hashes=token_hashes, records=records)


def revision_spec_of(deployment: InferenceDeployment) -> RevisionSpec:
    """Return the spec in canonical form, with its image, restart time, commit and caps."""
    return RevisionSpec(
        compact(_spec_without_replicas(deployment)),
        deployment.image,
        deployment.restarted_at,
        deployment.commit,
        caps_of(deployment),
    )


def change_of(deployment: InferenceDeployment, revision: str) -> str:
    """Return an identifier of a change, equal as long as neither the rendered pods nor other relevant fields change.

    The replica count is left out because autoscalers write it, and tuning because its caps are part of the revision.
    The scheduling policy is left out because engines start without it. Start values are not: with other ones, a change
    that failed may succeed.
    """
    written = _spec_without_replicas(deployment)
    rest = {name: value for name, value in written.items() if name not in UNRENDERED_FIELDS}
    engine = {name: value for name, value in (rest.pop("engine", None) or {}).items() if name != "schedulingPolicy"}
    rest |= {"engine": engine} if engine else {}
    digest = hashlib.sha256(compact({"image": deployment.image, "spec": rest}).encode()).hexdigest()
    return f"{revision}-{digest[:10]}"


def known_good_deployment(deployment: InferenceDeployment, known_good: RevisionSpec) -> InferenceDeployment | None:
    """Return the resource with its known-good spec and the present replica count, priority and rollout pace.

    Returns None if that spec cannot be parsed or is invalid now.
    """
    try:
        body = {"metadata": {"namespace": deployment.namespace, "name": deployment.name, "uid": deployment.uid}}
        before = InferenceDeployment.parse(
            {**body, "spec": json.loads(known_good.spec)},
            default_image=known_good.image,
            allowed_privileges=deployment.allowed_privileges,
        )
    except (InvalidSpec, ValueError):
        return None
    pace = {name: getattr(deployment.spec.rollout, name) for name in ("max_unavailable", "max_surge")}
    rollout = before.spec.rollout.model_copy(update=pace)
    today = {name: getattr(deployment.spec, name) for name in REPLICA_FIELDS}
    spec = before.spec.model_copy(update={**today, "rollout": rollout})
    found = replace(
        deployment,
        spec=spec,
        image=before.image,
        restarted_at=known_good.restarted_at,
        commit=known_good.commit,
        caps=known_good.caps,
        weights_bytes=deployment.weights_bytes if spec.model == deployment.spec.model else None,
    )
    return None if validation_errors(found) else found


def change_timeout_seconds(deployment: InferenceDeployment) -> float:
    """Return how long a change may take until its first replica is Ready, including the drain of the old one."""
    return start_seconds(deployment) + grace_seconds(deployment)


def bake_seconds(deployment: InferenceDeployment) -> float:
    """Return how long the canary serves before the other replicas follow."""
    return parse_seconds(deployment.spec.rollout.bake_time)


def decide_rollout_step(
    state: RolloutState,
    deployment: InferenceDeployment,
    groups: Iterable[Group],
    layouts: Mapping[str, Degrees],
    *,
    revision: str,
    known_good_revision: str | None,
    now: float,
    find_regression: Callable[[], str | None] = lambda: None,
) -> RolloutStep:
    """Decide the next step of a rollout.

    `layouts` are the layouts reported by engines of Ready groups, by group name. `revision` is the revision of the spec
    and `known_good_revision` that of the known-good spec (None without one). `now` is Unix time. `find_regression`
    returns how the canary is worse than the other replicas.
    """
    change = change_of(deployment, revision)
    rolled_back = state.rolled_back
    if rolled_back is not None and rolled_back.change == change and known_good_revision is not None:
        return RolloutStep(replace(state, attempt=None), uses_known_good=True)
    groups = tuple(groups)
    updated = [group for group in groups if group.revision == revision]
    kept = RolloutState(state.known_good, previous=state.previous, watch=state.watch)
    serves = any(group.is_ready and layouts.get(group.name) == Degrees.wanted(deployment.spec) for group in updated)
    if revision == known_good_revision:
        return _check_watch(
            replace(kept, known_good=revision_spec_of(deployment)) if serves else kept, change, updated, now
        )
    if not updated:
        return RolloutStep(kept)
    attempt = state.attempt
    if attempt is None or attempt.change != change:
        attempt = RolloutAttempt(change, now if attempt is not None else _attempt_start(updated, deployment, now))
    if serves and attempt.ready_since is None:
        attempt = replace(attempt, ready_since=now, terminations=count_crashes(updated))
    bake = bake_seconds(deployment) if known_good_revision is not None else 0.0
    has_baked = attempt.ready_since is not None and now - attempt.ready_since >= bake
    why = _failure_reason(updated, layouts, attempt, deployment, now) if not serves or bake else None
    regression = find_regression() if why is None and serves and has_baked else None
    if regression is not None:
        first = next(group.name for group in updated if group.is_ready)
        bake_time = deployment.spec.rollout.bake_time
        why = f"{first} is worse than the other replicas after {bake_time} of serving: {regression}"
    if why is None and serves and has_baked:
        former = [group for group in groups if group.revision == known_good_revision]
        watch = PostRolloutWatch(now, count_crashes(updated), crashes_per_pod_hour(former, now))
        return RolloutStep(RolloutState(revision_spec_of(deployment), previous=state.known_good, watch=watch))
    kept = replace(kept, attempt=attempt)
    if why is None:
        return RolloutStep(kept, canary_message=_canary_message(updated, deployment) if bake and serves else None)
    if known_good_revision is None:
        return RolloutStep(kept, failure=why)
    return RolloutStep(replace(kept, attempt=None, rolled_back=RolledBackChange(change, why)), uses_known_good=True)


def unstored_attempt_seconds(deployment: InferenceDeployment) -> float:
    """Return how long an attempt is not stored; less than the time after which it fails."""
    return min(UNSTORED_ATTEMPT_SECONDS, change_timeout_seconds(deployment) / 2)


def _attempt_start(updated: Iterable[Group], deployment: InferenceDeployment, now: float) -> float:
    """Return when an unremembered change began: with its first pod, but not before it would have been stored."""
    made = (parse_time(pod["metadata"].get("creationTimestamp")) for group in updated for pod in own_pods(group))
    first = min((moment.timestamp() for moment in made if moment is not None), default=now)
    return min(now, max(first, now - unstored_attempt_seconds(deployment)))


def _canary_message(updated: list[Group], deployment: InferenceDeployment) -> str:
    first = next(group.name for group in updated if group.is_ready)
    return (
        f"{first} runs the change as a canary; other replicas follow after it has served for"
        f" {deployment.spec.rollout.bake_time}"
    )


def _check_watch(state: RolloutState, change: str, updated: list[Group], now: float) -> RolloutStep:
    """Roll back a recently verified revision if its engines keep crashing."""
    watch = state.watch
    if watch is None or state.previous is None or now - watch.since > WATCH_SECONDS:
        return RolloutStep(state)
    found = find_crash_evidence(updated, since=watch.since, known=watch.terminations, rate=watch.former_rate, now=now)
    if not found.is_regression:
        return RolloutStep(state)
    minutes = (now - watch.since) / 60
    why = (
        f"its engines terminated {found.crashes} times in {minutes:.0f} minutes after it was verified; "
        f"{found.expected:.1f} times were expected at the former revision's rate: {_last_message(updated)}"
    )
    return RolloutStep(RolloutState(state.previous, rolled_back=RolledBackChange(change, why)))


def _last_message(updated: Iterable[Group]) -> str:
    ended = [pod for group in updated for pod in own_pods(group) if num_crashes(pod)]
    return last_termination_message(ended[0]) if ended else NO_TERMINATION_MESSAGE


def unverified_groups(
    deployment: InferenceDeployment, groups: Iterable[Group], layouts: Mapping[str, Degrees], *, revision: str
) -> frozenset[str]:
    """Return the Ready groups at `revision` whose engines do not report the wanted layout, or not yet.

    They count as down, so that no further group is updated.
    """
    wanted = Degrees.wanted(deployment.spec)
    return frozenset(g.name for g in groups if g.revision == revision and layouts.get(g.name) != wanted)


def _failure_reason(
    updated: list[Group],
    layouts: Mapping[str, Degrees],
    attempt: RolloutAttempt,
    deployment: InferenceDeployment,
    now: float,
) -> str | None:
    """Return why the change failed, or None if it has not."""
    refused = next((group for group in updated if any(map(_rejects_configuration, own_pods(group)))), None)
    if refused is not None:
        return f"{refused.name} does not start: {_obstacle(refused, layouts)}"
    if attempt.ready_since is not None and count_crashes(updated) > attempt.terminations:
        return (
            f"its engine terminated {now - attempt.ready_since:.0f} s after it became Ready: {_last_message(updated)}"
        )
    is_layout_pending = any(group.is_ready and group.name not in layouts for group in updated)
    is_up = any(group.is_ready and layouts.get(group.name) == Degrees.wanted(deployment.spec) for group in updated)
    since = attempt.since if attempt.ready_since is None else attempt.ready_since
    if now - since < change_timeout_seconds(deployment) or is_layout_pending or is_up:
        return None
    worst = min(updated, key=lambda group: (phase_of(group, EngineView())[0] != "Failed", group.ordinal))
    return f"{worst.name} did not become Ready within {describe_start_timeout(deployment)}: {_obstacle(worst, layouts)}"


def _obstacle(group: Group, layouts: Mapping[str, Degrees]) -> str:
    phase, message = phase_of(group, EngineView())
    if phase == "Ready":
        return f"its engine runs another layout: {layouts.get(group.name)}"
    return message or {"Loading": "it is still loading", "Pending": "its pod is not running"}.get(phase, phase.lower())


def _rejects_configuration(pod: Manifest) -> bool:
    """Return True if the engine repeatedly exited because its configuration is not possible."""
    for container in (pod.get("status") or {}).get("containerStatuses") or []:
        states = (container.get("state") or {}, container.get("lastState") or {})
        codes = [(state.get("terminated") or {}).get("exitCode") for state in states]
        terminations = int(container.get("restartCount", 0)) + ("terminated" in states[0])
        if CONFIGURATION_ERROR_EXIT_CODE in codes and terminations >= MIN_REFUSED_STARTS:
            return True
    return False


# --- stored state -----------------------------------------------------------------------------------------------------


def stored_rollout(
    deployment: InferenceDeployment, observed: ObservedChildren, *, key: str, former_key: str | None = None
) -> RolloutState:
    """Return the rollout state stored in the ConfigMap, signed with `key` or `former_key`."""
    name = rollout_config_map_name(deployment)
    found = next((m for m in observed.config_maps if m["metadata"]["name"] == name), None)
    text = None if found is None else (found.get("data") or {}).get(ROLLOUT_KEY)
    return from_text(text, key=key, former_key=former_key)


def plan_rollout_state(
    deployment: InferenceDeployment, observed: ObservedChildren, state: RolloutState, *, key: str, now: float
) -> tuple[Apply, ...]:
    """Return an apply of the ConfigMap if it differs from the stored one.

    Nothing is stored while there is only a young attempt, which can be recovered from its pods, unless an attempt of
    another change is stored.
    """
    attempt = state.attempt
    is_young = (
        attempt is not None
        and attempt.ready_since is None
        and now - attempt.since < unstored_attempt_seconds(deployment)
    )
    if state == RolloutState() or is_young:
        stored = stored_rollout(deployment, observed, key=key)
        is_another = stored.attempt is not None and (attempt is None or stored.attempt.change != attempt.change)
        if replace(state, attempt=None) == replace(stored, attempt=None) and not is_another:
            return ()
    return plan_applies([rollout_config_map(deployment, to_text(state, key=key))], observed)


@functools.lru_cache(maxsize=MAX_KEPT_TEXTS)
def to_text(state: RolloutState, *, key: str) -> str:
    """Return the signed text for the ConfigMap. Cached, as it is compared in each iteration and seldom changes."""
    return sign(json.dumps(asdict(state), sort_keys=True), key=key, kind=SIGNED_KIND)


def from_text(text: str | None, *, key: str, former_key: str | None = None) -> RolloutState:
    """Parse what `to_text` wrote; empty state if it is missing, damaged or not signed by this operator."""
    body = verify(text, key=key, kind=SIGNED_KIND, former_key=former_key)
    if body is None:
        return RolloutState()
    try:
        found = json.loads(body)
        known_good, attempt, back = found["known_good"], found["attempt"], found["rolled_back"]
        surge_obstacle, watch = found.get("surge_obstacle"), found.get("watch")
        return RolloutState(
            _parse_revision_spec(known_good),
            None if attempt is None else _parse_attempt(attempt),
            None if back is None else RolledBackChange(str(back["change"]), str(back["message"])),
            None
            if surge_obstacle is None
            else NoSurgeRoom(str(surge_obstacle["change"]), str(surge_obstacle["message"])),
            _parse_revision_spec(found.get("previous")),
            None if watch is None else _parse_watch(watch),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return RolloutState()


def _parse_revision_spec(data: Mapping[str, Any] | None) -> RevisionSpec | None:
    if data is None:
        return None
    caps = data.get("caps")
    return RevisionSpec(
        str(data["spec"]),
        data["image"],
        data.get("restarted_at"),
        data.get("commit"),
        None if caps is None else (caps[0], caps[1], caps[2]),
    )


def _parse_watch(data: Mapping[str, Any]) -> PostRolloutWatch:
    rate = data.get("former_rate")
    return PostRolloutWatch(float(data["since"]), int(data["terminations"]), None if rate is None else float(rate))


def _parse_attempt(data: Mapping[str, Any]) -> RolloutAttempt:
    ready = data.get("ready_since")
    served = None if ready is None else float(ready)
    return RolloutAttempt(str(data["change"]), float(data["since"]), served, int(data.get("terminations", 0)))


def _spec_without_replicas(deployment: InferenceDeployment) -> dict[str, Any]:
    dumped = deployment.spec.model_dump(mode="json", by_alias=True, exclude_unset=True)
    return {name: value for name, value in dumped.items() if name not in REPLICA_FIELDS}

"""A change that does not come up is taken back. Pure: the time is a parameter, nothing is read or written here.

A revision is *proven* when one replica that runs it is Ready with the layout that was asked for. The spec of the last
proven one is kept (the ConfigMap NAME-rollout). When no replica of a new revision becomes Ready within
`spec.rollout.startTimeout`, or the engine refuses it outright, replicas return to the last proven spec, and the change
is tried again only when the spec, or what is rendered from it, becomes another one.

              change                 one Ready
    proven ───────────► attempt ───────────────► proven (the new one)
       ▲                   │ budget spent, or refused
       └───────────────────┴──► taken back ── the spec changes ──► attempt
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any

from trimtab_operator.builders.config_map import ROLLOUT_KEY, rollout_config_map
from trimtab_operator.builders.labels import rollout_config_map_name
from trimtab_operator.builders.pod import grace_seconds
from trimtab_operator.builders.record import Record, without_told_live
from trimtab_operator.builders.startup import start_seconds, start_words
from trimtab_operator.builders.stateful_set import NO_RECORDS, Rendered, rendered
from trimtab_operator.errors import InvalidSpec
from trimtab_operator.layout.degrees import Degrees
from trimtab_operator.observed.actions import Apply, Note
from trimtab_operator.observed.drift import plan_applies
from trimtab_operator.observed.ends import NO_WORDS, ends_of, last_words
from trimtab_operator.observed.groups import Group, Observed, revision_label
from trimtab_operator.observed.phases import EngineView, phase_of
from trimtab_operator.resource.canonical_json import compact
from trimtab_operator.resource.manifest import Manifest
from trimtab_operator.resource.quantity import parse_seconds
from trimtab_operator.resource.signed_text import opened, sealed
from trimtab_operator.resource.spec import InferenceDeployment
from trimtab_operator.resource.time import parse_time
from trimtab_operator.rollout.surge import NoRoom, allowed_surge, no_room
from trimtab_operator.validation.rules import refusals

# docs/reference/contract.md section 1: the command line, the model or the machine does not allow it
NOT_ALLOWED_EXIT_CODE = 2
MAX_KEPT_TEXTS = 1024
SEAL = "rollout"  # what its sealed text is called
WATCHED_SECONDS = 3600.0  # after a change was proven: what its engines do later is not put down to it any more
CRASHES_TOO_MANY = 3  # of its engines in that time: the tuner takes back its own values after the first
UNWRITTEN_SECONDS = 60.0  # an attempt that is younger is not written down: most have served by then, or are edited
REFUSED_STARTS = 3  # ended so, this often: the node is not to blame, and waiting helps nobody
HOW_MANY = ("replicas", "priority", "scaling")  # whatever replicas run, the owner's latest word holds
NOT_RENDERED = ("replicas", "scaling", "metrics", "objectives", "tuning")  # caps of `tuning` are in the revision


@dataclass(frozen=True, slots=True)
class Form:
    """What was asked for when a revision was proven: the spec as JSON, the image that it meant, and when its owner last
    asked for new pods."""

    spec: str
    image: str | None
    restarted_at: str | None = None
    commit: str | None = None
    """What the revision of a downloaded model meant."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """A change on its way: which one, and since when (Unix time). `ready_since`: when its first replica began to serve;
    None: it has not. `ends`: how often engines of the change had ended by then."""

    change: str
    since: float
    ready_since: float | None = None
    ends: int = 0


@dataclass(frozen=True, slots=True)
class Watch:
    """The newest proven form, after it was proven: when that was (Unix time), and how often its engines had ended."""

    since: float
    ends: int


@dataclass(frozen=True, slots=True)
class TakenBack:
    """A change that did not come up, and why."""

    change: str
    message: str


@dataclass(frozen=True, slots=True)
class RolloutState:
    """What is remembered between ticks, and across restarts of the operator. `former`: the form that was proven before
    the newest one."""

    proven: Form | None = None
    attempt: Attempt | None = None
    taken_back: TakenBack | None = None
    no_room: NoRoom | None = None
    former: Form | None = None
    watch: Watch | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """The new state, and whether replicas are to run the proven form instead of the spec.

    `failure` says why a first revision, with none to return to, does not come up; `trying`, while the change has to
    show that it is good, what is waited for.
    """

    state: RolloutState
    returns: bool = False
    failure: str | None = None
    trying: str | None = None


@dataclass(frozen=True, slots=True)
class FailedChange:
    """A change that did not come up. `returns_to` is the revision that replicas return to; None: none ever worked."""

    message: str
    returns_to: str | None


@dataclass(frozen=True, slots=True)
class Course:
    """What to steer by in one turn. `target` is what replicas are to run; None: leave them as they are."""

    state: RolloutState
    target: Rendered | None
    failed: FailedChange | None = None
    unproven: frozenset[str] = frozenset()
    is_first_only: bool = False
    """Whether the change may reach one replica, and no other yet."""
    trying: str | None = None
    """What a change that has to show that it is good waits for."""


def course_of(
    state: RolloutState,
    wanted: Rendered,
    proven: Rendered | None,
    groups: tuple[Group, ...],
    layouts: Mapping[str, Degrees],
    *,
    may_start: bool,
    now: float,
    worse: str | None = None,
) -> Course:
    """Choose what replicas are to run: what is `wanted`, or the last `proven` form, while the spec may not start yet
    and when it did not come up. `layouts` is what the engines of Ready groups report, by name; `now` is Unix time.
    `worse`: what the first replica of the change does worse than the others, if anything.
    """
    if not may_start:
        return Course(state, proven)
    proven_revision = None if proven is None else proven.revision
    step = decide(
        state,
        wanted.deployment,
        groups,
        layouts,
        revision=wanted.revision,
        proven_revision=proven_revision,
        now=now,
        worse=worse,
    )
    after = replace(step.state, no_room=state.no_room)
    if step.returns and after.taken_back is not None:
        return Course(after, proven, FailedChange(after.taken_back.message, proven_revision))
    failed = None if step.failure is None else FailedChange(step.failure, None)
    if is_on_trial(wanted.deployment, wanted.revision, proven_revision, after):
        on = frozenset(group.name for group in groups if group.revision == wanted.revision)
        return Course(after, wanted, failed, on, is_first_only=True, trying=step.trying)
    unproven = unproven_groups(wanted.deployment, groups, layouts, revision=wanted.revision)
    return Course(after, wanted, failed, unproven)


def is_on_trial(
    deployment: InferenceDeployment, revision: str, proven_revision: str | None, state: RolloutState
) -> bool:
    """Whether the change has to show first, with one replica, that it is good: there is something to return to."""
    is_proven = proven_revision is None or revision == proven_revision or state.proven == form_of(deployment)
    return not is_proven and bake_seconds(deployment) > 0


@dataclass(frozen=True, slots=True)
class Surge:
    """How many groups there may be beyond the wanted ones in this turn, and what is remembered and told of it."""

    groups: int
    no_room: NoRoom | None = None
    notes: tuple[Note, ...] = ()


def surge_of(known: NoRoom | None, target: Rendered, observed: Observed, *, replicas: int, now: datetime) -> Surge:
    """Decide whether new groups come up beside the old ones. `known`: for which change there was no room.

    Where that is found out, it is told in this turn; replicas are replaced in place from the next turn on.
    """
    allowed = allowed_surge(target.deployment, replicas)
    change = change_of(target.deployment, target.revision)
    if known is not None and known.change == change:
        return Surge(0, known)
    patience = start_seconds(target.deployment)
    why = no_room(observed, target.revision, replicas=replicas, start_seconds=patience, now=now)
    if allowed == 0 or why is None:
        return Surge(allowed)
    gap = "nobody is answered until the new one is Ready" if replicas == 1 else "each is missing for a while"
    message = f"{why}; replicas are replaced in place now: {gap}"
    return Surge(allowed, NoRoom(change, message), (Note("Warning", "NoRoomForSurge", message, change),))


def proven_form(
    state: RolloutState, wanted: Rendered, *, admin_token_sha256: str, records: Mapping[str, Record] = NO_RECORDS
) -> Rendered | None:
    """What the last proven form renders to: what is `wanted` now, in the usual case. None: there is none."""
    if state.proven is None:
        return None
    if state.proven == form_of(wanted.deployment):
        return wanted
    proven = proven_deployment(wanted.deployment, state.proven)
    return None if proven is None else rendered(proven, admin_token_sha256=admin_token_sha256, records=records)


def form_of(deployment: InferenceDeployment) -> Form:
    """The spec with what was written in it, in one spelling."""
    return Form(compact(_written(deployment)), deployment.image, deployment.restarted_at, deployment.commit)


def change_of(deployment: InferenceDeployment, revision: str) -> str:
    """Names a change: equal as long as neither what is rendered nor the rest that could help it changes.

    The replica count is left out: autoscalers write it. So is tuning, whose caps are part of the revision.
    """
    written = without_told_live(_written(deployment))
    rest = {name: value for name, value in written.items() if name not in NOT_RENDERED}
    digest = hashlib.sha256(compact({"image": deployment.image, "spec": rest}).encode()).hexdigest()
    return f"{revision}-{digest[:10]}"


def proven_deployment(deployment: InferenceDeployment, proven: Form) -> InferenceDeployment | None:
    """The resource as it was proven, with today's replica count, priority and pace; None when that cannot be done."""
    try:
        body = {"metadata": {"namespace": deployment.namespace, "name": deployment.name, "uid": deployment.uid}}
        before = InferenceDeployment.parse(
            {**body, "spec": json.loads(proven.spec)},
            default_image=proven.image,
            allowed_privileges=deployment.allowed_privileges,
        )
    except (InvalidSpec, ValueError):
        return None
    pace = {name: getattr(deployment.spec.rollout, name) for name in ("max_unavailable", "max_surge")}
    rollout = before.spec.rollout.model_copy(update=pace)
    today = {name: getattr(deployment.spec, name) for name in HOW_MANY}
    spec = before.spec.model_copy(update={**today, "rollout": rollout})
    found = replace(
        deployment,
        spec=spec,
        image=before.image,
        restarted_at=proven.restarted_at,
        commit=proven.commit,
        weights_bytes=deployment.weights_bytes if spec.model == deployment.spec.model else None,
    )
    return None if refusals(found) else found


def budget_seconds(deployment: InferenceDeployment) -> float:
    """How long a change may take until its first replica is Ready: the old one drains first."""
    return start_seconds(deployment) + grace_seconds(deployment)


def bake_seconds(deployment: InferenceDeployment) -> float:
    """For how long the first replica of a change serves before the others follow."""
    return parse_seconds(deployment.spec.rollout.bake_time)


def decide(
    state: RolloutState,
    deployment: InferenceDeployment,
    groups: Iterable[Group],
    layouts: Mapping[str, Degrees],
    *,
    revision: str,
    proven_revision: str | None,
    now: float,
    worse: str | None = None,
) -> Step:
    """One step. `layouts` is what the engines of Ready groups report, by name; `revision` what the spec renders to,
    `proven_revision` what the proven form renders to (None: there is none); `now` is Unix time. `worse`: what the first
    replica of the change does worse than the others.
    """
    change = change_of(deployment, revision)
    taken_back = state.taken_back
    if taken_back is not None and taken_back.change == change and proven_revision is not None:
        return Step(replace(state, attempt=None), returns=True)
    on = [group for group in groups if group.revision == revision]
    kept = RolloutState(state.proven, former=state.former, watch=state.watch)
    serves = any(group.is_ready and layouts.get(group.name) == Degrees.wanted(deployment.spec) for group in on)
    if revision == proven_revision:
        return _watched(replace(kept, proven=form_of(deployment)) if serves else kept, change, on, now)
    if not on:
        return Step(kept)
    attempt = state.attempt
    if attempt is None or attempt.change != change:
        attempt = Attempt(change, now if attempt is not None else _begun(on, deployment, now))
    if serves and attempt.ready_since is None:
        attempt = replace(attempt, ready_since=now, ends=_ends(on))
    bake = bake_seconds(deployment) if proven_revision is not None else 0.0
    has_baked = attempt.ready_since is not None and now - attempt.ready_since >= bake
    why = _why_it_failed(on, layouts, attempt, deployment, now) if not serves or bake else None
    if why is None and serves and has_baked and worse is not None:
        first = next(group.name for group in on if group.is_ready)
        why = f"{first} served for {deployment.spec.rollout.bake_time} beside the others, and {worse}"
    if why is None and serves and has_baked:
        return Step(RolloutState(form_of(deployment), former=state.proven, watch=Watch(now, _ends(on))))
    kept = replace(kept, attempt=attempt)
    if why is None:
        return Step(kept, trying=_trying(on, deployment) if bake and serves else None)
    if proven_revision is None:
        return Step(kept, failure=why)
    return Step(replace(kept, attempt=None, taken_back=TakenBack(change, why)), returns=True)


def unwritten_seconds(deployment: InferenceDeployment) -> float:
    """For how long an attempt is not written down: never until it has failed."""
    return min(UNWRITTEN_SECONDS, budget_seconds(deployment) / 2)


def _begun(on: Iterable[Group], deployment: InferenceDeployment, now: float) -> float:
    """When a change began of which nothing is remembered: now, or with its first pod where the operator that began it
    is gone. That one would have written down what is older."""
    made = (parse_time(pod["metadata"].get("creationTimestamp")) for group in on for pod in _own_pods(group))
    first = min((moment.timestamp() for moment in made if moment is not None), default=now)
    return min(now, max(first, now - unwritten_seconds(deployment)))


def _trying(on: list[Group], deployment: InferenceDeployment) -> str:
    first = next(group.name for group in on if group.is_ready)
    return (
        f"{first} runs the change first; it counts as good when that has served for {deployment.spec.rollout.bake_time}"
    )


def _watched(state: RolloutState, change: str, on: list[Group], now: float) -> Step:
    """A form that was proven lately and whose engines end again and again since then is taken back after all."""
    watch = state.watch
    if watch is None or state.former is None or now - watch.since > WATCHED_SECONDS:
        return Step(state)
    crashes = _ends(on) - watch.ends
    if crashes < CRASHES_TOO_MANY:
        return Step(state)
    minutes = (now - watch.since) / 60
    why = f"its engines ended {crashes} times in the {minutes:.0f} minutes after it was proven: {_last_words(on)}"
    return Step(RolloutState(state.former, taken_back=TakenBack(change, why)))


def _ends(on: Iterable[Group]) -> int:
    """How often engines of these groups' revision have ended in the pods that there are."""
    return sum(ends_of(pod) for group in on for pod in _own_pods(group))


def _last_words(on: Iterable[Group]) -> str:
    ended = [pod for group in on for pod in _own_pods(group) if ends_of(pod)]
    return last_words(ended[0]) if ended else NO_WORDS


def unproven_groups(
    deployment: InferenceDeployment, groups: Iterable[Group], layouts: Mapping[str, Degrees], *, revision: str
) -> frozenset[str]:
    """Groups whose pods are Ready at `revision`, but whose engines do not report the wanted layout, or not yet: no
    further group gets the revision on their account.
    """
    wanted = Degrees.wanted(deployment.spec)
    return frozenset(g.name for g in groups if g.revision == revision and layouts.get(g.name) != wanted)


def _why_it_failed(
    on: list[Group],
    layouts: Mapping[str, Degrees],
    attempt: Attempt,
    deployment: InferenceDeployment,
    now: float,
) -> str | None:
    """Why the change has failed; None while it has not."""
    refused = next((group for group in on if any(map(_refuses_to_start, _own_pods(group)))), None)
    if refused is not None:
        return f"{refused.name} does not start: {_words(refused, layouts)}"
    if attempt.ready_since is not None and _ends(on) > attempt.ends:
        return f"its engine ended {now - attempt.ready_since:.0f} s after it had begun to serve: {_last_words(on)}"
    is_asked_again = any(group.is_ready and group.name not in layouts for group in on)
    is_up = any(group.is_ready and layouts.get(group.name) == Degrees.wanted(deployment.spec) for group in on)
    since = attempt.since if attempt.ready_since is None else attempt.ready_since
    if now - since < budget_seconds(deployment) or is_asked_again or is_up:
        return None
    worst = min(on, key=lambda group: (phase_of(group, EngineView())[0] != "Failed", group.ordinal))
    return f"{worst.name} did not become Ready within {start_words(deployment)}: {_words(worst, layouts)}"


def _words(group: Group, layouts: Mapping[str, Degrees]) -> str:
    phase, message = phase_of(group, EngineView())
    if phase == "Ready":
        return f"its engine runs another layout: {layouts.get(group.name)}"
    return message or {"Loading": "it still loads", "Pending": "its pod does not run"}.get(phase, phase.lower())


def _own_pods(group: Group) -> tuple[Manifest, ...]:
    """The pods of the group's revision; what others do says nothing of it."""
    return tuple(pod for pod in group.pods if revision_label(pod) == group.revision)


def _refuses_to_start(pod: Manifest) -> bool:
    """Whether the engine ended again and again because what it was asked for is not possible."""
    for container in (pod.get("status") or {}).get("containerStatuses") or []:
        states = (container.get("state") or {}, container.get("lastState") or {})
        codes = [(state.get("terminated") or {}).get("exitCode") for state in states]
        ends = int(container.get("restartCount", 0)) + ("terminated" in states[0])
        if NOT_ALLOWED_EXIT_CODE in codes and ends >= REFUSED_STARTS:
            return True
    return False


# --- remembered -------------------------------------------------------------------------------------------------------


def stored_rollout(
    deployment: InferenceDeployment, observed: Observed, *, key: str, former_key: str | None = None
) -> RolloutState:
    """What the ConfigMap remembers. `key` signs it, or `former_key` did."""
    name = rollout_config_map_name(deployment)
    found = next((m for m in observed.config_maps if m["metadata"]["name"] == name), None)
    text = None if found is None else (found.get("data") or {}).get(ROLLOUT_KEY)
    return from_text(text, key=key, former_key=former_key)


def plan_rollout_state(
    deployment: InferenceDeployment, observed: Observed, state: RolloutState, *, key: str, now: float
) -> tuple[Apply, ...]:
    """The ConfigMap, when it differs from what is stored; none as long as there is nothing to remember, or nothing but
    an attempt that could be begun anew from its pods: not so where that of another change is stored."""
    attempt = state.attempt
    is_young = (
        attempt is not None and attempt.ready_since is None and now - attempt.since < unwritten_seconds(deployment)
    )
    if state == RolloutState() or is_young:
        stored = stored_rollout(deployment, observed, key=key)
        is_another = stored.attempt is not None and (attempt is None or stored.attempt.change != attempt.change)
        if replace(state, attempt=None) == replace(stored, attempt=None) and not is_another:
            return ()
    return plan_applies([rollout_config_map(deployment, to_text(state, key=key))], observed)


@functools.lru_cache(maxsize=MAX_KEPT_TEXTS)
def to_text(state: RolloutState, *, key: str) -> str:
    """For the ConfigMap, signed. It is compared with what is there at each look, and seldom another one."""
    return sealed(json.dumps(asdict(state), sort_keys=True), key=key, kind=SEAL)


def from_text(text: str | None, *, key: str, former_key: str | None = None) -> RolloutState:
    """What `to_text` wrote; nothing is remembered when it is missing, damaged or not ours."""
    body = opened(text, key=key, kind=SEAL, former_key=former_key)
    if body is None:
        return RolloutState()
    try:
        found = json.loads(body)
        proven, attempt, back = found["proven"], found["attempt"], found["taken_back"]
        no_room, watch = found.get("no_room"), found.get("watch")
        return RolloutState(
            _form(proven),
            None if attempt is None else _attempt(attempt),
            None if back is None else TakenBack(str(back["change"]), str(back["message"])),
            None if no_room is None else NoRoom(str(no_room["change"]), str(no_room["message"])),
            _form(found.get("former")),
            None if watch is None else Watch(float(watch["since"]), int(watch["ends"])),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return RolloutState()


def _form(data: Mapping[str, Any] | None) -> Form | None:
    if data is None:
        return None
    return Form(str(data["spec"]), data["image"], data.get("restarted_at"), data.get("commit"))


def _attempt(data: Mapping[str, Any]) -> Attempt:
    ready = data.get("ready_since")
    served = None if ready is None else float(ready)
    return Attempt(str(data["change"]), float(data["since"]), served, int(data.get("ends", 0)))


def _written(deployment: InferenceDeployment) -> dict[str, Any]:
    dumped = deployment.spec.model_dump(mode="json", by_alias=True, exclude_unset=True)
    return {name: value for name, value in dumped.items() if name not in HOW_MANY}

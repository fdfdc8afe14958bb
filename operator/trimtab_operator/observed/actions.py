"""Actions of a reconcile plan as values: writes to children, patches of engines, and Events."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from trimtab_operator.observed.engines import EngineTarget
from trimtab_operator.resource.manifest import Manifest
from trimtab_operator.tuner.parameters import Value

MAX_EVENT_MESSAGE = 1024  # characters: the API server rejects longer ones

LiveValues = Mapping[str, Value | str]
"""Live parameters of an engine, keyed by their names in its admin API."""


@dataclass(frozen=True, slots=True)
class Apply:
    """A server-side apply of one manifest.

    `is_new` is True if no such child was observed. `fallback` is applied instead if the API server rejects the manifest
    as invalid.
    """

    manifest: Manifest
    is_new: bool
    reason: str
    fallback: Manifest | None = None


@dataclass(frozen=True, slots=True)
class Delete:
    """A deletion of one child, valid only while its uid is the observed one."""

    kind: str
    name: str
    uid: str
    reason: str
    grace_seconds: int | None = None
    """Grace period in seconds; None for the object's own. 0 does not wait for the node's kubelet, which may be gone."""
    budget: str | None = None
    """Name of the PodDisruptionBudget to evict under; the deletion is skipped while it allows no disruption. None to
    delete directly."""


Action = Apply | Delete

PROTECTION_KINDS = ("PodDisruptionBudget", "NetworkPolicy", "PodMonitor", "PrometheusRule", "RoleBinding", "Deployment")
"""Kinds that engines serve without. The last two are the router's, without which clients reach the engines directly."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """An action that the API server rejected."""

    action: Action
    error: Exception

    @property
    def stops_serving(self) -> bool:
        """False for objects that protect, monitor or front engines, which serve without them."""
        return kind_and_name(self.action)[0] not in PROTECTION_KINDS


def kind_and_name(action: Action) -> tuple[str, str]:
    """Return the kind and name of the object that an action is about."""
    if isinstance(action, Delete):
        return action.kind, action.name
    return str(action.manifest["kind"]), str(action.manifest["metadata"]["name"])


def depends_on(action: Action, rejected: Action) -> bool:
    """Return True if an action would do harm without the effect of the `rejected` one.

    Pods need the account, the Secret and the rendezvous Service of their group, if these do not exist yet. The sets of
    a group change together. The Job's result must be stored before the Job is deleted.
    """
    (kind, name), (missing, what) = kind_and_name(action), kind_and_name(rejected)
    if isinstance(rejected, Delete):
        return False
    if kind == "Job":
        return isinstance(action, Delete) and (missing, what) == ("ConfigMap", name)
    if kind != "StatefulSet":
        return False
    leader = name.removesuffix("-w")
    if missing == "StatefulSet":
        return name != leader == what
    if isinstance(action, Delete) or not rejected.is_new:
        return False
    if missing == "ServiceAccount":  # the router has another one
        return bool(action.manifest["spec"]["template"]["spec"].get("serviceAccountName") == what)
    return missing == "Secret" or (missing, what) == ("Service", leader)


@dataclass(frozen=True, slots=True)
class Patch:
    """New live parameter values for the engine of one group.

    The patch is valid only while the engine's configuration has generation `if_match`. `fallback` is set instead for as
    long as the engine has rejected `fields`. With `needs_state`, `fields` are only sent once the tuner's state is
    stored, because a trial that ends the engine must not be repeated after an operator restart.
    """

    target: EngineTarget
    fields: LiveValues
    if_match: int
    fallback: LiveValues | None = None
    needs_state: bool = False

    @property
    def without_state(self) -> Patch | None:
        """The part of the patch that needs no stored state; None if there is none."""
        if not self.needs_state:
            return self
        return None if self.fallback is None else replace(self, fields=self.fallback, fallback=None, needs_state=False)


@dataclass(frozen=True, slots=True)
class Event:
    """A Kubernetes Event to emit.

    `type` is Normal or Warning. `key` distinguishes Events with the same text.
    """

    type: str
    reason: str
    message: str
    key: str = ""


def event_of(action: Action) -> Event | None:
    """Return the Event for an executed action, or None if the action is not reported.

    Only changes of StatefulSets, that is of replicas, are reported.
    """
    if isinstance(action, Delete):
        if action.kind != "StatefulSet":
            return None
        return Event("Normal", "ReplicaRemoved", f"{action.name}: {action.reason}; it is draining", action.uid)
    name = action.manifest["metadata"]["name"]
    if action.manifest["kind"] != "StatefulSet":
        return None
    if action.is_new:
        return Event("Normal", "ReplicaCreated", f"created {name}")
    return Event("Normal", "ReplicaUpdated", f"updated {name}: {action.reason}")


def merge_events(events: Iterable[Event]) -> tuple[Event, ...]:
    """Merge Events of the same type and reason into as few as the message limit allows."""
    found: list[Event] = []
    for event in events:
        same = next((n for n in reversed(found) if (n.type, n.reason) == (event.type, event.reason)), None)
        if same is None or len(same.message) + len(event.message) + 2 > MAX_EVENT_MESSAGE:
            found.append(event)
        elif (event.message, event.key) != (same.message, same.key):
            both = replace(
                same, message=f"{same.message}; {event.message}", key=",".join(filter(None, (same.key, event.key)))
            )
            found[found.index(same)] = both
    return tuple(found)


def delete_of(
    kind: str, manifest: Manifest, reason: str, *, grace_seconds: int | None = None, budget: str | None = None
) -> Delete:
    """Return a Delete for an observed object."""
    metadata = manifest["metadata"]
    return Delete(kind, str(metadata["name"]), str(metadata.get("uid", "")), reason, grace_seconds, budget)

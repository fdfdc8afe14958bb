"""The children of one resource, and its replica groups as they were observed. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from trimtab_operator.builders.engine_args import MEETING_FLAG, TOKEN_FLAG
from trimtab_operator.builders.labels import GROUP_LABEL, REVISION_LABEL, ROLE_LABEL, WORKER
from trimtab_operator.resource.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Missing:
    """Pods that a group asks for and does not get: it has only `num_pods` of them, since `since`; `words` is what the
    API server said, read at `read_at`. Unix times; None: not read yet.
    """

    since: float
    num_pods: int
    words: str | None = None
    read_at: float | None = None


@dataclass(frozen=True)
class Observed:
    """The children of one resource as the API server gave them; all owned by it.

    It has no slots: its groups are worked out once and kept.
    """

    services: tuple[Manifest, ...] = ()
    stateful_sets: tuple[Manifest, ...] = ()
    config_maps: tuple[Manifest, ...] = ()
    pods: tuple[Manifest, ...] = ()
    jobs: tuple[Manifest, ...] = ()
    accounts: tuple[Manifest, ...] = ()
    secrets: tuple[Manifest, ...] = ()
    """The one that the pods of a replica of several share: no other Secret is ever read."""
    optional: Mapping[str, tuple[Manifest, ...]] = field(default_factory=dict)
    """Children of kinds that can be done without, by kind. Where a kind is absent the cluster does not serve it, or the
    operator has no right to it: none is made."""
    torn: frozenset[int] = frozenset()
    """Ordinals of groups whose pods are known not to share one engine (observed/shared_engine.py)."""
    missing: Mapping[str, Missing] = field(default_factory=dict)
    """Pods that are not created, by the name of their group (observed/missing_pods.py)."""

    def of(self, kind: str) -> tuple[Manifest, ...]:
        """The children of a kind that the operator writes."""
        required = {
            "Service": self.services,
            "StatefulSet": self.stateful_sets,
            "ConfigMap": self.config_maps,
            "Secret": self.secrets,
            "ServiceAccount": self.accounts,
        }
        return required[kind] if kind in required else self.optional.get(kind, ())

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The replica groups that are there to stay, by ordinal."""
        return _groups_of(self)


@dataclass(frozen=True)
class Group:
    """One replica group: the leader's StatefulSet, the workers' when it spans pods, and the pods that there are.

    It has no slots: what is asked of it dozens of times a turn is worked out once and kept.
    """

    ordinal: int
    stateful_set: Manifest
    pods: tuple[Manifest, ...] = ()
    """Leader first, then the workers by their number."""
    worker_set: Manifest | None = None
    is_torn: bool = False
    missing: Missing | None = None

    @property
    def name(self) -> str:
        return str(self.stateful_set["metadata"]["name"])

    @property
    def stateful_sets(self) -> tuple[Manifest, ...]:
        return (self.stateful_set,) if self.worker_set is None else (self.stateful_set, self.worker_set)

    @cached_property
    def revision(self) -> str:
        """That of both StatefulSets; empty while they differ, which is no revision."""
        revision = revision_label(self.stateful_set)
        return revision if self.worker_set is None or revision_label(self.worker_set) == revision else ""

    @property
    def num_pods(self) -> int:
        """How many pods its StatefulSets ask for."""
        return sum(int((stateful_set.get("spec") or {}).get("replicas", 1)) for stateful_set in self.stateful_sets)

    @property
    def leader(self) -> Manifest | None:
        """The pod that serves; None while there is none."""
        return next((pod for pod in self.pods if not is_worker(pod)), None)

    @cached_property
    def is_outdated(self) -> bool:
        """Whether a pod of another revision than the group's is still there, or one that meets elsewhere."""
        elsewhere = {meeting_address(pod) for pod in self.pods} - {None, *self.meeting_addresses}
        return bool(elsewhere) or any(revision_label(pod) != self.revision for pod in self.pods)

    @cached_property
    def meeting_addresses(self) -> frozenset[str]:
        """Where its StatefulSets let the ranks meet: one, but for a moment; none for a replica of one pod."""
        templates = [(s.get("spec") or {}).get("template") or {} for s in self.stateful_sets]
        return frozenset(address for template in templates if (address := meeting_address(template)) is not None)

    @property
    def is_terminating(self) -> bool:
        """Whether one of its pods is being deleted: the engine that runs in all of them ends with it."""
        return any(is_terminating(pod) for pod in self.pods)

    @cached_property
    def is_ready(self) -> bool:
        """All its pods run the group's revision and one engine, are Ready and are not going away."""
        is_whole = self.leader is not None and len(self.pods) == self.num_pods
        return is_whole and not self.is_outdated and not self.is_torn and all(is_pod_ready(pod) for pod in self.pods)

    @cached_property
    def serves(self) -> bool:
        """Whether its engine takes requests: the group is Ready, or still has the pods of another revision than it is
        to get, and they are."""
        if self.leader is None or self.is_torn or not self.is_outdated:
            return self.is_ready
        revision = revision_label(self.leader)
        return all(is_pod_ready(pod) for pod in self.pods if revision_label(pod) == revision)


def groups_of(observed: Observed) -> tuple[Group, ...]:
    """The groups that are there to stay, by ordinal; StatefulSets being deleted are left out."""
    return observed.groups


def _groups_of(observed: Observed) -> tuple[Group, ...]:
    staying = [s for s in observed.stateful_sets if ordinal_of(s) is not None and not is_terminating(s)]
    workers = {ordinal_of(s): s for s in staying if is_worker(s)}
    found = []
    for stateful_set in staying:
        ordinal = ordinal_of(stateful_set)
        if ordinal is not None and not is_worker(stateful_set):
            pods = sorted((pod for pod in observed.pods if ordinal_of(pod) == ordinal), key=_place)
            missing = observed.missing.get(str(stateful_set["metadata"]["name"]))
            is_torn = ordinal in observed.torn
            found.append(Group(ordinal, stateful_set, tuple(pods), workers.get(ordinal), is_torn, missing))
    return tuple(sorted(found, key=lambda group: group.ordinal))


def _place(pod: Manifest) -> tuple[bool, int, str]:
    name = str(pod["metadata"]["name"])
    number = name.rsplit("-", 1)[-1]
    return is_worker(pod), int(number) if number.isdigit() else 0, name


def is_pod_ready(pod: Manifest) -> bool:
    """Ready by its condition and not being deleted."""
    if is_terminating(pod):
        return False
    conditions = (pod.get("status") or {}).get("conditions") or []
    return any(c.get("type") == "Ready" and c.get("status") == "True" for c in conditions)


def meeting_address(pod: Manifest) -> str | None:
    """Where the ranks of a pod, or of pods of a template, meet, by their flags; None where there is no need to."""
    return _flag(pod, MEETING_FLAG)


def token_hash_of(pod: Manifest) -> str | None:
    """The hash of the admin token that a pod's engine was started with; None where it was told none."""
    return _flag(pod, TOKEN_FLAG)


def _flag(pod: Manifest, name: str) -> str | None:
    """The last value of a flag of a pod's containers; None where it stands nowhere."""
    containers = (pod.get("spec") or {}).get("containers") or []
    flags = [argument for container in containers for argument in container.get("args") or []]
    found = [flag.partition("=")[2] for flag in flags if flag.startswith(f"{name}=")]
    return found[-1] if found else None


def is_terminating(manifest: Manifest) -> bool:
    return bool(manifest["metadata"].get("deletionTimestamp"))


def is_worker(manifest: Manifest) -> bool:
    """Whether a pod or StatefulSet is for workers; what carries no role is a leader's."""
    return label_of(manifest, ROLE_LABEL) == WORKER


def revision_label(manifest: Manifest) -> str:
    return label_of(manifest, REVISION_LABEL)


def ordinal_of(manifest: Manifest) -> int | None:
    """The group's number, from its label; None when it carries none."""
    text = label_of(manifest, GROUP_LABEL)
    return int(text) if text.isdigit() else None


def label_of(manifest: Manifest, label: str) -> str:
    return str((manifest["metadata"].get("labels") or {}).get(label, ""))

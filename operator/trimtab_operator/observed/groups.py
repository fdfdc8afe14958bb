"""The children of one resource, and its replica groups as they were observed. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from trimtab_operator.builders.engine_args import MASTER_ADDR_FLAG, START_FLAGS, TOKEN_FLAG
from trimtab_operator.builders.labels import GROUP_LABEL, REVISION_LABEL, ROLE_LABEL, WORKER
from trimtab_operator.resource.manifest import Manifest


@dataclass(frozen=True, slots=True)
class MissingPods:
    """Pods that a group wants and does not get.

    The group has had only `num_pods` pods since `since`. `error` is the API server's error, read at `read_at` (both
    None until it is read). Times are Unix seconds.
    """

    since: float
    num_pods: int
    error: str | None = None
    read_at: float | None = None


@dataclass(frozen=True, slots=True)
class StartError:
    """Reason and message of an Event about a pod that is not created or does not start."""

    reason: str
    message: str


@dataclass(frozen=True)
class ObservedChildren:
    """The children of one resource as returned by the API server; all are owned by the resource.

    The class has no slots because `groups` is computed once and cached.
    """

    services: tuple[Manifest, ...] = ()
    stateful_sets: tuple[Manifest, ...] = ()
    config_maps: tuple[Manifest, ...] = ()
    pods: tuple[Manifest, ...] = ()
    jobs: tuple[Manifest, ...] = ()
    accounts: tuple[Manifest, ...] = ()
    secrets: tuple[Manifest, ...] = ()
    """The Secret shared by the pods of a multi-pod replica; the operator reads no other Secret."""
    optional: Mapping[str, tuple[Manifest, ...]] = field(default_factory=dict)
    """Optional children by kind. A kind is absent if the cluster does not serve it or the operator may not access it;
    then none is created."""
    split_groups: frozenset[int] = frozenset()
    """Ordinals of groups whose pods do not share one engine (observed/shared_engine.py)."""
    missing: Mapping[str, MissingPods] = field(default_factory=dict)
    """Missing pods by the name of their group (observed/missing_pods.py)."""
    start_errors: Mapping[str, StartError] = field(default_factory=dict)
    """Causes of Jobs and pods that do not start, by name (observed/start_errors.py)."""
    scale_ups: frozenset[str] = frozenset()
    """Names of unscheduled pods for which a cluster autoscaler adds a node."""
    new_start_errors: Mapping[str, StartError] = field(default_factory=dict)
    """Causes that were not known in the last iteration."""
    router_pods: tuple[Manifest, ...] = ()

    def of(self, kind: str) -> tuple[Manifest, ...]:
        """Return the children of a kind that the operator writes."""
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
        """Replica groups that are not being deleted, by ordinal."""
        return _groups_of(self)


@dataclass(frozen=True)
class Group:
    """One replica group: the leader's StatefulSet, the workers' if it spans several pods, and its existing pods.

    The class has no slots because properties that are read dozens of times per reconcile are computed once and cached.
    """

    ordinal: int
    stateful_set: Manifest
    pods: tuple[Manifest, ...] = ()
    """Leader first, then workers by number."""
    worker_set: Manifest | None = None
    is_split: bool = False
    missing: MissingPods | None = None
    start_errors: Mapping[str, StartError] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return str(self.stateful_set["metadata"]["name"])

    @property
    def stateful_sets(self) -> tuple[Manifest, ...]:
        return (self.stateful_set,) if self.worker_set is None else (self.stateful_set, self.worker_set)

    @cached_property
    def revision(self) -> str:
        """Revision of both StatefulSets; empty while they differ."""
        revision = revision_label(self.stateful_set)
        return revision if self.worker_set is None or revision_label(self.worker_set) == revision else ""

    @property
    def num_pods(self) -> int:
        """Number of pods that its StatefulSets want."""
        return sum(int((stateful_set.get("spec") or {}).get("replicas", 1)) for stateful_set in self.stateful_sets)

    @property
    def leader(self) -> Manifest | None:
        """Leader pod; None while it does not exist."""
        return next((pod for pod in self.pods if not is_worker(pod)), None)

    @cached_property
    def is_outdated(self) -> bool:
        """True if a pod has another revision or another rendezvous address than the group."""
        elsewhere = {pod_rendezvous_address(pod) for pod in self.pods} - {None, *self.rendezvous_addresses}
        return bool(elsewhere) or any(revision_label(pod) != self.revision for pod in self.pods)

    @cached_property
    def rendezvous_addresses(self) -> frozenset[str]:
        """Rendezvous addresses in the templates of its StatefulSets.

        There are none for a replica of one pod, and more than one only while the templates are being updated.
        """
        templates = [(s.get("spec") or {}).get("template") or {} for s in self.stateful_sets]
        return frozenset(address for template in templates if (address := pod_rendezvous_address(template)) is not None)

    @property
    def is_terminating(self) -> bool:
        """True if one of its pods is being deleted, which ends the engine in all of them."""
        return any(is_terminating(pod) for pod in self.pods)

    @cached_property
    def is_ready(self) -> bool:
        """True if all its pods are Ready, run the group's revision and one engine, and are not being deleted."""
        is_whole = self.leader is not None and len(self.pods) == self.num_pods
        return is_whole and not self.is_outdated and not self.is_split and all(is_pod_ready(pod) for pod in self.pods)

    @cached_property
    def serves(self) -> bool:
        """True if its engine takes requests: the group is Ready, or all pods of its previous revision still are."""
        if self.leader is None or self.is_split or not self.is_outdated:
            return self.is_ready
        revision = revision_label(self.leader)
        return all(is_pod_ready(pod) for pod in self.pods if revision_label(pod) == revision)


def groups_of(observed: ObservedChildren) -> tuple[Group, ...]:
    """Return the groups by ordinal, without StatefulSets that are being deleted."""
    return observed.groups


def _groups_of(observed: ObservedChildren) -> tuple[Group, ...]:
    staying = [s for s in observed.stateful_sets if ordinal_of(s) is not None and not is_terminating(s)]
    workers = {ordinal_of(s): s for s in staying if is_worker(s)}
    found = []
    for stateful_set in staying:
        ordinal = ordinal_of(stateful_set)
        if ordinal is not None and not is_worker(stateful_set):
            pods = sorted((pod for pod in observed.pods if ordinal_of(pod) == ordinal), key=_pod_sort_key)
            missing = observed.missing.get(str(stateful_set["metadata"]["name"]))
            is_split = ordinal in observed.split_groups
            errors = observed.start_errors
            found.append(Group(ordinal, stateful_set, tuple(pods), workers.get(ordinal), is_split, missing, errors))
    return tuple(sorted(found, key=lambda group: group.ordinal))


def _pod_sort_key(pod: Manifest) -> tuple[bool, int, str]:
    name = str(pod["metadata"]["name"])
    number = name.rsplit("-", 1)[-1]
    return is_worker(pod), int(number) if number.isdigit() else 0, name


def is_pod_ready(pod: Manifest) -> bool:
    """Return True if the pod has the Ready condition and is not being deleted."""
    if is_terminating(pod):
        return False
    conditions = (pod.get("status") or {}).get("conditions") or []
    return any(c.get("type") == "Ready" and c.get("status") == "True" for c in conditions)


def pod_rendezvous_address(pod: Manifest) -> str | None:
    """Return the rendezvous address in the flags of a pod or pod template; None if it has a single pod."""
    return flag_of(pod, MASTER_ADDR_FLAG)


def token_hash_of(pod: Manifest) -> str | None:
    """Return the hash of the admin token that the pod's engine was started with; None if it has none."""
    return flag_of(pod, TOKEN_FLAG)


def start_values_of(pod: Manifest) -> tuple[str | None, ...]:
    """Return the start values of live parameters in the flags of a pod or pod template."""
    return tuple(flag_of(pod, flag) for flag in START_FLAGS)


def flag_of(pod: Manifest, name: str) -> str | None:
    """Return the last value of a flag of the pod's containers; None if it is not set."""
    containers = (pod.get("spec") or {}).get("containers") or []
    flags = [argument for container in containers for argument in container.get("args") or []]
    found = [flag.partition("=")[2] for flag in flags if flag.startswith(f"{name}=")]
    return found[-1] if found else None


def is_terminating(manifest: Manifest) -> bool:
    return bool(manifest["metadata"].get("deletionTimestamp"))


def is_worker(manifest: Manifest) -> bool:
    """Return True for a worker pod or StatefulSet; without a role label it belongs to a leader."""
    return label_of(manifest, ROLE_LABEL) == WORKER


def revision_label(manifest: Manifest) -> str:
    return label_of(manifest, REVISION_LABEL)


def ordinal_of(manifest: Manifest) -> int | None:
    """Return the group's number from the label; None without a valid label."""
    text = label_of(manifest, GROUP_LABEL)
    return int(text) if text.isdigit() else None


def label_of(manifest: Manifest, label: str) -> str:
    return str((manifest["metadata"].get("labels") or {}).get(label, ""))

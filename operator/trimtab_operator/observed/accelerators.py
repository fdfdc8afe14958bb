"""GPUs held by the children of one resource, computed from their pods' resource limits. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from trimtab_operator.layout.node_gpus import GPU_RESOURCE
from trimtab_operator.observed.groups import Group, ObservedChildren, is_terminating
from trimtab_operator.resource.manifest import Manifest


def gpus_held(children: ObservedChildren) -> int:
    """Return the GPUs of all replicas, whether or not their pods exist yet, plus those of draining pods."""
    by_name = {str(pod["metadata"]["name"]): pod for pod in children.pods}
    return sum(_held_by(one, by_name) for one in _staying(children)) + gpus_draining(children)


def gpus_draining(children: ObservedChildren) -> int:
    """Return the GPUs of pods that no StatefulSet wants any more."""
    wanted_names = {name for one in _staying(children) for name in _pod_names(one)}
    return sum(_gpus_of(pod) for pod in children.pods if pod["metadata"]["name"] not in wanted_names)


def _staying(children: ObservedChildren) -> Iterable[Manifest]:
    return (one for one in children.stateful_sets if not is_terminating(one))


def gpus_of(group: Group) -> int:
    """Return the GPUs that the pods of one replica request."""
    return sum(_pods_of(one) * _gpus_of((one.get("spec") or {}).get("template") or {}) for one in group.stateful_sets)


def _held_by(stateful_set: Manifest, pods: Mapping[str, Manifest]) -> int:
    """Return the GPUs that the pods of one StatefulSet hold or will hold.

    Each pod counts with the larger of its own limit and its template's, because either may be the current one. A pod
    counts until it is gone, even if its template requests fewer GPUs.
    """
    wanted = _gpus_of((stateful_set.get("spec") or {}).get("template") or {})
    return sum(max(wanted, _gpus_of(pods.get(name) or {})) for name in _pod_names(stateful_set))


def _pod_names(stateful_set: Manifest) -> list[str]:
    return [f"{stateful_set['metadata']['name']}-{number}" for number in range(_pods_of(stateful_set))]


def _pods_of(stateful_set: Manifest) -> int:
    return int((stateful_set.get("spec") or {}).get("replicas", 1))


def _gpus_of(pod: Manifest) -> int:
    """Return the GPU limit of a pod or pod template, summed over its containers."""
    containers = (pod.get("spec") or {}).get("containers") or []
    limits = [(container.get("resources") or {}).get("limits") or {} for container in containers]
    return sum(int(limit.get(GPU_RESOURCE, 0)) for limit in limits)

"""How many GPUs the children of a resource hold, by what their pods ask for. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from trimtab_operator.layout.node_gpus import GPU_RESOURCE
from trimtab_operator.observed.groups import Group, Observed, is_terminating
from trimtab_operator.resource.manifest import Manifest


def gpus_held(children: Observed) -> int:
    """The GPUs of all replicas that are there, whether their pods are created yet or not, and of pods that drain."""
    by_name = {str(pod["metadata"]["name"]): pod for pod in children.pods}
    return sum(_held_by(one, by_name) for one in _staying(children)) + gpus_draining(children)


def gpus_draining(children: Observed) -> int:
    """The GPUs of pods that no StatefulSet asks for any more."""
    asked_for = {name for one in _staying(children) for name in _pod_names(one)}
    return sum(_gpus_of(pod) for pod in children.pods if pod["metadata"]["name"] not in asked_for)


def _staying(children: Observed) -> Iterable[Manifest]:
    return (one for one in children.stateful_sets if not is_terminating(one))


def gpus_of(group: Group) -> int:
    """The GPUs that the pods of one replica ask for."""
    return sum(_pods_of(one) * _gpus_of((one.get("spec") or {}).get("template") or {}) for one in group.stateful_sets)


def _held_by(stateful_set: Manifest, pods: Mapping[str, Manifest]) -> int:
    """Of each pod of a StatefulSet what it has, or what its successor asks for: the larger, as either may come first.
    So a pod counts until it is gone, though its template asks for fewer by now."""
    asked = _gpus_of((stateful_set.get("spec") or {}).get("template") or {})
    return sum(max(asked, _gpus_of(pods.get(name) or {})) for name in _pod_names(stateful_set))


def _pod_names(stateful_set: Manifest) -> list[str]:
    return [f"{stateful_set['metadata']['name']}-{number}" for number in range(_pods_of(stateful_set))]


def _pods_of(stateful_set: Manifest) -> int:
    return int((stateful_set.get("spec") or {}).get("replicas", 1))


def _gpus_of(pod: Manifest) -> int:
    """What the containers of a pod, or of a template of one, may use."""
    containers = (pod.get("spec") or {}).get("containers") or []
    limits = [(container.get("resources") or {}).get("limits") or {} for container in containers]
    return sum(int(limit.get(GPU_RESOURCE, 0)) for limit in limits)

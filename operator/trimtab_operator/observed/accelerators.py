"""How many GPUs the children of a resource hold, by what their pods ask for. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trimtab_operator.layout.node_gpus import GPU_RESOURCE
from trimtab_operator.observed.groups import Group, Observed, is_terminating, ordinal_of


def gpus_held(children: Observed) -> int:
    """The GPUs of all replicas that are there, whether their pods are created yet or not, and of those that drain."""
    sets = [one for one in children.stateful_sets if not is_terminating(one)]
    places = {ordinal_of(one) for one in sets}
    asked = sum(_pods_of(one) * _gpus_of((one.get("spec") or {}).get("template") or {}) for one in sets)
    return asked + sum(_gpus_of(pod) for pod in children.pods if ordinal_of(pod) not in places)


def gpus_of(group: Group) -> int:
    """The GPUs that the pods of one replica ask for."""
    return sum(_pods_of(one) * _gpus_of((one.get("spec") or {}).get("template") or {}) for one in group.stateful_sets)


def _pods_of(stateful_set: Mapping[str, Any]) -> int:
    return int((stateful_set.get("spec") or {}).get("replicas", 1))


def _gpus_of(pod: Mapping[str, Any]) -> int:
    """What the containers of a pod, or of a template of one, may use."""
    containers = (pod.get("spec") or {}).get("containers") or []
    limits = [(container.get("resources") or {}).get("limits") or {} for container in containers]
    return sum(int(limit.get(GPU_RESOURCE, 0)) for limit in limits)

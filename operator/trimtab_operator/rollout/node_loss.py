"""Pods on a node that is gone are given up, so that their groups come up elsewhere. Pure.

A StatefulSet makes no second pod of a name while the first may still run, so without this a replica on a lost node
stays away until the node is back or somebody acts. An engine holds no state: two of a name do no harm. The ranks of a
group are given away once (docs/concepts/parallelism.md), and the Services know the new pod only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from datetime import datetime

from trimtab_operator.observed.actions import Delete, delete_of
from trimtab_operator.observed.groups import is_pod_ready, is_terminating, ordinal_of
from trimtab_operator.observed.pods import node_of
from trimtab_operator.resource.manifest import Manifest
from trimtab_operator.resource.time import parse_time

LOST_SECONDS = 60.0  # NotReady for so long; Kubernetes itself takes about 40 s to say so


def may_be_lost(pods: Iterable[Manifest]) -> bool:
    """Whether nodes are worth a look: the control plane says of every pod on a lost node that it is not ready."""
    return any(ordinal_of(pod) is not None and node_of(pod) and not is_pod_ready(pod) for pod in pods)


def _is_given_up(pod: Manifest) -> bool:
    """Whether it was deleted without grace already, and a finalizer keeps it."""
    return is_terminating(pod) and pod["metadata"].get("deletionGracePeriodSeconds") == 0


def not_ready_since(nodes: Iterable[Manifest]) -> Mapping[str, datetime]:
    """Nodes that are not ready, and since when."""
    found = {}
    for node in nodes:
        for condition in (node.get("status") or {}).get("conditions") or []:
            since = parse_time(condition.get("lastTransitionTime"))
            if condition.get("type") == "Ready" and condition.get("status") != "True" and since is not None:
                found[str(node["metadata"]["name"])] = since
    return found


def pods_to_give_up(pods: Iterable[Manifest], nodes: Collection[Manifest], now: datetime) -> tuple[Delete, ...]:
    """The engine pods on nodes that have been NotReady for LOST_SECONDS. Their kubelet is not waited for.

    Where most nodes are silent it is rather the control plane that is cut off: engines that may still serve are left.
    """
    since = not_ready_since(nodes)
    if 2 * len(since) > len(nodes):
        return ()
    given_up = []
    for pod in pods:
        node = node_of(pod)
        if ordinal_of(pod) is None or node is None or node not in since or _is_given_up(pod):
            continue
        seconds = (now - since[node]).total_seconds()
        if seconds >= LOST_SECONDS:
            reason = f"node {node} has been NotReady for {LOST_SECONDS:.0f} s; the replica comes up elsewhere"
            given_up.append(delete_of("Pod", pod, reason, grace_seconds=0))
    return tuple(given_up)

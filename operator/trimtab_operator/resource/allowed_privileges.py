"""What a pod may have beyond an unprivileged one, where the administrator of an installation allows it by name.

Engines need none of it. GPUs that talk over RDMA often need some; a cloud's identity is a service account's.
"""

from __future__ import annotations

from collections.abc import Mapping

POD_FIELDS: Mapping[str, str] = {
    "hostNetwork": "would give the pod the node's network",
    "hostIPC": "would give the pod the node's shared memory",
    "serviceAccountName": "would give the pod somebody else's account",
}
HOST_PATH = "hostPath"
LOCK_MEMORY = "IPC_LOCK"
POWERS = (*POD_FIELDS, HOST_PATH, LOCK_MEMORY)
LOCKS_MEMORY = {"capabilities": {"add": [LOCK_MEMORY]}}  # as it stands in an overlay's securityContext of the container
NO_POWERS: frozenset[str] = frozenset()


def way_to(power: str) -> str:
    """What to do about a power that this installation does not allow."""
    return f"remove it, or have the administrator allow {power} (the chart's overlay.powers)"

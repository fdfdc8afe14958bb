"""Privileges that `spec.template` may give pods if the installation allows them by name.

Engines need none of them. RDMA between GPUs often needs some, and cloud identities need a service account.
"""

from __future__ import annotations

from collections.abc import Mapping

POD_FIELDS: Mapping[str, str] = {
    "hostNetwork": "would give the pod the node's network",
    "hostIPC": "would give the pod the node's shared memory",
    "serviceAccountName": "would give the pod another service account",
}
HOST_PATH = "hostPath"
LOCK_MEMORY = "IPC_LOCK"
PRIVILEGES = (*POD_FIELDS, HOST_PATH, LOCK_MEMORY)
LOCK_MEMORY_SECURITY_CONTEXT = {
    "capabilities": {"add": [LOCK_MEMORY]}
}  # the only securityContext that an overlay's container may have
NO_PRIVILEGES: frozenset[str] = frozenset()


def privilege_remedy(privilege: str) -> str:
    """Return the remedy for a privilege that this installation does not allow."""
    return f"remove it, or ask the administrator to add {privilege} to the chart's podOverlay.allowedPrivileges"

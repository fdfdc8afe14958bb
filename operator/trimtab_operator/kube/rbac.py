"""Missing permission, parsed from the message of a 403 response by RBAC.

Quotas and admission policies also reject with 403. Their messages are not about permissions and are left as they are.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

FORBIDDEN = 403
RBAC_MESSAGE = re.compile(
    r'cannot (?P<verb>[a-z]+) resource "(?P<resource>[^"]+)" in API group "(?P<group>[^"]*)"'
    r'(?: in the namespace "(?P<namespace>[^"]+)"| (?P<everywhere>at the cluster scope))?'
)


@dataclass(frozen=True, slots=True)
class MissingPermission:
    """Missing permission. `namespace` is None for cluster-wide permissions and cluster-scoped kinds."""

    verb: str
    resource: str
    group: str
    namespace: str | None

    def __str__(self) -> str:
        kind = f"{self.resource}.{self.group}" if self.group else self.resource
        return f"{self.verb} {kind} " + (f"in namespace {self.namespace}" if self.namespace else "in the whole cluster")


def missing_permission(error: BaseException) -> MissingPermission | None:
    """Return the permission that a 403 response reports as missing. None for other errors."""
    if getattr(error, "status", None) != FORBIDDEN:
        return None
    found = RBAC_MESSAGE.search(server_message(error) or "")
    return (
        None
        if found is None
        else MissingPermission(found["verb"], found["resource"], found["group"], found["namespace"])
    )


def server_message(error: BaseException) -> str | None:
    """Return the message in the response body of an error. None if there is none."""
    body = getattr(error, "body", None)
    try:
        said = json.loads(body) if isinstance(body, str | bytes) else None
        message = said["message"] if isinstance(said, dict) else None
    except (ValueError, KeyError, RecursionError):
        return None
    return message if isinstance(message, str) and message else None

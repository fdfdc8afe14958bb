"""Which right is missing, in the words of an API server that refuses (403) by RBAC.

Others refuse with 403 as well: quotas, policies at admission. What they say is not about rights and is left as it is.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

FORBIDDEN = 403
RBAC_WORDS = re.compile(
    r'cannot (?P<verb>[a-z]+) resource "(?P<resource>[^"]+)" in API group "(?P<group>[^"]*)"'
    r'(?: in the namespace "(?P<namespace>[^"]+)"| (?P<everywhere>at the cluster scope))?'
)


@dataclass(frozen=True, slots=True)
class Right:
    """What was not allowed; no `namespace`: in all of them, or of a kind that has none."""

    verb: str
    resource: str
    group: str
    namespace: str | None

    def __str__(self) -> str:
        kind = f"{self.resource}.{self.group}" if self.group else self.resource
        return f"{self.verb} {kind} " + (f"in namespace {self.namespace}" if self.namespace else "in the whole cluster")


def missing_right(error: BaseException) -> Right | None:
    """The right that an answer of the API server names as missing; None where it is about something else."""
    if getattr(error, "status", None) != FORBIDDEN:
        return None
    found = RBAC_WORDS.search(server_words(error) or "")
    return None if found is None else Right(found["verb"], found["resource"], found["group"], found["namespace"])


def server_words(error: BaseException) -> str | None:
    """The message in the body of an answer; None where there is none."""
    body = getattr(error, "body", None)
    try:
        said = json.loads(body) if isinstance(body, str | bytes) else None
        message = said["message"] if isinstance(said, dict) else None
    except (ValueError, KeyError, RecursionError):
        return None
    return message if isinstance(message, str) and message else None

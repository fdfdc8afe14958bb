"""What can be done to the children of a resource, as values."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab_operator.resource.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Apply:
    """Server-side apply this. `is_new` says that no such child was seen. `otherwise` is applied in its place where the
    API server calls it invalid."""

    manifest: Manifest
    is_new: bool
    reason: str
    otherwise: Manifest | None = None


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete this child, if it still is the one that was seen."""

    kind: str
    name: str
    uid: str
    reason: str
    grace_seconds: int | None = None
    """None: the child's own. 0 does not wait for its node, which may be gone."""


Action = Apply | Delete


def delete_of(kind: str, manifest: Manifest, reason: str, *, grace_seconds: int | None = None) -> Delete:
    """Delete what was seen."""
    metadata = manifest["metadata"]
    return Delete(kind, str(metadata["name"]), str(metadata.get("uid", "")), reason, grace_seconds)

"""Differences between wanted manifests and observed objects, as actions. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from trimtab_operator.builders.drift import first_difference
from trimtab_operator.observed.actions import Apply
from trimtab_operator.observed.groups import ObservedChildren, is_terminating
from trimtab_operator.resource.manifest import Manifest


def plan_applies(wanted: Iterable[Manifest], observed: ObservedChildren) -> tuple[Apply, ...]:
    """Return an Apply for each wanted manifest that is missing or differs from the observed object."""
    actions = []
    for manifest in wanted:
        name = manifest["metadata"]["name"]
        present = next((m for m in observed.of(manifest["kind"]) if m["metadata"]["name"] == name), None)
        if present is None:
            actions.append(Apply(manifest, True, "missing"))
        elif not is_terminating(present):
            where = first_difference(manifest, present)
            if where is not None:
                actions.append(Apply(manifest, False, f"{where} differs"))
    return tuple(actions)

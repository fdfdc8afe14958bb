"""Comparison of a child in the cluster with its rendered manifest. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trimtab_operator.resource.quantity import is_same_quantity

LIST_KEYS = {  # lists that server-side apply merges by key; entries of other field managers are ignored
    "containers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "imagePullSecrets": "name",
}
WHOLE_MAPS = ("spec.selector",)  # server-side apply replaces these as a whole, so added keys are drift
EMPTY: tuple[Any, ...] = (None, "", {}, [])  # the API server omits these


def first_difference(wanted: Any, present: Any, path: str = "") -> str | None:
    """Return the path of the first rendered field that differs in the cluster; None if there is no difference.

    Fields that are not rendered (defaults, injected labels) are ignored.
    """
    if wanted == present or (wanted in EMPTY and present in EMPTY):
        return None
    if isinstance(wanted, Mapping) and isinstance(present, Mapping):
        if path in WHOLE_MAPS and wanted.keys() != present.keys():
            return path
        for key, value in wanted.items():
            if key in ("apiVersion", "kind") and not path:
                continue
            found = first_difference(value, present.get(key), f"{path}.{key}" if path else str(key))
            if found is not None:
                return found
        return None
    if isinstance(wanted, (list, tuple)) and isinstance(present, list):
        return _first_list_difference(list(wanted), present, path)
    if isinstance(wanted, (str, int, float)) and isinstance(present, (str, int, float)) and _holds_quantities(path):
        return None if is_same_quantity(wanted, present) else path
    return path


def _first_list_difference(wanted: list[Any], present: list[Any], path: str) -> str | None:
    key = LIST_KEYS.get(path.rsplit(".", 1)[-1])
    if key is None:
        if len(wanted) != len(present):
            return path
        pairs = list(zip(wanted, present, strict=True))
    else:
        by_key = {item.get(key): item for item in present}
        pairs = [(item, by_key.get(item.get(key))) for item in wanted]
    for index, (mine, theirs) in enumerate(pairs):
        found = first_difference(mine, theirs, f"{path}[{index}]")
        if found is not None:
            return found
    return None


def _holds_quantities(path: str) -> bool:
    return any(part in path for part in (".limits.", ".requests.", ".sizeLimit", ".divisor"))

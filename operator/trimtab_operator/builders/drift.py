"""Where a child in the cluster differs from what is rendered. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trimtab_operator.resource.quantity import is_same_quantity

LIST_KEYS = {  # lists that server-side apply merges by key: entries of others are not ours to judge
    "containers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "imagePullSecrets": "name",
}
WHOLE_MAPS = ("spec.selector",)  # server-side apply replaces these as one: what is added to them is drift
EMPTY: tuple[Any, ...] = (None, "", {}, [])  # the API server leaves these out


def first_difference(wanted: Any, present: Any, path: str = "") -> str | None:
    """Path of the first thing that we render and that is otherwise in the cluster; None when all is as rendered.

    What is in the cluster and not rendered is somebody else's (defaults, injected labels) and does not count.
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

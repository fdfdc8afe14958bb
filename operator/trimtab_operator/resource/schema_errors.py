"""Schema errors of pydantic, converted to messages with a remedy."""

from __future__ import annotations

import difflib
import re
from functools import cache
from types import UnionType
from typing import get_args, get_origin

from pydantic import BaseModel, ValidationError

from trimtab_operator.resource.limits import MAX_FINDINGS, shorten
from trimtab_operator.resource.patterns import EXAMPLES, HUB_SCHEME, MODEL_URI

MAX_QUOTED_LENGTH = 128  # characters of a value or name that a message repeats


def schema_errors(error: ValidationError, root: type[BaseModel]) -> list[tuple[str, str]]:
    """Return pairs of a field, as written below `spec`, and its error message. `root` is the validated model.

    At most MAX_FINDINGS are returned, and one more that counts the others.
    """
    found = []
    for entry in error.errors(include_url=False)[:MAX_FINDINGS]:
        path = "spec"
        for part in entry["loc"]:
            path += f"[{part}]" if isinstance(part, int) else f".{shorten(part, most=MAX_QUOTED_LENGTH)}"
        if entry["type"] == "extra_forbidden":
            meant = _meant(path, root)
            hint = f"did you mean {meant}? " if meant else ""
            found.append((path, f"unknown field: {hint}`kubectl explain infd.spec --recursive` lists all fields"))
        elif entry["type"] == "string_pattern_mismatch":
            given = shorten(entry["input"], most=MAX_QUOTED_LENGTH)
            found.append((path, _about_form(entry["ctx"]["pattern"], given)))
        else:
            given = entry.get("input")
            given = shorten(given, most=MAX_QUOTED_LENGTH) if isinstance(given, str) else given
            hint = _about_quotes(entry["type"], given) or _about_type(entry["type"], given, path, root)
            found.append((path, shorten(entry["msg"] + hint)))
    omitted = error.error_count() - len(found)
    if omitted:
        found.append(("spec", f"{omitted:,} more errors are not listed"))
    return found


def _meant(unknown: str, root: type[BaseModel]) -> str | None:
    """Return the field that a misspelt one probably means: a similar name at the same path, else at another path.

    vLLM's tensorParallelSize maps to tensor.
    """
    parent, _, name = unknown.rpartition(".")
    places = _places(root)
    siblings = [place.rpartition(".")[2] for place in places if place.rpartition(".")[0] == parent]
    close = difflib.get_close_matches(_plain(name), [_plain(each) for each in siblings], n=1, cutoff=0.7)
    for each in siblings:
        if close and _plain(each) == close[0]:
            return each
    meant = (_plain(name), _plain(name).removesuffix("parallelsize"))
    return next((place for place in places if _plain(place.rpartition(".")[2]) in meant), None)


def _plain(name: str) -> str:
    """Normalise a name, so that `gpu_memory-utilization` equals `gpuMemoryUtilization`."""
    return name.lower().replace("_", "").replace("-", "")


@cache
def _places(root: type[BaseModel]) -> tuple[str, ...]:
    """Return the paths of all fields, outer ones first."""
    found: list[str] = []
    waiting: list[tuple[str, type[BaseModel]]] = [("spec", root)]
    for path, model in waiting:
        for name, field in model.model_fields.items():
            place = f"{path}.{field.alias or name}"
            found.append(place)
            waiting += [(place, inner) for inner in _models_in(field.annotation)]
            if get_origin(field.annotation) is tuple:
                waiting += [(f"{place}[0]", inner) for item in get_args(field.annotation) for inner in _models_in(item)]
    return tuple(found)


def _models_in(annotation: object) -> list[type[BaseModel]]:
    """Return the models of `Model | None`. Maps are excluded, because their paths contain names."""
    parts = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    return [part for part in parts if isinstance(part, type) and issubclass(part, BaseModel)]


def _about_type(kind: str, given: object, path: str, root: type[BaseModel]) -> str:
    """Return the hint for a string instead of an object, a number or a list."""
    below = [place.removeprefix(f"{path}.") for place in _places(root) if place.rpartition(".")[0] == path]
    if below and not isinstance(given, dict):
        return f": write an object with the fields {', '.join(below)}"
    if kind == "int_type" and isinstance(given, str):
        return f": write {given} without quotes" if given.isdecimal() else f": {given!r} is a string; write an integer"
    if kind in ("tuple_type", "list_type") and isinstance(given, str):
        return f": write a list: {given.split()}"
    return ""


def _about_form(pattern: str, given: str) -> str:
    """Return the message for a string that does not match its pattern, with an example instead of the pattern."""
    example = EXAMPLES.get(pattern)
    if example is None:
        return f"{given!r} does not match {pattern}"
    message = f"{given!r} is not valid; write {example}"
    on_hub = re.fullmatch(r"(?:hf:/*|https://huggingface\.co/)?([\w.-]+/[\w.-]+)", given)
    return f"{message}: did you mean {HUB_SCHEME}{on_hub[1]}?" if pattern == MODEL_URI and on_hub else message


def _about_quotes(kind: str, given: object) -> str:
    """Return the hint for an unquoted string that YAML parsed as a number or a boolean."""
    if kind not in ("string_type", "literal_error", "enum") or not isinstance(given, bool | int | float):
        return ""
    if isinstance(given, bool):
        return f": YAML reads On, Off, Yes and No without quotes as true or false; write {'On' if given else 'Off'!r}"
    return f": YAML reads it as a number; write '{given}' in quotes"

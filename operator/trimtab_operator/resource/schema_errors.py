"""Schema errors of pydantic, converted to messages with a remedy."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from types import UnionType
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from trimtab_operator.resource.limits import MAX_FINDINGS, shorten
from trimtab_operator.resource.patterns import DURATION, EXAMPLES, HUB_SCHEME, MODEL_URI

UNKNOWN = "extra_forbidden"  # pydantic's type of an unknown field
SYNONYMS = {"url": "uri", "tpot": "itl"}  # names that are too short to be found by similarity
MAX_QUOTED_LENGTH = 128  # characters of a value or name that a message repeats


def schema_errors(error: ValidationError, root: type[BaseModel]) -> list[tuple[str, str]]:
    """Return pairs of a field, as written below `spec`, and its error message. `root` is the validated model.

    At most MAX_FINDINGS are returned, and one more that counts the others.
    """
    entries = error.errors(include_url=False)[:MAX_FINDINGS]
    paths = [_path(entry["loc"]) for entry in entries]
    unknown = {path: _meant(path, root) for path, e in zip(paths, entries, strict=True) if e["type"] == UNKNOWN}
    meant = {f"{path.rpartition('.')[0]}.{name}" for path, name in unknown.items()}
    found = []
    for path, entry in zip(paths, entries, strict=True):
        if entry["type"] == "missing" and path in meant:
            continue  # the misspelt field's message names it
        message = _about_unknown(unknown[path]) if path in unknown else _about_value(entry, path, root)
        found.append((path, shorten(message)))
    omitted = error.error_count() - len(entries)
    if omitted:
        found.append(("spec", f"{omitted:,} more errors are not listed"))
    return found


def _path(location: tuple[int | str, ...]) -> str:
    """Return a field as it is written: spec.template.spec.containers[0].name."""
    path = "spec"
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{shorten(part, most=MAX_QUOTED_LENGTH)}"
    return path


def _about_unknown(meant: str | None) -> str:
    hint = f"did you mean {meant}? " if meant else ""
    return f"unknown field: {hint}`kubectl explain infd.spec --recursive` lists all fields"


def _about_value(entry: ErrorDetails, path: str, root: type[BaseModel]) -> str:
    """Return the problem of a value and the remedy."""
    kind, given = entry["type"], entry.get("input")
    schema = _schema_at(entry["loc"], root)
    quoted = _quoted(given)
    if kind == "missing":
        return f"is required; {_what_to_write(schema)}"
    if given is None:
        return f"is empty; {_what_to_write(schema)}, or remove the field"
    below = [place.removeprefix(f"{path}.") for place in _places(root) if place.rpartition(".")[0] == path]
    if below and not isinstance(given, dict) and schema.get("type") != "array":
        return f"is {quoted}; write an object with the fields {', '.join(below)}"
    if "enum" in schema:
        return _about_choice(given, quoted, schema["enum"])
    if kind in ("too_long", "too_short") and isinstance(given, list):
        limit = entry["ctx"].get("max_length", entry["ctx"].get("min_length"))
        return f"has {len(given)} items; write at {'most' if kind == 'too_long' else 'least'} {limit}"
    if schema.get("type") == "array":
        items = given.split() if isinstance(given, str) else [given]
        return f"is {quoted}; write a list: {json.dumps(items, default=str)}"
    if schema.get("type") == "string" and isinstance(given, bool | int | float):
        return _about_quotes(given, quoted, schema.get("pattern"))
    if "pattern" in schema and isinstance(given, str):
        return _about_form(schema["pattern"], shorten(given, most=MAX_QUOTED_LENGTH))
    if schema.get("type") == "integer":
        is_quoted_number = isinstance(given, str) and given.isdecimal()
        return f"is {quoted}; {f'write {given} without quotes' if is_quoted_number else _what_to_write(schema)}"
    return f"is {quoted}; {_what_to_write(schema)}" if schema else f"is {quoted}; {entry['msg'].lower()}"


def _quoted(given: object) -> str:
    """Return a value as YAML would show it, shortened."""
    return shorten(json.dumps(given, default=str, ensure_ascii=False), most=MAX_QUOTED_LENGTH)


def _what_to_write(schema: Mapping[str, Any]) -> str:
    """Return the remedy by the field's schema: its choices, its form, or its type and range."""
    if "enum" in schema:
        return f"write {_alternatives(schema['enum'])}"
    if schema.get("pattern") in EXAMPLES:
        return f"write {EXAMPLES[schema['pattern']]}"
    least, most = schema.get("minimum"), schema.get("maximum")
    names = {"integer": "an integer", "boolean": "true or false", "array": "a list", "object": "an object"}
    bounds = f" from {least} to {most}" if None not in (least, most) else f" of at least {least}" if least else ""
    return f"write {names.get(schema.get('type', ''), 'a string')}{bounds}"


def _alternatives(choices: Sequence[object]) -> str:
    words = [str(choice) for choice in choices]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _about_choice(given: object, quoted: str, choices: Sequence[object]) -> str:
    """Return the message for a value that is none of the choices, with the choice that is meant if it is clear."""
    if isinstance(given, bool):
        word = "On" if given else "Off"
        if word in choices:
            return f"is {quoted}: YAML reads {word} without quotes as a boolean; write '{word}' in quotes"
    words = {_plain(str(choice)): str(choice) for choice in choices}
    text = _plain(given) if isinstance(given, str) else ""
    close = [word for word in words if text.startswith(word)] or difflib.get_close_matches(text, words, n=1, cutoff=0.7)
    hint = f"; did you mean {words[close[0]]}?" if close else ""
    return f"is {quoted}; write {_alternatives(choices)}{hint}"


@cache
def _json_schema(root: type[BaseModel]) -> dict[str, Any]:
    return root.model_json_schema(by_alias=True)


def _schema_at(location: tuple[int | str, ...], root: type[BaseModel]) -> dict[str, Any]:
    """Return the JSON schema of a field without null and references; empty if the schema does not describe it."""
    whole = _json_schema(root)
    node = whole
    for part in location:
        node = _resolved(node, whole)
        if isinstance(part, int):
            node = node.get("items") or next(iter(node.get("prefixItems", ())), {})
        else:
            node = node.get("properties", {}).get(part) or node.get("additionalProperties") or {}
        if not isinstance(node, dict):
            return {}
    return _resolved(node, whole)


def _resolved(node: dict[str, Any], whole: dict[str, Any]) -> dict[str, Any]:
    """Follow references, and the one alternative that is not null."""
    while True:
        if "$ref" in node:
            node = whole["$defs"][node["$ref"].rpartition("/")[2]]
        elif alternatives := [each for each in node.get("anyOf", ()) if each.get("type") != "null"]:
            node = alternatives[0]
        else:
            return node


def _meant(unknown: str, root: type[BaseModel]) -> str | None:
    """Return the field that a misspelt one probably means: a similar name at the same path, else at another path.

    vLLM's tensorParallelSize maps to tensor.
    """
    parent, _, name = unknown.rpartition(".")
    places = _places(root)
    siblings = [place.rpartition(".")[2] for place in places if place.rpartition(".")[0] == parent]
    name = SYNONYMS.get(name, name)
    close = difflib.get_close_matches(_plain(name), [_plain(each) for each in siblings], n=1, cutoff=0.7)
    for each in siblings:
        if close and _plain(each) == close[0]:
            return each
    begin = [
        each for each in siblings if _plain(each).startswith(_plain(name)) or _plain(name).startswith(_plain(each))
    ]
    if len(begin) == 1:
        return begin[0]
    meant = (_plain(name), _plain(name).removesuffix("parallelsize"))
    elsewhere = [place for place in places if _plain(place.rpartition(".")[2]) in meant]
    return min(elsewhere, key=lambda place: place.startswith("spec.router."), default=None)


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


def _about_form(pattern: str, given: str) -> str:
    """Return the message for a string that does not match its pattern, with an example instead of the pattern."""
    example = EXAMPLES.get(pattern)
    if example is None:
        return f"{given!r} does not match {pattern}"
    message = f"{given!r} is not valid; write {example}"
    if pattern == DURATION and re.fullmatch(r"[0-9]{1,6}", given):
        return f"{given!r} has no unit; did you mean {given}s or {given}ms?"
    on_hub = re.fullmatch(r"(?:hf:/*|https://huggingface\.co/)?([\w.-]+/[\w.-]+)", given)
    return f"{message}: did you mean {HUB_SCHEME}{on_hub[1]}?" if pattern == MODEL_URI and on_hub else message


def _about_quotes(given: float, quoted: str, pattern: str | None) -> str:
    """Return the message for a number or a boolean where a string is required."""
    if pattern is not None and not re.match(pattern, quoted):
        return _about_form(pattern, quoted)
    kind = "a boolean" if isinstance(given, bool) else "a number"
    return f"is {quoted}: YAML reads it as {kind}; write '{quoted}' in quotes"

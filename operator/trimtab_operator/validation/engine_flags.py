"""Checks of `spec.runtime.args` against the engine's own flags.

engine_flags.json is generated from the engine's argument parser (`make reference`), because the operator must not
import the engine.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from trimtab_operator.resource.spec import InferenceDeployment

NUMBERS = {"integer": int, "number": float}


@dataclass(frozen=True, slots=True)
class EngineFlag:
    """One flag of `trimtab-engine serve`."""

    names: tuple[str, ...]
    """Long and short spellings."""
    value: str
    """How many values follow: none, optional, one or many."""
    kind: str = "string"
    """string, integer or number."""
    choices: tuple[str, ...] = ()
    ignored: str = ""
    """Why a flag of vLLM has no effect."""
    rejected: str = ""
    """What to do instead of a flag of vLLM that the engine rejects."""
    harmless: tuple[str, ...] = ()
    """Values with which a rejected flag is accepted."""


@cache
def engine_flags() -> dict[str, EngineFlag]:
    """Return the engine's flags by each of their names."""
    entries = json.loads((files(__package__) / "engine_flags.json").read_text())
    flags = [
        EngineFlag(
            names=tuple(entry["names"]),
            value=entry["value"],
            kind=entry.get("kind", "string"),
            choices=tuple(entry.get("choices", ())),
            ignored=entry.get("ignored", ""),
            rejected=entry.get("rejected", ""),
            harmless=tuple(entry.get("harmless", ())),
        )
        for entry in entries
    ]
    return {name: flag for flag in flags for name in flag.names}


def spelled(argument: str) -> str:
    """Return the flag of an argument as the engine reads it: without its value, underscores as dashes."""
    return argument.split("=", 1)[0].replace("_", "-")


@dataclass(frozen=True, slots=True)
class Argument:
    """One flag of a command line with its values, or a word that belongs to no flag."""

    index: int
    name: str
    """The flag as the engine reads it; the word itself if it belongs to no flag."""
    flag: EngineFlag | None
    """None if the engine does not have the flag."""
    values: tuple[str, ...]


def split_arguments(args: Sequence[str]) -> Iterator[Argument]:
    """Yield the flags of a command line with their values, as the engine's parser would assign them."""
    flags = engine_flags()
    index = 0
    while index < len(args):
        at, name = index, spelled(args[index])
        index += 1
        if not name.startswith("-"):
            yield Argument(at, args[at], None, ())
            continue
        flag = flags.get(name)
        values = [args[at].split("=", 1)[1]] if "=" in args[at] else []
        kind = "many" if flag is None else flag.value  # the values of an unknown flag are not known either
        most = {"none": 0, "optional": 1, "one": 1, "many": len(args)}[kind] - len(values)
        while most > 0 and (not values or kind == "many") and index < len(args) and not _is_flag(args[index]):
            values.append(args[index])
            index, most = index + 1, most - 1
        yield Argument(at, name, flag, tuple(values))


def flag_errors(args: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Yield the index and the problem of each argument that the engine would reject.

    Values that contain a variable, $(NAME), are not checked.
    """
    for argument in split_arguments(args):
        yield from ((argument.index, problem) for problem in _argument_errors(argument))


def _argument_errors(argument: Argument) -> Iterator[str]:
    name, flag, values = argument.name, argument.flag, argument.values
    if not name.startswith("-"):
        yield f"{name!r} does not belong to a flag; remove it"
    elif flag is None:
        yield f"{name} is not a flag of the engine{suggestion(name)}"
    elif values and flag.value == "none":
        yield f"{name} takes no value; write {name} alone"
    elif flag.rejected:
        if not (values[0] in flag.harmless if values else name.startswith("--no-")):
            yield f"{name} is not supported by the engine; {flag.rejected}"
    elif not values and flag.value in ("one", "many"):
        yield f"{name} needs a value; write {name}=VALUE"
    else:
        for value in values:
            yield from _value_errors(name, flag, value)


def suggestion(name: str) -> str:
    """Return `; did you mean …?` with the most similar flag, or where the flags are listed."""
    flags = engine_flags()
    known = [each for each, flag in flags.items() if each.startswith("--") and not flag.ignored + flag.rejected]
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    return f"; did you mean {close[0]}?" if close else "; `trimtab-engine serve --help` lists the flags"


def argument_warnings(deployment: InferenceDeployment) -> Iterator[str]:
    """Yield warnings about flags without effect, and about flags that an own engine image may not have."""
    args = deployment.spec.runtime.args
    for index, argument in enumerate(args):
        flag = engine_flags().get(spelled(argument))
        if flag is not None and flag.ignored:
            yield f"spec.runtime.args[{index}]: {spelled(argument)} has no effect: {flag.ignored}"
    if deployment.spec.runtime.image is not None:
        for index, message in flag_errors(args):
            yield f"spec.runtime.args[{index}]: the engine of this version rejects it: {message}"


def _is_flag(argument: str) -> bool:
    """Return True if the engine reads an argument as a flag; a negative number is a value."""
    if not argument.startswith("-") or argument == "-":
        return False
    try:
        float(argument)
    except ValueError:
        return True
    return False


def _value_errors(name: str, flag: EngineFlag, value: str) -> Iterator[str]:
    if "$(" in value:
        return
    if flag.choices and value not in flag.choices:
        close = difflib.get_close_matches(value, flag.choices, n=1)
        hint = f"; did you mean {close[0]}?" if close else f"; use {', '.join(flag.choices)}"
        yield f"{name}={value[:40]} is not one of its values{hint}"
    elif flag.kind in NUMBERS:
        try:
            NUMBERS[flag.kind](value)
        except ValueError:
            yield f"{name}={value[:40]} is not {'an integer' if flag.kind == 'integer' else 'a number'}"

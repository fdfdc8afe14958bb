"""Reading preprocessor_config.json: typed, with errors that name the file and the word."""

import math
from collections.abc import Mapping
from typing import Any

from trimtab_engine.errors import ModelError

NUM_LEVELS = 256  # values of a channel


def size_of(words: Mapping[str, Any]) -> Mapping[str, Any]:
    """What stands under `size`; nothing where it is no object."""
    size = words.get("size")
    return size if isinstance(size, Mapping) else {}


def whole(words: Mapping[str, Any], name: str, default: int, where: str) -> int:
    """A whole number above 0. Raises ModelError for anything else."""
    value = words.get(name)
    if value is None:
        return default
    if type(value) is not int or value < 1:
        raise ModelError(f"{where}: {name} is {value!r}; expected a whole number above 0")
    return value


def number(value: object, name: str, where: str) -> float:
    """A number other than 0. Raises ModelError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value == 0:
        raise ModelError(f"{where}: {name} is {value!r}; expected a number other than 0")
    return float(value)


def channels(words: Mapping[str, Any], name: str, default: tuple[float, ...], where: str) -> tuple[float, ...]:
    """A number for each channel. Raises ModelError for anything else."""
    value = words.get(name)
    if value is None:
        return default
    if not isinstance(value, list) or len(value) != len(default):
        raise ModelError(f"{where}: {name} is {value!r}; expected {len(default)} numbers")
    return tuple(number(each, name, where) if each != 0 else 0.0 for each in value)

"""Reading preprocessor_config.json: typed, with errors that name the file and the word."""

from collections.abc import Mapping
from typing import Any

from trimtab_engine.errors import ModelError

NUM_LEVELS = 256  # values of a channel
MAX_EDGE = 4096  # pixels: no image becomes longer
MEAN = "image_mean"
LEAST, MOST = 1e-6, 1e6  # of the rescale factor, in float32


def size_of(words: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return the `size` object; empty if absent.

    Raises:
        ModelError: it is not an object.
    """
    size = words.get("size")
    if size is not None and not isinstance(size, Mapping):
        raise ModelError(f"{where}: size must be an object ({size!r:.100})")
    return size or {}


def edges(words: Mapping[str, Any], name: str, where: str) -> Mapping[str, int]:
    """Return the pixels under `name` by edge (`height`); under "" for a single number, empty if absent.

    Raises:
        ModelError: the value is invalid.
    """
    said = words.get(name)
    if isinstance(said, Mapping):
        found = {key: whole(said, key, 0, f"{where}: {name}") for key in said if said[key] is not None}
    else:
        found = {} if said is None else {"": whole(words, name, 0, where)}
    if any(pixels > MAX_EDGE for pixels in found.values()):
        raise ModelError(f"{where}: {name} is {said!r:.100}; edges of at most {MAX_EDGE} pixels are supported")
    return found


def flag(words: Mapping[str, Any], name: str, default: bool, where: str) -> bool:
    """True or false; null is false, as in transformers. Raises ModelError for anything else."""
    value = words.get(name, default)
    if value is not None and not isinstance(value, bool):
        raise ModelError(f"{where}: {name} is {value!r:.100}; expected true or false")
    return value is True


def whole(words: Mapping[str, Any], name: str, default: int, where: str) -> int:
    """A whole number above 0. Raises ModelError for anything else."""
    value = words.get(name)
    if value is None:
        return default
    if type(value) is not int or value < 1:
        raise ModelError(f"{where}: {name} is {value!r:.100}; expected a whole number above 0")
    return value


def number(value: object, name: str, where: str) -> float:
    """A number other than 0, of a size that pixels may be multiplied with. Raises ModelError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not LEAST <= abs(value) <= MOST:
        raise ModelError(
            f"{where}: {name} is {value!r:.100}; expected a number other than 0, from {LEAST:g} to {MOST:g} or below 0"
        )
    return float(value)


def channels(words: Mapping[str, Any], name: str, default: tuple[float, ...], where: str) -> tuple[float, ...]:
    """A number for each channel; a mean may be 0. Raises ModelError for anything else."""
    value = words.get(name)
    if value is None:
        return default
    if not isinstance(value, list) or len(value) != len(default):
        raise ModelError(f"{where}: {name} is {value!r:.100}; expected {len(default)} numbers")
    may_be_zero = name == MEAN
    return tuple(0.0 if may_be_zero and each == 0 else number(each, name, where) for each in value)

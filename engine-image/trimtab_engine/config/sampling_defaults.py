"""Sampling defaults of a model: values of its generation_config.json for requests that do not set them, as in vLLM.

Knows no tensor: the API server's process reads them.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from trimtab_engine.errors import ConfigError
from trimtab_engine.model_files.json_files import GENERATION_FILE, read_json

FLAG, OVERRIDE_FLAG = "--generation-config", "--override-generation-config"
AUTO, VLLM = "auto", "vllm"
EXAMPLE = '{"temperature": 0.6}'
RANGES: Mapping[str, tuple[type, float, float]] = {
    "temperature": (float, 0, 100),
    "top_p": (float, 0, 1),
    "top_k": (int, -1, 2**31 - 1),
    "min_p": (float, 0, 1),
    "repetition_penalty": (float, 0.01, 100),
    "max_new_tokens": (int, 1, 2**31 - 1),
}
"""Fields that are used, with their types and limits. Others of the file concern other ways of generating."""


class SamplingDefaults(msgspec.Struct, frozen=True, omit_defaults=True):
    """Values for requests that do not set them; None leaves the API's own default in force."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    """Maximum number of output tokens of every request; larger values are reduced to it."""

    @property
    def values(self) -> dict[str, Any]:
        """The values that are set."""
        values: dict[str, Any] = msgspec.to_builtins(self)
        return values


NO_DEFAULTS = SamplingDefaults()


def read_sampling_defaults(model: Path, source: str, override: Mapping[str, Any]) -> SamplingDefaults:
    """Return the defaults: of the model (`auto`), of no file (`vllm`), or of another folder or file; `override` goes
    before them.

    Raises:
        ConfigError: A file cannot be read, or a value is invalid. The message names the flag or the file.
    """
    unknown = sorted(override.keys() - RANGES.keys())
    if unknown:
        raise ConfigError(f"{OVERRIDE_FLAG}: {unknown[0][:100]} is not supported; fields are {', '.join(RANGES)}")
    given: dict[str, Any] = {}
    if source != VLLM:
        folder = model if source == AUTO else Path(source)
        file = folder if source != AUTO and folder.is_file() else folder / GENERATION_FILE
        given = _checked(read_json(file, required=source != AUTO) if folder.exists() else _missing(folder), str(file))
    return SamplingDefaults(**{**given, **_checked(override, OVERRIDE_FLAG)})


def _missing(folder: Path) -> Mapping[str, Any]:
    raise ConfigError(f"{FLAG}: {folder} does not exist; give a folder with {GENERATION_FILE}, {AUTO} or {VLLM}")


def _checked(fields: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the used fields that are not null.

    Raises:
        ConfigError: A value is out of its range.
    """
    found: dict[str, Any] = {}
    for name, (kind, least, most) in RANGES.items():
        value = fields.get(name)
        if value is None:
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or not least <= value <= most or (kind is int and value != int(value)):
            raise ConfigError(
                f"{where}: {name} must be {'a whole number' if kind is int else 'a number'} from {least:g} to {most:g} "
                f"({str(value)[:50]}); correct it, or use {FLAG} {VLLM}"
            )
        found[name] = kind(value)
    return found

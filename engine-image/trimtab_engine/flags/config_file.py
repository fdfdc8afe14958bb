"""`serve --config FILE.yaml`: flags as keys of a YAML file. The command line takes precedence."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from trimtab_engine.errors import ConfigError
from trimtab_engine.flags.parser import OneLineParser

FLAG = "--config"
MAX_FILE_BYTES = 1 << 20


def take_config_file(arguments: Sequence[str], serve: OneLineParser) -> list[str]:
    """Return the arguments without --config, and set the file's values as the new defaults of `serve`.

    A wrong value in the file ends the process, as on the command line.

    Raises:
        ConfigError: The file cannot be read or is not a YAML mapping of flags.
    """
    path, rest = _take_path(list(arguments))
    if path is None:
        return rest
    values = _read(path)
    model = values.pop("model", None)
    flags = [_as_flag(serve, path, str(key), value) for key, value in values.items()]
    read = serve.parse_args([text for texts in flags for text in texts])
    dests = {serve.dest_of(texts[0]) for texts in flags if texts}
    serve.set_defaults(**{dest: getattr(read, dest) for dest in dests})
    serve.set_defaults(model_of_file=None if model is None else str(model))
    return rest


def _take_path(arguments: list[str]) -> tuple[str | None, list[str]]:
    """Return the last --config path, and the arguments without any --config."""
    path: str | None = None
    rest: list[str] = []
    left = iter(arguments)
    for text in left:
        if text == "--":
            return path, [*rest, text, *left]
        if text.startswith(FLAG + "="):
            path = text.removeprefix(FLAG + "=")
        elif text == FLAG:
            path = next(left, None)
            if path is None:
                raise ConfigError(f"{FLAG} requires the path of a YAML file")
        else:
            rest.append(text)
    return path, rest


def _read(path: str) -> dict[Any, Any]:
    try:
        if Path(path).stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{FLAG} {path}: larger than {MAX_FILE_BYTES} bytes; keep only flags in it")
        values = yaml.safe_load(Path(path).read_bytes())
    except OSError as error:
        raise ConfigError(f"{FLAG} {path}: cannot read the file: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{FLAG} {path}: invalid YAML: {' '.join(str(error).split())[:200]}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{FLAG} {path}: not a mapping; use keys and values such as 'max-num-seqs: 64'")
    return values


def _as_flag(serve: OneLineParser, path: str, key: str, value: Any) -> list[str]:
    """Return the flag and its value as arguments; an empty list for a switch that is off."""
    flag = "--" + key.lstrip("-").replace("_", "-")
    if flag not in serve.all_flags():
        close = serve.nearest_flag(flag)
        hint = f"; did you mean {close.removeprefix('--')}?" if close else ""
        raise ConfigError(f"{FLAG} {path}: unknown flag {key[:100]}{hint}")
    if value is None:
        raise ConfigError(f"{FLAG} {path}: {key} has no value; set one or remove the key")
    if value is True:
        return [flag]
    if value is False:
        without = flag.replace("--", "--no-", 1)
        return [without] if without in serve.all_flags() else []
    if isinstance(value, list):
        return [flag, *map(_as_text, value)]
    return [f"{flag}={_as_text(value)}"]


def _as_text(value: Any) -> str:
    """Return the value as a command-line argument; objects become JSON."""
    return json.dumps(value) if isinstance(value, dict) else str(value)

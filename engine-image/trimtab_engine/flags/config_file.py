"""`serve --config FILE.yaml`: the flags as keys of a file. What the command line says as well, wins."""

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
    """The arguments without --config; what its file says is what `serve` defaults to from now on.

    Raises ConfigError when the file cannot be read, and ends the process as for a wrong flag where a value is wrong.
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
    """The last --config, and the arguments without any."""
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
                raise ConfigError(f"{FLAG} needs the path of a YAML file")
        else:
            rest.append(text)
    return path, rest


def _read(path: str) -> dict[Any, Any]:
    try:
        if Path(path).stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{FLAG} {path}: larger than {MAX_FILE_BYTES} bytes; it holds flags, nothing else")
        values = yaml.safe_load(Path(path).read_bytes())
    except OSError as error:
        raise ConfigError(f"{FLAG} {path}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{FLAG} {path}: is not YAML: {' '.join(str(error).split())[:200]}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{FLAG} {path}: must hold keys and values, such as 'max-num-seqs: 64'")
    return values


def _as_flag(serve: OneLineParser, path: str, key: str, value: Any) -> list[str]:
    """The flag and its value, as arguments; none for a switch that is off without it."""
    flag = "--" + key.lstrip("-").replace("_", "-")
    if flag not in serve.all_flags():
        close = serve.nearest_flag(flag)
        hint = f"; did you mean {close.removeprefix('--')}?" if close else ""
        raise ConfigError(f"{FLAG} {path}: {key[:100]} is no flag of serve{hint}")
    if value is None:
        raise ConfigError(f"{FLAG} {path}: {key} has no value; give it one or leave it out")
    if value is True:
        return [flag]
    if value is False:
        without = flag.replace("--", "--no-", 1)
        return [without] if without in serve.all_flags() else []
    if isinstance(value, list):
        return [flag, *map(_as_text, value)]
    return [f"{flag}={_as_text(value)}"]


def _as_text(value: Any) -> str:
    """An object as JSON."""
    return json.dumps(value) if isinstance(value, dict) else str(value)

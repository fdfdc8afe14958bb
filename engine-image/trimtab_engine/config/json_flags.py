"""Flags whose value is a JSON object of fields, as vLLM has them: the reading of the text, and the typed value of it.

What each field may be is the module's that owns the flag. Knows no tensor: the API server's process reads flags too.
"""

import json
from typing import Any, TypeVar

import msgspec

from trimtab_engine.errors import ConfigError

Fields = TypeVar("Fields", bound=msgspec.Struct)


def read_json(flag: str, text: str, example: str) -> object:
    """The text's value, whatever it is. Raises ConfigError, which names the flag and shows the example."""
    try:
        value: object = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{flag} is not JSON ({error}); write {example}") from None
    return value


def read_json_object(flag: str, text: str, example: str) -> dict[str, Any]:
    """The text's fields. Raises ConfigError, which names the flag and shows the example."""
    value = read_json(flag, text, example)
    if not isinstance(value, dict):
        raise ConfigError(f"{flag} must be a JSON object, such as {example}")
    return value


def convert_fields(flag: str, fields: dict[str, Any], kind: type[Fields]) -> Fields:
    """The typed value of the fields. Raises ConfigError: that of the type's own checks, or what is of another type."""
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        raise ConfigError(f"{flag}: {error}") from None

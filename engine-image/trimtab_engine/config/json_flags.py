"""Parsing of flags whose value is a JSON object, as in vLLM. Each flag's module defines its fields. No tensors: the API
server's process reads flags too.
"""

import json
from typing import Any, TypeVar

import msgspec

from trimtab_engine.errors import ConfigError

Fields = TypeVar("Fields", bound=msgspec.Struct)


def read_json(flag: str, text: str, example: str) -> object:
    """Return the text's value of any type.

    Raises:
        ConfigError: With the flag and an example.
    """
    try:
        value: object = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{flag} is not JSON ({error}); write {example}") from None
    return value


def read_json_object(flag: str, text: str, example: str) -> dict[str, Any]:
    """Return the text's fields. Raises ConfigError, which names the flag and shows the example."""
    value = read_json(flag, text, example)
    if not isinstance(value, dict):
        raise ConfigError(f"{flag} must be a JSON object, such as {example}")
    return value


def convert_fields(flag: str, fields: dict[str, Any], kind: type[Fields]) -> Fields:
    """Return the typed value of the fields.

    Raises:
        ConfigError: From the type's own checks, or for a wrong type.
    """
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        raise ConfigError(f"{flag}: {error}") from None

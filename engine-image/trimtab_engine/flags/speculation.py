"""Flags of speculative decoding: a JSON object, its single fields, and short forms of three of them."""

import argparse
from typing import Any

from trimtab_engine.config.speculation import (
    FLAG,
    METHODS,
    SpeculativeConfig,
    parse_speculative_json,
    speculative_config,
)
from trimtab_engine.errors import ConfigError
from trimtab_engine.flags import parser as types

FIELDS: dict[str, tuple[type | Any, str | None]] = {
    "method": (str, "--spec-method"),
    "model": (str, "--spec-model"),
    "num_speculative_tokens": (types.positive, "--spec-tokens"),
    "prompt_lookup_min": (types.positive, None),
    "prompt_lookup_max": (types.positive, None),
}
"""Type of each field, and its short flag if there is one."""
HELP = {
    "--spec-method": f"drafting method: {', '.join(METHODS)}",
    "--spec-model": "draft model: folder or .gguf file of a smaller model with the same vocabulary; EAGLE: the head's "
    "folder",
    "--spec-tokens": "drafts per request and step, the upper bound of the live num_speculative_tokens",
}


def add_speculative_flags(group: Any) -> None:
    group.add_argument(
        FLAG,
        "-sc",
        metavar="JSON",
        help='options as JSON: {"method": "ngram", "num_speculative_tokens": 4} (default: none); single fields can '
        f"be set as {FLAG}.method ngram",
    )
    for field, (kind, short) in FIELDS.items():
        names = [f"{FLAG}.{field}", f"{FLAG}.{field.replace('_', '-')}"]
        group.add_argument(*dict.fromkeys(names), dest=_destination(FLAG, field), type=kind, help=argparse.SUPPRESS)
        if short:
            group.add_argument(short, dest=_destination(short, field), type=kind, metavar="VALUE", help=HELP[short])


def speculative_fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the EngineConfig fields that these flags set; the live depth starts at its upper bound."""
    speculative = _speculative(arguments)
    depth = 0 if speculative is None else speculative.num_speculative_tokens
    return {"speculative": speculative, "num_speculative_tokens": depth, "num_speculative_tokens_cap": depth}


def _speculative(arguments: argparse.Namespace) -> SpeculativeConfig | None:
    """Return the speculative decoding configuration, or None if no flag is set.

    Raises:
        ConfigError: Two flags conflict.
    """
    text = arguments.speculative_config
    values: dict[str, Any] = {} if text is None else parse_speculative_json(text)
    sources = dict.fromkeys(values, FLAG)
    for field, (_, short) in FIELDS.items():
        for flag in (FLAG, short):
            value = getattr(arguments, _destination(flag, field)) if flag else None
            if value is None:
                continue
            name = f"{FLAG}.{field}" if flag == FLAG else str(flag)
            if values.get(field, value) != value:
                raise ConfigError(
                    f"{name} {value} conflicts with {field} {values[field]} of {sources[field]}; set only one"
                )
            values[field], sources[field] = value, name
    return speculative_config(values) if values or text is not None else None


def _destination(flag: str, field: str) -> str:
    return f"{flag.lstrip('-').replace('-', '_')}__{field}"

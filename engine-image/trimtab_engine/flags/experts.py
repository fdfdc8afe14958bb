"""Flags of expert-parallel load balancing: a switch, a JSON object, and its single fields."""

import argparse
from typing import Any

from trimtab_engine.config.experts import FIELDS, FLAG, eplb_config, parse_eplb_json
from trimtab_engine.errors import ConfigError

SWITCHES = ("log_balancedness",)
BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


def add_eplb_flags(group: Any) -> None:
    group.add_argument(
        "--enable-eplb",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="balance the expert load over ranks; requires expert parallelism (default: off)",
    )
    group.add_argument(
        FLAG,
        metavar="JSON",
        help="options as JSON: "
        '{"num_redundant_experts": 8, "window_size": 1000, "step_interval": 3000, "log_balancedness": false}; '
        f"single fields can be set as {FLAG}.step_interval 3000",
    )
    for field in FIELDS:
        names = [f"{FLAG}.{field}", f"{FLAG}.{field.replace('_', '-')}"]
        kind = _boolean if field in SWITCHES else int
        group.add_argument(*dict.fromkeys(names), dest=f"eplb_config__{field}", type=kind, help=argparse.SUPPRESS)


def eplb_fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return EngineConfig's expert-balancing field.

    Raises:
        ConfigError: Two flags conflict, or options are set without --enable-eplb.
    """
    text = arguments.eplb_config
    values: dict[str, Any] = {} if text is None else parse_eplb_json(text)
    for field in FIELDS:
        value = getattr(arguments, f"eplb_config__{field}")
        if value is not None:
            if values.get(field, value) != value:
                raise ConfigError(
                    f"{FLAG}.{field} {value} conflicts with {field} {values[field]} of {FLAG}; set only one"
                )
            values[field] = value
    if values and not arguments.enable_eplb:
        raise ConfigError(f"{FLAG} requires --enable-eplb; add --enable-eplb, or remove it")
    return {"eplb": eplb_config(values) if arguments.enable_eplb else None}


def _boolean(text: str) -> bool:
    if text.lower() not in BOOLEANS:
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return BOOLEANS[text.lower()]

"""The flags of expert parallel load balancing: a switch, one JSON object, and its fields one by one."""

import argparse
from typing import Any

from trimtab_engine.config.experts import FIELDS, FLAG, eplb_config, parse_eplb_json
from trimtab_engine.errors import ConfigError

SWITCHES = ("log_balancedness",)
TRUTHS = {"true": True, "1": True, "false": False, "0": False}


def add_eplb_flags(group: Any) -> None:
    group.add_argument(
        "--enable-eplb",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="balance the load of experts over their ranks, with expert parallelism (default: off)",
    )
    group.add_argument(
        FLAG,
        metavar="JSON",
        help='{"num_redundant_experts": 8, "window_size": 1000, "step_interval": 3000, "log_balancedness": false}; '
        f"single fields as {FLAG}.step_interval 3000 as well",
    )
    for field in FIELDS:
        names = [f"{FLAG}.{field}", f"{FLAG}.{field.replace('_', '-')}"]
        kind = _truth if field in SWITCHES else int
        group.add_argument(*dict.fromkeys(names), dest=f"eplb_config__{field}", type=kind, help=argparse.SUPPRESS)


def eplb_fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """The field of EngineConfig. Raises ConfigError."""
    text = arguments.eplb_config
    values: dict[str, Any] = {} if text is None else parse_eplb_json(text)
    for field in FIELDS:
        value = getattr(arguments, f"eplb_config__{field}")
        if value is not None:
            if values.get(field, value) != value:
                raise ConfigError(f"{FLAG}.{field} is {value}, but {FLAG} says {field} {values[field]}; give one")
            values[field] = value
    if values and not arguments.enable_eplb:
        raise ConfigError(f"{FLAG} says how experts are balanced, but they are not; add --enable-eplb, or leave it out")
    return {"eplb": eplb_config(values) if arguments.enable_eplb else None}


def _truth(text: str) -> bool:
    if text.lower() not in TRUTHS:
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return TRUTHS[text.lower()]

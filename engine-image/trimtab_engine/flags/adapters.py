"""Flags of low-rank adapters (LoRA)."""

import argparse
from collections.abc import Sequence
from typing import Any

import msgspec

from trimtab_engine.config.adapters import FLAG, AdapterConfig, AdapterModule
from trimtab_engine.config.json_flags import convert_fields, read_json
from trimtab_engine.errors import ConfigError
from trimtab_engine.flags import parser as types

EXAMPLE = '{"name": "sql", "path": "/adapters/sql"}'
OTHERS = ("lora_modules", "max_loras", "max_lora_rank", "max_cpu_loras", "allow_runtime_lora_updating")
"""Flags that require --enable-lora."""


def add_adapter_flags(group: Any) -> None:
    group.add_argument(
        "--enable-lora",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="serve LoRA adapters in addition to the base model (default: off)",
    )
    group.add_argument(
        FLAG,
        nargs="+",
        action="extend",
        metavar="NAME=PATH",
        help=f"adapters to load at startup and the model names that clients use for them: NAME=FOLDER, or {EXAMPLE}",
    )
    group.add_argument(
        "--max-loras",
        type=types.positive,
        metavar="N",
        help="maximum number of different adapters in one step (default: 1)",
    )
    group.add_argument(
        "--max-lora-rank", type=types.positive, metavar="RANK", help="maximum adapter rank (default: 16)"
    )
    group.add_argument(
        "--max-cpu-loras",
        type=types.positive,
        metavar="N",
        help=f"maximum number of loaded adapters (default: the number in {FLAG}, at least --max-loras)",
    )
    group.add_argument(
        "--allow-runtime-lora-updating",
        action="store_true",
        default=None,
        help="allow clients to load adapters from any local folder and to unload them (POST /v1/load_lora_adapter and "
        "/v1/unload_lora_adapter); reserves memory for --max-cpu-loras adapters of --max-lora-rank",
    )


def adapter_config(arguments: argparse.Namespace) -> AdapterConfig | None:
    """Return the adapter configuration, or None if adapters are disabled.

    Raises:
        ConfigError: An adapter flag is set without --enable-lora.
    """
    if not arguments.enable_lora:
        given = next((name for name in OTHERS if getattr(arguments, name) is not None), None)
        if given is not None:
            raise ConfigError(f"--{given.replace('_', '-')} requires --enable-lora; add --enable-lora, or remove it")
        return None
    values = {
        "modules": _modules(arguments.lora_modules or ()),
        "max_loras": arguments.max_loras,
        "max_lora_rank": arguments.max_lora_rank,
        "max_cpu_loras": arguments.max_cpu_loras,
        "is_updatable": arguments.allow_runtime_lora_updating,
    }
    return AdapterConfig(**{name: value for name, value in values.items() if value is not None})


def _modules(given: Sequence[str]) -> tuple[AdapterModule, ...]:
    """Parse adapters given as NAME=PATH, as a JSON object, or as a JSON list of objects."""
    modules: list[AdapterModule] = []
    for text in given:
        if text.lstrip().startswith(("{", "[")):
            value = read_json(FLAG, text, EXAMPLE)
            modules += [_module(each) for each in (value if isinstance(value, list) else [value])]
            continue
        name, equals, path = text.partition("=")
        if not equals or not path:
            raise ConfigError(f"{FLAG}: {text[:100]!r} is not an adapter; use NAME=PATH or {EXAMPLE}")
        modules.append(AdapterModule(name=name, path=path))
    return tuple(modules)


def _module(fields: object) -> AdapterModule:
    if not isinstance(fields, dict):
        raise ConfigError(f"{FLAG}: each adapter must be a JSON object such as {EXAMPLE}")
    known = {field.name for field in msgspec.structs.fields(AdapterModule)}
    unknown = sorted(fields.keys() - known)
    if unknown:
        raise ConfigError(f"{FLAG}: {unknown[0]} is not supported; the fields are {', '.join(sorted(known))}")
    return convert_fields(FLAG, fields, AdapterModule)

"""The flags of low-rank adapters (LoRA)."""

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
"""Flags that say something only beside --enable-lora."""


def add_adapter_flags(group: Any) -> None:
    group.add_argument(
        "--enable-lora",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="serve low-rank adapters beside the model (default: off)",
    )
    group.add_argument(
        FLAG,
        nargs="+",
        action="extend",
        metavar="NAME=PATH",
        help=f"adapters that are served from the start, by the names that requests ask for them with: NAME=FOLDER, or "
        f"{EXAMPLE}",
    )
    group.add_argument(
        "--max-loras", type=types.positive, metavar="N", help="different adapters that a step may have (default: 1)"
    )
    group.add_argument(
        "--max-lora-rank", type=types.positive, metavar="RANK", help="highest rank of an adapter (default: 16)"
    )
    group.add_argument(
        "--max-cpu-loras",
        type=types.positive,
        metavar="N",
        help=f"adapters that may be loaded at once (default: as many as {FLAG} names, and at least --max-loras)",
    )
    group.add_argument(
        "--allow-runtime-lora-updating",
        action="store_true",
        default=None,
        help="clients may load adapters from any folder here, and unload them (POST /v1/load_lora_adapter and "
        "/v1/unload_lora_adapter); room for --max-cpu-loras of --max-lora-rank is set aside",
    )


def adapter_config(arguments: argparse.Namespace) -> AdapterConfig | None:
    """What the flags say together; None: no adapters are served. Raises ConfigError."""
    if not arguments.enable_lora:
        given = next((name for name in OTHERS if getattr(arguments, name) is not None), None)
        if given is not None:
            raise ConfigError(
                f"--{given.replace('_', '-')} is about adapters, and none are served; add --enable-lora, or leave it "
                f"out"
            )
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
    """Each is NAME=PATH or an object in JSON; a list of objects stands for several."""
    modules: list[AdapterModule] = []
    for text in given:
        if text.lstrip().startswith(("{", "[")):
            value = read_json(FLAG, text, EXAMPLE)
            modules += [_module(each) for each in (value if isinstance(value, list) else [value])]
            continue
        name, equals, path = text.partition("=")
        if not equals or not path:
            raise ConfigError(f"{FLAG}: {text[:100]!r} names no adapter; write NAME=PATH, or {EXAMPLE}")
        modules.append(AdapterModule(name=name, path=path))
    return tuple(modules)


def _module(fields: object) -> AdapterModule:
    if not isinstance(fields, dict):
        raise ConfigError(f"{FLAG} must name each adapter by a JSON object, such as {EXAMPLE}")
    known = {field.name for field in msgspec.structs.fields(AdapterModule)}
    unknown = sorted(fields.keys() - known)
    if unknown:
        raise ConfigError(f"{FLAG}: {unknown[0]} is not supported; the fields are {', '.join(sorted(known))}")
    return convert_fields(FLAG, fields, AdapterModule)

"""Flags of CUDA graphs: switches, sizes, an optimization level, and a JSON object with all fields."""

import argparse
from typing import Any

from trimtab_engine.config.graphs import (
    DEFAULT_LEVEL,
    FLAG,
    MODES_BY_LEVEL,
    CompilationConfig,
    compilation_config,
    parse_compilation_json,
)
from trimtab_engine.errors import ConfigError
from trimtab_engine.flags import parser as types

SHORT = "-cc"
SINGLE_FIELDS: dict[str, type] = {"mode": str, "level": str, "cudagraph_mode": str, "max_cudagraph_capture_size": int}
"""Fields of the JSON object that have single-field flags: --compilation-config.mode 3, -cc.cudagraph_mode=none."""
SIZE_FLAGS = {
    "cudagraph_capture_sizes": "--cudagraph-capture-sizes",
    "max_cudagraph_capture_size": "--max-cudagraph-capture-size",
    "cudagraph_lazy_capture": "--cudagraph-lazy-capture",
}
"""Fields that have their own flag."""


def add_graph_flags(group: Any) -> None:
    group.add_argument(
        "--enforce-eager",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="disable CUDA graphs, overriding all other graph flags: less memory, faster start, slower decode "
        "(default: off)",
    )
    group.add_argument(
        "-O",
        "--optimization-level",
        type=int,
        choices=tuple(MODES_BY_LEVEL),
        default=DEFAULT_LEVEL,
        metavar="LEVEL",
        help="optimization level; 0: no graphs; 1: piecewise; 2 and 3: full graphs for decode, piecewise otherwise; "
        f"no level uses torch.compile (default: {DEFAULT_LEVEL}; the CPU has no graphs at any level)",
    )
    group.add_argument(
        "--cudagraph-capture-sizes",
        nargs="+",
        type=_sizes,
        metavar="TOKENS",
        help="graph sizes in tokens, such as 1 2 4 8 or 1,2,4,8 (default: 1, 2, 4, multiples of 8 to 256, then of 16)",
    )
    group.add_argument(
        "--max-cudagraph-capture-size",
        type=types.not_negative,
        metavar="TOKENS",
        help="largest default graph size (default: 2 × max_num_seqs, at most 512; for decode graphs max_num_seqs)",
    )
    group.add_argument(
        "--cudagraph-lazy-capture",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="capture each graph at its first use: faster start, one slow step per graph (default: off)",
    )
    group.add_argument(
        FLAG,
        SHORT,
        metavar="JSON",
        help='options as JSON: {"cudagraph_mode": "full_decode_only", "cudagraph_capture_sizes": [1, 2, 4]}; single '
        f"fields can be set as {SHORT}.cudagraph_mode=none",
    )
    for name, kind in SINGLE_FIELDS.items():
        dashed = name.replace("_", "-")
        names = dict.fromkeys(f"{flag}.{field}" for flag in (FLAG, SHORT) for field in (name, dashed))
        group.add_argument(*names, dest=f"compilation__{name}", type=kind, help=argparse.SUPPRESS)
    for flag in (FLAG, SHORT):
        for name in ("cudagraph_capture_sizes", "cudagraph-capture-sizes"):
            group.add_argument(
                f"{flag}.{name}", dest="compilation__sizes", nargs="+", type=_sizes, help=argparse.SUPPRESS
            )


def graph_fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return EngineConfig's CUDA graph fields.

    Raises:
        ConfigError: Two flags conflict.
    """
    return {
        "enforce_eager": arguments.enforce_eager,
        "optimization_level": arguments.optimization_level,
        "compilation": _compilation(arguments),
    }


def _compilation(arguments: argparse.Namespace) -> CompilationConfig:
    text = arguments.compilation_config
    values: dict[str, Any] = {} if text is None else parse_compilation_json(text)
    written: list[tuple[str, str, Any]] = [
        (name, f"{FLAG}.{name}", getattr(arguments, f"compilation__{name}")) for name in SINGLE_FIELDS
    ]
    written.append(("cudagraph_capture_sizes", f"{FLAG}.cudagraph_capture_sizes", _flat(arguments.compilation__sizes)))
    written.append(
        ("cudagraph_capture_sizes", SIZE_FLAGS["cudagraph_capture_sizes"], _flat(arguments.cudagraph_capture_sizes))
    )
    for name in ("max_cudagraph_capture_size", "cudagraph_lazy_capture"):
        written.append((name, SIZE_FLAGS[name], getattr(arguments, name)))
    for name, flag, value in written:
        if value is None:
            continue
        if values.get(name, value) != value:
            raise ConfigError(f"{flag} {value} conflicts with {name} {values[name]}; set only one")
        values[name] = value
    return compilation_config(values)


def _flat(given: list[list[int]] | None) -> list[int] | None:
    return None if given is None else [size for sizes in given for size in sizes]


def _sizes(text: str) -> list[int]:
    """Parse one size, or several separated by commas."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a list of sizes; use 1 2 4 8 or 1,2,4,8") from None

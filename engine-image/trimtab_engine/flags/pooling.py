"""Flags that select token generation or pooling of hidden states."""

import argparse
from typing import Any

from trimtab_engine.config.pooling import EXAMPLE, FLAG, PoolerConfig, parse_pooler_json


def add_pooling_flags(group: Any) -> None:
    group.add_argument(
        "--runner",
        choices=("auto", "generate", "pooling"),
        default="auto",
        help="model runner; generate: tokens; pooling: vectors (/v1/embeddings); auto: pooling for embedding "
        "checkpoints, otherwise both (default: auto)",
    )
    group.add_argument(
        FLAG,
        metavar="JSON",
        help=f"pooling options as JSON, such as {EXAMPLE} (default: the checkpoint's, else LAST, normalized)",
    )


def pooling_fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the EngineConfig fields that these flags set."""
    text = arguments.pooler_config
    return {"runner": arguments.runner, "pooler": PoolerConfig() if text is None else parse_pooler_json(text)}

"""The flags that say what is done with prompts: tokens are generated, or hidden states pooled."""

import argparse
from typing import Any

from trimtab_engine.config.pooling import EXAMPLE, FLAG, PoolerConfig, parse_pooler_json


def add_pooling_flags(group: Any) -> None:
    group.add_argument(
        "--runner",
        choices=("auto", "generate", "pooling"),
        default="auto",
        help="generate: tokens; pooling: vectors (/v1/embeddings); auto: vectors alone where the checkpoint is made "
        "for them, else both (default: auto)",
    )
    group.add_argument(
        FLAG,
        metavar="JSON",
        help=f"how prompts become vectors, such as {EXAMPLE} (default: as the checkpoint says, else LAST, normalised)",
    )


def pooling_fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """The fields of EngineConfig."""
    text = arguments.pooler_config
    return {"runner": arguments.runner, "pooler": PoolerConfig() if text is None else parse_pooler_json(text)}

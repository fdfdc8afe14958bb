"""Flags of models that come from the hub, and what MODEL becomes once it is here: a path."""

import argparse
from pathlib import Path
from typing import Any

from trimtab_engine.flags import parser as types
from trimtab_engine.hub.fetch import Fetched, FetchOptions, OnProgress, fetch
from trimtab_engine.hub.name import HubModel, hub_model


def add_hub_flags(group: Any) -> None:
    """Where such a model comes from and is kept."""
    group.add_argument(
        "--revision", metavar="REVISION", help="branch, tag or commit of the model (default: main; or in MODEL, @…)"
    )
    group.add_argument(
        "--download-dir",
        type=Path,
        metavar="FOLDER",
        help="cache of models, which several engines may share (default: huggingface_hub's, HF_HUB_CACHE)",
    )
    group.add_argument(
        "--download-dir-size",
        type=types.quantity,
        metavar="SIZE",
        help="how large the cache may grow, such as 100Gi: before a download the longest unused models that no engine "
        "runs are deleted (default: no limit, nothing is deleted)",
    )


def model_of_hub(model: str, arguments: argparse.Namespace) -> HubModel | None:
    """What is to be fetched; None where MODEL is on this machine. Raises ConfigError or ModelError."""
    return hub_model(model, arguments.revision)


def fetch_options(arguments: argparse.Namespace) -> FetchOptions:
    return FetchOptions(
        folder=arguments.download_dir,
        limit_bytes=arguments.download_dir_size,
        has_weights=getattr(arguments, "load_format", "auto") != "dummy",
    )


def bring(
    model: HubModel, arguments: argparse.Namespace, on_progress: OnProgress
) -> tuple[argparse.Namespace, Fetched]:
    """Have the model here, and the arguments as if its path and name had been given. Raises ConfigError, ModelError."""
    fetched = fetch(model, fetch_options(arguments), on_progress)
    named: dict[str, object] = {"model": str(fetched.path), "model_flag": None, "revision": None}
    if not arguments.served_model_name:
        named["served_model_name"] = [model.name]
    return argparse.Namespace(**{**vars(arguments), **named}), fetched

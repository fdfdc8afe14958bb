"""Flags of models that are fetched, and what MODEL becomes once it is here: a path."""

import argparse
from pathlib import Path
from typing import Any

from trimtab_engine.flags import parser as types
from trimtab_engine.sources.fetch import Fetched, OnProgress, fetch
from trimtab_engine.sources.name import RemoteModel, remote_model
from trimtab_engine.sources.source import FetchOptions


def add_source_flags(group: Any) -> None:
    """Where such a model comes from and is kept."""
    add_asking_flags(group)
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


def add_asking_flags(group: Any) -> None:
    """How such a model is asked for, also where nothing of it is kept."""
    group.add_argument(
        "--revision",
        metavar="REVISION",
        help="branch, tag or commit of a model of the hub (default: main; or in MODEL, @…), pin of one in a bucket",
    )
    group.add_argument(
        "--s3-addressing-style",
        choices=("path", "virtual"),
        help="where the name of a bucket stands in a URL: in its path or in its host (default: in the host of Amazon's "
        "own, in the path where AWS_ENDPOINT_URL names another store)",
    )
    group.add_argument(
        "--registry-auth-file",
        type=Path,
        metavar="FILE",
        help="accounts of registries, as in Docker's config.json (default: everybody may pull it)",
    )
    group.add_argument(
        "--registry-plain-http",
        action="store_true",
        help="ask the registry without TLS (default: for registries on this machine alone)",
    )


def model_elsewhere(model: str, arguments: argparse.Namespace) -> RemoteModel | None:
    """What is to be fetched; None where MODEL is on this machine. Raises ConfigError or ModelError."""
    return remote_model(model, arguments.revision)


def fetch_options(arguments: argparse.Namespace) -> FetchOptions:
    return FetchOptions(
        folder=getattr(arguments, "download_dir", None),
        limit_bytes=getattr(arguments, "download_dir_size", None),
        has_weights=getattr(arguments, "load_format", "auto") != "dummy",
        s3_addressing=arguments.s3_addressing_style,
        registry_auth_file=arguments.registry_auth_file,
        registry_plain_http=arguments.registry_plain_http,
    )


def bring(
    model: RemoteModel, arguments: argparse.Namespace, on_progress: OnProgress
) -> tuple[argparse.Namespace, Fetched]:
    """Have the model here, and the arguments as if its path and name had been given. Raises ConfigError, ModelError."""
    fetched = fetch(model, fetch_options(arguments), on_progress)
    named: dict[str, object] = {"model": str(fetched.path), "model_flag": None, "revision": None}
    if not arguments.served_model_name:
        named["served_model_name"] = [model.name]
    return argparse.Namespace(**{**vars(arguments), **named}), fetched

"""Flags of remote models, and their download to a local path."""

import argparse
from pathlib import Path
from typing import Any

from trimtab_engine.flags import parser as types
from trimtab_engine.sources.fetch import Fetched, OnProgress, fetch
from trimtab_engine.sources.name import RemoteModel, remote_model
from trimtab_engine.sources.source import FetchOptions


def add_source_flags(group: Any) -> None:
    """Add the flags of the model cache and of access to remote models."""
    add_remote_access_flags(group)
    group.add_argument(
        "--download-dir",
        type=Path,
        metavar="FOLDER",
        help="model cache folder; can be shared by several engines (default: huggingface_hub's, HF_HUB_CACHE)",
    )
    group.add_argument(
        "--download-dir-size",
        type=types.quantity,
        metavar="SIZE",
        help="maximum cache size, such as 100Gi; before a download the least recently used models that no engine "
        "uses are deleted (default: no limit, nothing is deleted)",
    )


def add_remote_access_flags(group: Any) -> None:
    """Add the flags of access to remote models, also used when nothing is cached."""
    group.add_argument(
        "--revision",
        metavar="REVISION",
        help="branch, tag or commit of a hub model, or pin of a bucket model (default: main, or @… in MODEL)",
    )
    group.add_argument(
        "--s3-addressing-style",
        choices=("path", "virtual"),
        help="position of the bucket name in URLs: path or host (default: host for Amazon S3, path if "
        "AWS_ENDPOINT_URL is set)",
    )
    group.add_argument(
        "--registry-auth-file",
        type=Path,
        metavar="FILE",
        help="file with registry credentials, as Docker's config.json (default: anonymous pulls)",
    )
    group.add_argument(
        "--registry-plain-http",
        action="store_true",
        help="access the registry without TLS (default: only for registries on this machine)",
    )


def requested_remote_model(model: str, arguments: argparse.Namespace) -> RemoteModel | None:
    """Return the remote model, or None if MODEL is a local path.

    Raises:
        ConfigError, ModelError: MODEL is not a valid model name.
    """
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


def download_model(
    model: RemoteModel, arguments: argparse.Namespace, on_progress: OnProgress
) -> tuple[argparse.Namespace, Fetched]:
    """Download the model; return the arguments with its local path and name.

    Raises:
        ConfigError, ModelError: The model cannot be downloaded.
    """
    fetched = fetch(model, fetch_options(arguments), on_progress)
    named: dict[str, object] = {"model": str(fetched.path), "model_flag": None, "revision": None}
    if not arguments.served_model_name:
        named["served_model_name"] = [model.name]
    return argparse.Namespace(**{**vars(arguments), **named}), fetched

"""Validation of a benchmark's input and output files before anything is loaded, started or sent."""

import argparse
import os
from pathlib import Path

from trimtab_engine.errors import ConfigError

FILES = {"dataset_path": "--dataset-path", "trace_path": "--trace-path", "trace_lengths": "--trace-lengths"}
DATASETS_OF_FILES = {"sharegpt": "--dataset-path", "custom": "--dataset-path", "trace": "--trace-path"}


def check_inputs(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for a missing file or tokenizer that is named or that the dataset requires."""
    for name, flag in FILES.items():
        path: Path | None = getattr(arguments, name, None)
        if path is not None:
            _check_file(flag, path)
    dataset = getattr(arguments, "dataset_name", None)
    needed = DATASETS_OF_FILES.get(dataset or "")
    if needed is not None and all(getattr(arguments, name, None) is None for name in ("dataset_path", "trace_path")):
        raise ConfigError(f"--dataset-name {dataset} requires {needed} FILE")
    tokenizer: str | None = getattr(arguments, "tokenizer", None)
    if tokenizer is not None and not Path(tokenizer).exists():
        raise ConfigError(f"--tokenizer {tokenizer}: no such folder; set the model's, or remove it")


def check_urls(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for an invalid server URL."""
    for name, flag in (("base_url", "--base-url"), ("admin_url", "--admin-url")):
        url: str | None = getattr(arguments, name, None)
        if url is not None and not url.startswith(("http://", "https://")):
            raise ConfigError(f"{flag} {url}: not a URL; use http://{url.rpartition('//')[2]}")


def check_target(flag: str, file: Path) -> None:
    """Raise ConfigError if the file cannot be written."""
    if file.is_dir():
        raise ConfigError(f"{flag} {file}: is a folder; set a file in it")
    if not file.parent.is_dir():
        raise ConfigError(f"{flag} {file}: no such folder {file.parent}; create it, or set another path")
    _check_writable(flag, file, file if file.exists() else file.parent)


def check_folder(flag: str, folder: Path) -> None:
    """Raise ConfigError if the folder does not exist and cannot be created, or is not writable."""
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not there.is_dir():
        raise ConfigError(f"{flag} {folder}: {there} is not a folder; set a writable folder")
    _check_writable(flag, folder, there)


def _check_file(flag: str, path: Path) -> None:
    if path.is_dir():
        raise ConfigError(f"{flag} {path}: is a folder; set a file in it")
    if not path.exists():
        raise ConfigError(f"{flag} {path}: no such file; check the path")
    if not os.access(path, os.R_OK):
        raise ConfigError(f"{flag} {path}: permission denied; change its permissions, or set another file")


def _check_writable(flag: str, requested: Path, place: Path) -> None:
    if not os.access(place, os.W_OK):
        raise ConfigError(f"{flag} {requested}: {place} is not writable; set another path")

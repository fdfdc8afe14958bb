"""What a measurement reads and writes, looked at before anything is loaded, started or sent: a file that is not there
is said at once, and nothing is left behind."""

import argparse
import os
from pathlib import Path

from trimtab_engine.errors import ConfigError

FILES = {"dataset_path": "--dataset-path", "trace_path": "--trace-path", "trace_lengths": "--trace-lengths"}
DATASETS_OF_FILES = {"sharegpt": "--dataset-path", "custom": "--dataset-path", "trace": "--trace-path"}


def check_inputs(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for a file or tokenizer that was named and is not there, or that the dataset needs."""
    for name, flag in FILES.items():
        path: Path | None = getattr(arguments, name, None)
        if path is not None:
            _check_file(flag, path)
    dataset = getattr(arguments, "dataset_name", None)
    needed = DATASETS_OF_FILES.get(dataset or "")
    if needed is not None and all(getattr(arguments, name, None) is None for name in ("dataset_path", "trace_path")):
        raise ConfigError(f"--dataset-name {dataset} needs {needed} FILE")
    tokenizer: str | None = getattr(arguments, "tokenizer", None)
    if tokenizer is not None and not Path(tokenizer).exists():
        raise ConfigError(f"--tokenizer {tokenizer}: there is no such folder; give the model's, or leave it out")


def check_urls(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for the address of a server that is no URL."""
    for name, flag in (("base_url", "--base-url"), ("admin_url", "--admin-url")):
        url: str | None = getattr(arguments, name, None)
        if url is not None and not url.startswith(("http://", "https://")):
            raise ConfigError(f"{flag} {url}: is no URL; write http://{url.rpartition('//')[2]}")


def check_target(flag: str, file: Path) -> None:
    """Raise ConfigError where the file could not be written."""
    if file.is_dir():
        raise ConfigError(f"{flag} {file}: is a folder; name a file in it")
    if not file.parent.is_dir():
        raise ConfigError(f"{flag} {file}: there is no folder {file.parent}; make it, or name another place")
    _check_writable(flag, file, file if file.exists() else file.parent)


def check_folder(flag: str, folder: Path) -> None:
    """Raise ConfigError where the folder is not there and could not be made, or could not be written."""
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not there.is_dir():
        raise ConfigError(f"{flag} {folder}: {there} is no folder; name a folder that can be written")
    _check_writable(flag, folder, there)


def _check_file(flag: str, path: Path) -> None:
    if path.is_dir():
        raise ConfigError(f"{flag} {path}: is a folder; name a file in it")
    if not path.exists():
        raise ConfigError(f"{flag} {path}: there is no such file; see whether it is spelt so, from this folder")
    if not os.access(path, os.R_OK):
        raise ConfigError(f"{flag} {path}: may not be read; give yourself the right, or name another file")


def _check_writable(flag: str, asked: Path, place: Path) -> None:
    if not os.access(place, os.W_OK):
        raise ConfigError(f"{flag} {asked}: {place} may not be written; name another place")

"""Helpers shared by the command lines: input errors, early file checks, and the flags --gpu and --version."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

import typer

from trimtab_operator.layout.gpus import Gpu, gpu_named

HELP = {"help_option_names": ["-h", "--help"]}
"""Click settings that accept -h in addition to --help."""
EXIT_INVALID_INPUT = 2  # the input is unreadable or invalid


def exit_with_error(message: str) -> NoReturn:
    """Exit with the message on stderr."""
    typer.echo(message, err=True)
    raise typer.Exit(EXIT_INVALID_INPUT)


def check_readable(flag: str, file: Path | None) -> None:
    """Exit if a file does not exist, before long work begins; - is standard input."""
    if file is not None and str(file) != "-" and not file.exists():
        exit_with_error(f"{flag} {file}: file not found; check the path")
    if file is not None and file.is_dir():
        exit_with_error(f"{flag} {file}: is a directory; pass a file")


def check_writable(flag: str, file: Path | None) -> None:
    """Exit if a file cannot be written, before long work begins."""
    if file is None:
        return
    if file.is_dir():
        exit_with_error(f"{flag} {file}: is a directory; pass a file")
    if not file.parent.is_dir():
        exit_with_error(f"{flag} {file}: directory {file.parent} does not exist; create it, or pass another path")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        exit_with_error(f"{flag} {file}: not writable; pass another path")


def parse_gpu(name: str) -> Gpu:
    """Return the GPU named by --gpu."""
    try:
        return gpu_named(name)
    except ValueError as error:
        exit_with_error(f"--gpu: {error}")


def version_callback(program: str) -> Callable[[bool], None]:
    """Return the callback of a program's --version."""

    def show(is_requested: bool) -> None:
        if is_requested:
            typer.echo(f"{program} {version('trimtab')}")
            raise typer.Exit

    return show

"""What the command lines share: how input is refused, files that are looked at first, the flags --gpu and --version."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

import typer

from trimtab_operator.layout.gpus import Gpu, gpu_named

HELP = {"help_option_names": ["-h", "--help"]}
"""For click: who types -h before anything else is helped too."""
EXIT_REFUSED = 2  # the input cannot be read, or asks for what cannot be


def refuse(message: str) -> NoReturn:
    """End with the message on stderr."""
    typer.echo(message, err=True)
    raise typer.Exit(EXIT_REFUSED)


def check_read(flag: str, file: Path | None) -> None:
    """Refuse a file that is named and not there, before anything that takes long; - is standard input."""
    if file is not None and str(file) != "-" and not file.exists():
        refuse(f"{flag} {file}: is not there; see whether it is spelt so")
    if file is not None and file.is_dir():
        refuse(f"{flag} {file}: is a folder; name a file in it")


def check_written(flag: str, file: Path | None) -> None:
    """Refuse a file that could not be written, likewise."""
    if file is None:
        return
    if file.is_dir():
        refuse(f"{flag} {file}: is a folder; name a file in it")
    if not file.parent.is_dir():
        refuse(f"{flag} {file}: there is no folder {file.parent}; make it, or name another place")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        refuse(f"{flag} {file}: may not be written; name another place")


def given_gpu(name: str) -> Gpu:
    """The value of --gpu."""
    try:
        return gpu_named(name)
    except ValueError as error:
        refuse(f"--gpu: {error}")


def version_of(program: str) -> Callable[[bool], None]:
    """What --version of a program does."""

    def show(asked: bool) -> None:
        if asked:
            typer.echo(f"{program} {version('trimtab')}")
            raise typer.Exit

    return show

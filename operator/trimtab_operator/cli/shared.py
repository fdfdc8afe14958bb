"""What the command lines share: how input is refused, and the flags --gpu and --version."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import NoReturn

import typer

from trimtab_operator.layout.gpus import Gpu, gpu_named

EXIT_REFUSED = 2  # the input cannot be read, or asks for what cannot be


def refuse(message: str) -> NoReturn:
    """End with the message on stderr."""
    typer.echo(message, err=True)
    raise typer.Exit(EXIT_REFUSED)


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

"""What the command lines share: how input is refused, and the flag --gpu."""

from __future__ import annotations

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

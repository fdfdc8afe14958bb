"""Engine commands of `trimtab`. They run `trimtab-engine`, which prints their help and errors.

Operator and engine share no import, so the commands use the command line only.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer
from typer._click.core import Context  # typer vendors click and exports these two under no other name
from typer._click.shell_completion import CompletionItem
from typer.core import TyperCommand

from trimtab_operator.cli import completion
from trimtab_operator.cli.engine_program import ENGINE, exec_engine
from trimtab_operator.cli.shared import exit_with_error

PASS_THROUGH_SETTINGS = {"ignore_unknown_options": True, "allow_interspersed_args": False, "help_option_names": []}
"""Click settings that pass every argument of the command to the engine, including --help."""


def _complete(ctx: Context, incomplete: str) -> list[str]:
    words = [str(ctx.info_name), *(ctx.params.get("arguments") or ())]
    return completion.complete(words, incomplete) or []


Model = Annotated[list[str] | None, typer.Argument(metavar="MODEL [FLAG ...]", autocompletion=_complete)]
ModelOrUrl = Annotated[list[str] | None, typer.Argument(metavar="MODEL_OR_URL [FLAG ...]", autocompletion=_complete)]
Kind = Annotated[list[str] | None, typer.Argument(metavar="KIND [FLAG ...]", autocompletion=_complete)]


class EngineCommand(TyperCommand):
    """A command whose flags are completed as `trimtab-engine` has them."""

    def shell_complete(self, ctx: Context, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(word) for word in _complete(ctx, incomplete)]


def serve(arguments: Model = None) -> None:
    """Serve a model on this machine, with an OpenAI-compatible API."""
    _exec_engine("serve", arguments)


def bench(arguments: Kind = None) -> None:
    """Measure the latency of a batch, throughput, a server under load, or a start."""
    _exec_engine("bench", arguments)


def autotune(arguments: ModelOrUrl = None) -> None:
    """Find the engine parameters with the highest throughput under latency limits."""
    _exec_engine("autotune", arguments)


def fetch(arguments: Model = None) -> None:
    """Download a model from the hub, a bucket or a registry into the cache, without serving it."""
    _exec_engine("fetch", arguments)


def inspect(arguments: Model = None) -> None:
    """Print the facts of a model: layers, heads, sizes."""
    _exec_engine("inspect", arguments)


def _exec_engine(command: str, arguments: list[str] | None) -> None:
    """Replace this process with the engine's command."""
    exec_engine([command, *(arguments or ())])
    exit_with_error(
        f"trimtab {command}: needs {ENGINE}, which is not installed; "
        f"run pip install 'trimtab[engine]=={version('trimtab')}'"
    )

"""Engine commands of `trimtab`. They run `trimtab-engine`, which prints their help and errors.

Operator and engine share no import, so the commands use the command line only.
"""

from __future__ import annotations

import subprocess
from importlib.metadata import version
from typing import Annotated

import typer
from typer._click.core import Context  # typer vendors click and exports these two under no other name
from typer._click.shell_completion import CompletionItem
from typer.core import TyperCommand

from trimtab_operator.cli.engine_program import ENGINE, engine_program, exec_engine
from trimtab_operator.cli.shared import exit_with_error

COMPLETION_SECONDS = 10.0  # the user waits for the completion
PASS_THROUGH_SETTINGS = {"ignore_unknown_options": True, "allow_interspersed_args": False, "help_option_names": []}
"""Click settings that pass every argument of the command to the engine, including --help."""


class EngineCommand(TyperCommand):
    """A command whose arguments are completed by `trimtab-engine`."""

    def shell_complete(self, ctx: Context, incomplete: str) -> list[CompletionItem]:
        path = [str(self.name), *(word for word in ctx.params.get("arguments") or () if not word.startswith("-"))]
        return [CompletionItem(word) for word in _words(path) if word.startswith(incomplete)]


def serve(arguments: Annotated[list[str] | None, typer.Argument(metavar="MODEL [FLAG ...]")] = None) -> None:
    """Serve a model on this machine, with an OpenAI-compatible API."""
    _exec_engine("serve", arguments)


def bench(arguments: Annotated[list[str] | None, typer.Argument(metavar="KIND [FLAG ...]")] = None) -> None:
    """Measure the latency of a batch, throughput, a server under load, or a start."""
    _exec_engine("bench", arguments)


def autotune(arguments: Annotated[list[str] | None, typer.Argument(metavar="MODEL_OR_URL [FLAG ...]")] = None) -> None:
    """Find the engine parameters with the highest throughput under latency limits."""
    _exec_engine("autotune", arguments)


def fetch(arguments: Annotated[list[str] | None, typer.Argument(metavar="MODEL [FLAG ...]")] = None) -> None:
    """Download a model from the hub, a bucket or a registry into the cache, without serving it."""
    _exec_engine("fetch", arguments)


def inspect(arguments: Annotated[list[str] | None, typer.Argument(metavar="MODEL [FLAG ...]")] = None) -> None:
    """Print the facts of a model: layers, heads, sizes."""
    _exec_engine("inspect", arguments)


def _exec_engine(command: str, arguments: list[str] | None) -> None:
    """Replace this process with the engine's command."""
    exec_engine([command, *(arguments or ())])
    exit_with_error(
        f"trimtab {command}: needs {ENGINE}, which is not installed; "
        f"run pip install 'trimtab[engine]=={version('trimtab')}'"
    )


def _words(path: list[str]) -> list[str]:
    """Return the completions after `path`; empty if the engine is not installed or does not know the command."""
    program = engine_program()
    for length in range(len(path), 0, -1):  # trailing words may be arguments of a command
        if program is None:
            break
        try:
            result = subprocess.run(
                [program, "completion", "words", *path[:length]],
                capture_output=True,
                text=True,
                timeout=COMPLETION_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            break
        if result.returncode == 0:
            return result.stdout.split()
    return []

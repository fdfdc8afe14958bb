"""The engine's commands under the name `trimtab`: they are handed to `trimtab-engine`, whose help and errors they have.

Operator and engine share no import, so this is by command line alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from typer._click.core import Context  # typer has a click of its own, and no other name for these two
from typer._click.shell_completion import CompletionItem
from typer.core import TyperCommand

from trimtab_operator.cli.shared import refuse

ENGINE = "trimtab-engine"
COMPLETION_SECONDS = 10.0  # who pressed TAB waits for it
PASSED_ON = {"ignore_unknown_options": True, "allow_interspersed_args": False, "help_option_names": []}
"""For click: every word behind the command is the engine's, --help too."""


class EngineCommand(TyperCommand):
    """A command whose words `trimtab-engine` knows."""

    def shell_complete(self, ctx: Context, incomplete: str) -> list[CompletionItem]:
        path = [str(self.name), *(word for word in ctx.params.get("arguments") or () if not word.startswith("-"))]
        return [CompletionItem(word) for word in _words(path) if word.startswith(incomplete)]


def serve(arguments: Annotated[list[str] | None, typer.Argument(metavar="MODEL [FLAG ...]")] = None) -> None:
    """Serve a model on this machine, with an OpenAI-compatible API."""
    _hand_over("serve", arguments)


def bench(arguments: Annotated[list[str] | None, typer.Argument(metavar="KIND [FLAG ...]")] = None) -> None:
    """Measure: latency of a batch, throughput, or a server under load."""
    _hand_over("bench", arguments)


def autotune(arguments: Annotated[list[str] | None, typer.Argument(metavar="MODEL_OR_URL [FLAG ...]")] = None) -> None:
    """Find the knobs by which an engine does most under latency limits."""
    _hand_over("autotune", arguments)


def fetch(arguments: Annotated[list[str] | None, typer.Argument(metavar="MODEL [FLAG ...]")] = None) -> None:
    """Bring a model of the hub, a bucket or a registry into the cache, before anything serves it."""
    _hand_over("fetch", arguments)


def inspect(arguments: Annotated[list[str] | None, typer.Argument(metavar="MODEL [FLAG ...]")] = None) -> None:
    """Print what a model is: layers, heads, sizes."""
    _hand_over("inspect", arguments)


def engine_program() -> str | None:
    """The path of `trimtab-engine`: beside this Python, as an environment that is not activated has it, or on PATH."""
    return shutil.which(ENGINE, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")


def _hand_over(command: str, arguments: list[str] | None) -> None:
    """Become the engine's command: its process, its exit code."""
    program = engine_program()
    if program is None:
        refuse(
            f"trimtab {command} is {ENGINE}'s, which is not installed here; "
            f"pip install 'trimtab[engine]=={version('trimtab')}'"
        )
    sys.stdout.flush()
    os.execv(program, [program, command, *(arguments or ())])  # noqa: S606 - a shell would read the words anew


def _words(path: list[str]) -> list[str]:
    """What may follow these words; none where the engine is not there or does not know the command."""
    program = engine_program()
    for length in range(len(path), 0, -1):  # the last ones may be a command's arguments
        if program is None:
            break
        try:
            told = subprocess.run(
                [program, "completion", "words", *path[:length]],
                capture_output=True,
                text=True,
                timeout=COMPLETION_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            break
        if told.returncode == 0:
            return told.stdout.split()
    return []

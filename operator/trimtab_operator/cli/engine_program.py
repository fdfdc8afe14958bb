"""The program `trimtab-engine`, which runs the engine commands of `trimtab`. Cheap to import: it starts servers."""

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

ENGINE = "trimtab-engine"
ENGINE_COMMANDS = ("serve", "bench", "autotune", "fetch", "inspect")


def engine_program() -> str | None:
    """Return the path of `trimtab-engine`, None if it is not installed.

    It is searched in the folder of this Python, even if its environment is not activated, and then on PATH.
    """
    return shutil.which(ENGINE, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")


def exec_engine(arguments: Sequence[str]) -> None:
    """Replace this process with `trimtab-engine`. Return if it is not installed."""
    program = engine_program()
    if program is not None:
        sys.stdout.flush()
        os.execv(program, [program, *arguments])  # noqa: S606 - a shell would parse the arguments again

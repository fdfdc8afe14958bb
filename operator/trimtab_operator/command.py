"""Entry points `trimtab` and `trimtab-operator`. Ctrl-C during the import prints no traceback.

Commands of the engine skip the import: it would be a sixth of the start of a server.
"""

import os
import signal
import sys
from collections.abc import Callable

from trimtab_operator.cli.completion import print_completions
from trimtab_operator.cli.engine_program import ENGINE_COMMANDS, exec_engine

EXIT_INTERRUPTED = 128 + signal.SIGINT  # exit code that shells report for Ctrl-C


def trimtab() -> None:
    """Run one command of `trimtab`, or print completions."""
    if print_completions():
        return
    if sys.argv[1:2] and sys.argv[1] in ENGINE_COMMANDS:
        exec_engine(sys.argv[1:])  # returns if the engine is not installed
    _run(_trimtab)


def operator() -> None:
    """Run one command of `trimtab-operator`."""
    _run(_operator)


def _trimtab() -> Callable[[], object]:
    from trimtab_operator.cli.trimtab_command import main

    return main


def _operator() -> Callable[[], object]:
    from trimtab_operator.cli.operator_command import main

    return main


def _run(load: Callable[[], Callable[[], object]]) -> None:
    signal.signal(signal.SIGINT, lambda *_: os._exit(EXIT_INTERRUPTED))
    try:
        main = load()
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "trimtab_operator":
            raise
        sys.exit(f"trimtab: the Python package {error.name} is not installed; pip install 'trimtab[operator]'")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main()

"""The entry points `trimtab` and `trimtab-operator`: who presses Ctrl-C while they load is shown no traceback."""

import os
import signal
from collections.abc import Callable

EXIT_INTERRUPTED = 128 + signal.SIGINT  # what a shell says of a command that Ctrl-C ended


def trimtab() -> None:
    """Run one command of `trimtab`."""
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
    main = load()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main()

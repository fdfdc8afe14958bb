"""The engine core's process, started before the command line is parsed.

Imports are the longest part of a start, and they need no configuration. So `trimtab-engine serve` starts its first core
at once, and both processes import at the same time. The core then waits for its configuration on stdin. If the command
ends without a server, end_early_core() ends the core.

This module must stay cheap to import.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trimtab_engine.config.core_environment import core_environment
from trimtab_engine.ipc.parent_death import environment_with_parent

if TYPE_CHECKING:
    import asyncio

CORE_COMMAND: tuple[str, ...] = (sys.executable, "-m", "trimtab_engine.core.process")
WITHOUT_CORE = ("-h", "--help", "--headless", "--node-rank")
"""Flags of commands that start no core, or several other processes before it."""


class EarlyCore:
    """A process that was started without an event loop, with the methods of asyncio's processes."""

    def __init__(self, process: "subprocess.Popen[bytes]", pidfd: int) -> None:
        self._process, self._pidfd = process, pidfd
        self._ended: asyncio.Event | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    def send(self, line: bytes) -> None:
        """Write its only input. A core that has ended already is reported by wait()."""
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError), self._process.stdin as stdin:
            stdin.write(line)

    async def wait(self) -> int:
        """Wait for its end and return the exit code; negative for a signal."""
        import asyncio  # here, because it takes longer to import than all of this module

        if self._ended is None:
            self._ended, loop = asyncio.Event(), asyncio.get_running_loop()
            loop.add_reader(self._pidfd, self._on_end, loop)
        await self._ended.wait()
        return self._process.wait()

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def discard(self) -> None:
        """Kill it and wait for its end. It has not been waited for before."""
        self.kill()
        self.send(b"")
        self._process.wait()
        os.close(self._pidfd)

    def _on_end(self, loop: "asyncio.AbstractEventLoop") -> None:
        assert self._ended is not None
        loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._ended.set()


_early: list[EarlyCore] = []
"""The core that was started early, until it is taken."""


def start_early_core(arguments: Sequence[str]) -> None:
    """Start the first core if these arguments of `trimtab-engine` will need one. If that fails, the launcher starts it
    later and reports the reason.
    """
    flags = {argument.partition("=")[0].replace("_", "-") for argument in arguments}
    if arguments[:1] != ["serve"] or not flags.isdisjoint(WITHOUT_CORE):
        return
    with contextlib.suppress(OSError):
        process = subprocess.Popen(
            CORE_COMMAND,
            stdin=subprocess.PIPE,
            env=environment_with_parent(core_environment()),
            start_new_session=True,  # Ctrl-C is for the first process, which ends this one in order
        )
        try:
            _early.append(EarlyCore(process, os.pidfd_open(process.pid)))
        except OSError:  # a sandbox without this system call
            process.kill()
            process.wait()


def take_early_core() -> EarlyCore | None:
    """Return the core that was started early, the first time; None if there is none. The caller ends it."""
    return _early.pop() if _early else None


def end_early_core() -> None:
    """End the core that was started early, if no server has taken it."""
    early = take_early_core()
    if early is not None:
        early.discard()

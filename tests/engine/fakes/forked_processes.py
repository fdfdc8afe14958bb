"""Ranks, cores and servers as forks of one process that has already imported the engine.

Importing torch is 90 % of the cost of a rank with a tiny model. Tests about the computation of ranks use forks: the
same programs with the same arguments, environment and input, in separate processes. Tests of process lifetimes use real
processes.

As a program, `forked_processes.py SOCKET`, it is the parent of all forks. It has one thread, listens on SOCKET, and
ends with its starter. A connection is one process: the request is answered with its pid and, at its end, its exit code;
the process is killed when the connection closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import pytest
from trimtab_engine.engine_client import started_core
from trimtab_engine.executor import workers
from trimtab_engine.ipc.parent_death import PARENT_VARIABLE

IMPORTED = (
    "trimtab_engine.api.serving.lifecycle",
    "trimtab_engine.cli.serve_command",
    "trimtab_engine.core.process",
    "trimtab_engine.executor.worker",
)
"""Modules imported in every fork."""
REQUEST_BYTES = 1 << 20
SOCKET_VARIABLE = "TRIMTAB_TESTS_FORKS"
NOT_SHARED = {"OPENBLAS_NUM_THREADS": "1"}
"""numpy's library starts threads when it is imported, and a fork of a process with threads has only one of them."""


class ForkedProcess:
    """A running program, with the part of Popen that its starters use. `command` begins with this Python."""

    def __init__(
        self,
        command: tuple[str, ...] | list[str],
        *,
        stdin: int | None = None,
        stderr: BinaryIO | None = None,
        env: Mapping[str, str] | None = None,
        start_new_session: bool = False,
    ) -> None:
        assert command[0] == sys.executable, command
        self.returncode: int | None = None
        self.stdin: BinaryIO | None = None
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.connect(os.environ[SOCKET_VARIABLE])
        request = {
            "arguments": list(command[1:]),
            "environment": dict(os.environ if env is None else env),
            "folder": str(Path.cwd()),
            "is_session": start_new_session,
        }
        if stdin == subprocess.PIPE:
            reads, writes = os.pipe()
            self.stdin = os.fdopen(writes, "wb", buffering=0)
        else:
            reads = os.open(os.devnull, os.O_RDONLY)
        streams = [reads, 1, 2 if stderr is None else stderr.fileno()]
        socket.send_fds(self._connection, [json.dumps(request).encode()], streams)
        os.close(reads)
        self.pid: int = json.loads(self._connection.recv(REQUEST_BYTES))["pid"]

    def fileno(self) -> int:
        """Readable at the process's end."""
        return self._connection.fileno()

    def poll(self) -> int | None:
        return self._look(timeout=0.0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._look(timeout)
        if code is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _look(self, timeout: float | None) -> int | None:
        """Return the exit code if known within the timeout."""
        if self.returncode is None:
            self._connection.settimeout(timeout)
            with contextlib.suppress(TimeoutError, BlockingIOError):
                body = self._connection.recv(REQUEST_BYTES)
                self.returncode = json.loads(body)["code"] if body else -signal.SIGKILL  # all forks have ended
                self._connection.close()
                if self.stdin is not None:
                    self.stdin.close()
        return self.returncode


class AwaitedProcess:
    """A forked process as asyncio has processes."""

    def __init__(self, process: ForkedProcess) -> None:
        self._process, self.pid = process, process.pid
        self.stdin = None if process.stdin is None else _Written(process.stdin)
        self._ended = asyncio.create_task(self._end())

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    async def _end(self) -> int:
        if self._process.poll() is None:
            loop, number = asyncio.get_running_loop(), self._process.fileno()
            ended = asyncio.Event()
            loop.add_reader(number, ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(number)
        return self._process.wait()


class _Written:
    """A process's input, which must fit into a pipe."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def write(self, data: bytes) -> None:
        self._stream.write(data)

    async def drain(self) -> None:
        """Nothing waits."""


def popen(command: tuple[str, ...], **options: Any) -> Any:
    """Start a process; programs replaced by a test are started normally."""
    start: Any = ForkedProcess if command[0] == sys.executable else subprocess.Popen
    return start(command, **options)


async def create_subprocess_exec(*command: str, **options: Any) -> Any:
    if command[0] != sys.executable:
        return await asyncio.create_subprocess_exec(*command, **options)
    return AwaitedProcess(ForkedProcess(command, **options))


def fork_ranks_and_cores(patch: pytest.MonkeyPatch) -> None:
    """Make this process start ranks and cores as forks."""
    processes = SimpleNamespace(Popen=popen, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired)
    patch.setattr(workers, "subprocess", processes)
    cores = SimpleNamespace(
        create_subprocess_exec=create_subprocess_exec, subprocess=asyncio.subprocess, wait_for=asyncio.wait_for
    )
    patch.setattr(started_core, "asyncio", cores)


@contextlib.contextmanager
def process_to_fork() -> Iterator[str]:
    """Run the fork parent; yield its socket name for SOCKET_VARIABLE."""
    environment = {**os.environ, **NOT_SHARED, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with tempfile.TemporaryDirectory(prefix="trimtab-forks-") as folder:
        name = f"{folder}/socket"
        with subprocess.Popen(
            [sys.executable, __file__, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        ) as process:
            assert process.stdout is not None
            assert process.stdin is not None
            assert process.stdout.readline() == b"ready\n", "it says on stderr why not"
            yield name
            process.stdin.close()


def serve(name: str) -> None:
    """Fork until stdin closes."""
    for module in IMPORTED:
        __import__(module)
    assert len(os.listdir("/proc/self/task")) == 1, "a fork has only one of the threads"
    os.environ[SOCKET_VARIABLE] = name
    fork_ranks_and_cores(pytest.MonkeyPatch())
    gc.collect()
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(name)
    listener.listen(64)
    print("ready", flush=True)
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    selector.register(listener, selectors.EVENT_READ)
    running: set[int] = set()
    while True:
        for key, _ in selector.select():
            match key.data:
                case None if key.fd == 0:
                    return
                case None:
                    running |= _begin(listener, selector)
                case (connection, pid, watched) if key.fd == watched:  # it has ended
                    _, status = os.waitpid(pid, 0)
                    running.remove(pid)
                    with contextlib.suppress(OSError):
                        connection.send(json.dumps({"code": os.waitstatus_to_exitcode(status)}).encode())
                    selector.unregister(watched)
                    os.close(watched)
                    with contextlib.suppress(KeyError):
                        selector.unregister(connection)
                    connection.close()
                case (connection, pid, _):  # who started it is gone
                    if pid in running:
                        os.kill(pid, signal.SIGKILL)
                        selector.unregister(connection)


def _begin(listener: socket.socket, selector: selectors.BaseSelector) -> set[int]:
    """Return the pid of a newly started fork, if one was requested."""
    connection, _ = listener.accept()
    body, streams, _, _ = socket.recv_fds(connection, REQUEST_BYTES, 3)
    if not body:  # who asked is gone
        connection.close()
        return set()
    pid = os.fork()
    if pid == 0:
        _be(json.loads(body), streams)
    for number in streams:
        os.close(number)
    watched = os.pidfd_open(pid)
    connection.send(json.dumps({"pid": pid}).encode())
    for end in (connection, watched):
        selector.register(end, selectors.EVENT_READ, (connection, pid, watched))
    return {pid}


def _be(request: dict[str, Any], streams: list[int]) -> None:
    """Run the requested program. Never returns."""
    code: Any = 1
    try:
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        os.closerange(3, 1024)
        if request["is_session"]:
            os.setsid()
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["environment"], **{SOCKET_VARIABLE: sys.argv[1]})
        if PARENT_VARIABLE in os.environ:
            os.environ[PARENT_VARIABLE] = str(os.getppid())
        sys.stdin = os.fdopen(0, closefd=False)
        _run(request["arguments"])
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        if isinstance(code, str):
            print(code, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def _run(arguments: list[str]) -> None:
    """Run as this Python would with these arguments."""
    if arguments[0] == "-m":
        module = arguments[1]
        sys.argv = arguments[1:]
        sys.modules.pop(module, None)
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    serve(sys.argv[1])
    os._exit(0)

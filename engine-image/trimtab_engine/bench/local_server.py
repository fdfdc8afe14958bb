"""A `trimtab-engine serve` for the duration of a measurement, on free loopback ports."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from trimtab_engine.errors import ConfigError, EngineDead
from trimtab_engine.ipc.network import ReservedPorts

START_SECONDS = 300.0
STOP_SECONDS = 10.0
POLL_SECONDS = 0.02  # of /readyz: a small part of the shortest start
SIGNAL_DELAY_SECONDS = 0.2  # for a signal to be handled
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
SERVED_NAME = "bench"
EXIT_REFUSED = 2  # of serve: invalid arguments


@dataclass(frozen=True, slots=True)
class LocalServer:
    """A ready server and its admin API."""

    url: str
    admin_url: str
    pid: int = 0

    def cpu_seconds(self) -> float:
        """Return the CPU time of all its processes so far, which other work on the machine hardly affects."""
        return sum(_cpu_seconds(pid) for pid in _tree(self.pid))

    def resident_kib(self) -> dict[str, int]:
        """Return the anonymous resident memory of its processes by name. The API server has the core and short-lived
        helpers as children.
        """
        sizes = {"API server": 0, "engine core": 0}
        for pid in _tree(self.pid):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if pid == self.pid:
                sizes["API server"] = _resident_kib(pid)
            elif b"trimtab_engine.core.process" in command:
                sizes["engine core"] += _resident_kib(pid)
        return sizes

    async def patch(self, **values: Any) -> float:
        """PATCH the live configuration. Return the duration in seconds; raise EngineDead with the reason if it is
        rejected.
        """
        started = time.perf_counter()
        async with (
            aiohttp.ClientSession() as session,
            session.patch(f"{self.admin_url}/admin/v1/config", json=values) as answer,
        ):
            if answer.status != 200:
                raise EngineDead(f"PATCH {values}: HTTP {answer.status}: {await answer.text()}")
        return time.perf_counter() - started

    async def get(self, path: str) -> Any:
        """Return a body of the admin API."""
        async with aiohttp.ClientSession() as session, session.get(f"{self.admin_url}{path}") as answer:
            return await answer.json()

    async def metrics(self) -> str:
        async with aiohttp.ClientSession() as session, session.get(f"{self.url}/metrics") as answer:
            return await answer.text()


def end_on_sigterm() -> None:
    """Handle SIGTERM like Ctrl-C, so that the server ends too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


@asynccontextmanager
async def local_server(model: str, flags: Sequence[str], log: Path | None = None) -> AsyncIterator[LocalServer]:
    """Serve `model` with these flags, as SERVED_NAME.

    Raises:
        ConfigError: The server rejects the flags.
        EngineDead: The server does not start for another reason; includes the last line of `log`.
    """
    with ReservedPorts("127.0.0.1") as ports:
        port, admin = ports.take(), ports.take()
        command = [sys.executable, "-m", "trimtab_engine.command", "serve", model, "--served-model-name", SERVED_NAME]
        command += ["--host", "127.0.0.1", "--port", str(port), "--admin-port", str(admin), *flags]
        process = _started(command, log)
        try:
            server = LocalServer(f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin}", process.pid)
            try:
                await _until_ready(server, process)
            except EngineDead as error:
                kind = ConfigError if process.poll() == EXIT_REFUSED else EngineDead
                raise kind(f"{error}{_last_log_line(log)}") from None
            yield server
        finally:
            end_at_once(process)


def end_at_once(process: "subprocess.Popen[bytes]") -> None:
    """Stop a server at once with a second signal, without waiting for running requests. Two signals sent together might
    be merged.
    """
    for seconds in (SIGNAL_DELAY_SECONDS, STOP_SECONDS):
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
    process.kill()
    process.wait()


def _started(command: Sequence[str], log: Path | None) -> "subprocess.Popen[bytes]":
    with Path(os.devnull if log is None else log).open("wb") as stderr:
        return subprocess.Popen(command, stderr=stderr)


def _last_log_line(log: Path | None) -> str:
    """Return the last line of the log, which has the reason of the exit."""
    lines = log.read_text(errors="replace").strip().splitlines() if log else []
    return f": {lines[-1]}" if lines else ""


async def _until_ready(server: LocalServer, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + START_SECONDS
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise EngineDead(f"the server exited with code {process.returncode} before it was ready")
            with suppress(aiohttp.ClientError):
                async with session.get(f"{server.url}/readyz") as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(POLL_SECONDS)
    raise EngineDead(f"the server was not ready after {START_SECONDS:.0f} s")


def _tree(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(one for child in children for one in _tree(int(child)))]


def _resident_kib(pid: int) -> int:
    """Return resident memory without file pages, which the kernel may drop."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


def _cpu_seconds(pid: int) -> float:
    """Return user and system time: fields 14 and 15 of proc(5)'s stat, counted after the name in parentheses."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND

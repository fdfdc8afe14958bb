"""A `trimtab-engine serve` of one's own for a measurement: started on free ports of the loopback, ended with it."""

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import aiohttp

from trimtab_engine.errors import EngineDead

START_SECONDS = 300.0
STOP_SECONDS = 10.0
SERVED_NAME = "bench"


@dataclass(frozen=True, slots=True)
class LocalServer:
    """A ready server and its admin API."""

    url: str
    admin_url: str

    async def patch(self, **values: Any) -> float:
        """PATCH the live configuration. Returns how many seconds it took; EngineDead with the reason if refused."""
        started = time.perf_counter()
        async with (
            aiohttp.ClientSession() as session,
            session.patch(f"{self.admin_url}/admin/v1/config", json=values) as answer,
        ):
            if answer.status != 200:
                raise EngineDead(f"PATCH {values} answers {answer.status}: {await answer.text()}")
        return time.perf_counter() - started

    async def get(self, path: str) -> Any:
        """A body of the admin API."""
        async with aiohttp.ClientSession() as session, session.get(f"{self.admin_url}{path}") as answer:
            return await answer.json()

    async def metrics(self) -> str:
        async with aiohttp.ClientSession() as session, session.get(f"{self.url}/metrics") as answer:
            return await answer.text()


@asynccontextmanager
async def local_server(model: str, flags: Sequence[str]) -> AsyncIterator[LocalServer]:
    """Serve `model` with these flags, under the name SERVED_NAME. EngineDead when it does not come up."""
    port, admin = _free_port(), _free_port()
    command = [sys.executable, "-m", "trimtab_engine.cli", "serve", model, "--served-model-name", SERVED_NAME]
    command += ["--host", "127.0.0.1", "--port", str(port), "--admin-port", str(admin), *flags]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)  # noqa: ASYNC220  # it must outlive no await
    try:
        server = LocalServer(f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin}")
        await _until_ready(server, process)
        yield server
    finally:
        process.terminate()
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
        process.kill()


async def _until_ready(server: LocalServer, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + START_SECONDS
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise EngineDead(f"the server ended with exit code {process.returncode} before it was ready")
            with suppress(aiohttp.ClientError):
                async with session.get(f"{server.url}/readyz") as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.1)
    raise EngineDead(f"the server was not ready after {START_SECONDS:.0f} s")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

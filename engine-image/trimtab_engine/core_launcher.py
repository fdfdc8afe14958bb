"""The engine core's process, seen from the one that starts it: its start, its unexpected end, its orderly end.

It owns the private folder with the sockets of all clients.
"""

import asyncio
import contextlib
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from trimtab_engine.config import EngineConfig, core_environment
from trimtab_engine.core_client import CoreClient
from trimtab_engine.errors import EngineDead
from trimtab_engine.messages import ClientAddresses, CoreFailed, CoreStart

CORE_COMMAND: tuple[str, ...] = (sys.executable, "-m", "trimtab_engine.core_process")
SHUTDOWN_SECONDS = 5.0  # for the core to leave its loop before it is killed
DEAD_GRACE_SECONDS = 0.5  # for the core's last message, which says why, to arrive after its process has ended


class CoreLauncher:
    """Starts one engine core for `num_clients` clients. Client 0 is this process's own."""

    def __init__(self, config: EngineConfig, num_clients: int = 1) -> None:
        self._config = config
        self._folder = Path(tempfile.mkdtemp(prefix="trimtab-"))  # mode 0700: nobody else can reach the sockets
        self.addresses: Sequence[ClientAddresses] = [
            ClientAddresses(f"ipc://{self._folder}/to-core-{index}", f"ipc://{self._folder}/from-core-{index}")
            for index in range(num_clients)
        ]
        self.process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None
        self._closing = False

    async def start(self, client: CoreClient) -> None:
        """Start the process; `client` learns of its unexpected end. Loading goes on in the background. Raises
        EngineDead when there can be no process."""
        start = CoreStart(msgspec.to_builtins(self._config), list(self.addresses))
        try:
            self.process = await asyncio.create_subprocess_exec(
                *CORE_COMMAND, stdin=asyncio.subprocess.PIPE, env=core_environment()
            )
        except OSError as error:
            raise EngineDead(f"the engine core's process cannot be started: {error}") from error
        assert self.process.stdin is not None
        with contextlib.suppress(ConnectionError):  # it has ended already: the watch says so
            self.process.stdin.write(msgspec.json.encode(start) + b"\n")
            await self.process.stdin.drain()
        self._watch = asyncio.create_task(self._tell_the_end(self.process, client))

    async def close(self, client: CoreClient) -> None:
        """End the process, by word if it still listens, and remove the sockets."""
        self._closing = True
        process = self.process
        if process is not None and process.returncode is None:
            if client.ready is not None and client.failure is None:
                client.shut_down_core()
            else:
                process.terminate()
            try:
                await asyncio.wait_for(process.wait(), SHUTDOWN_SECONDS)
            except TimeoutError:
                process.kill()
                await process.wait()
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        await client.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _tell_the_end(self, process: asyncio.subprocess.Process, client: CoreClient) -> None:
        """Notice that the process has ended, even when it could not say so."""
        code = await process.wait()
        if self._closing:
            return
        await asyncio.sleep(DEAD_GRACE_SECONDS)
        cause = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        client.fail(CoreFailed(f"the engine core ended unexpectedly ({cause})", exit_code=1))

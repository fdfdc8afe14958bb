"""The engine cores' processes, seen from the one that starts them: start, unexpected end, orderly end.

There is one, or one per data-parallel rank. The private folder with the sockets of all clients belongs to it.
"""

import asyncio
import contextlib
import shutil
import signal
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
    """Starts the engine cores for `num_clients` clients. Client 0 is this process's own.

    `addresses`: for each client, where it meets each core.
    """

    def __init__(self, config: EngineConfig, num_clients: int = 1) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="trimtab-"))  # mode 0700: nobody else can reach the sockets
        self._configs = core_configs(config, self._folder)
        self.addresses: Sequence[Sequence[ClientAddresses]] = [
            [self._address(client, core) for core in range(len(self._configs))] for client in range(num_clients)
        ]
        self.processes: list[asyncio.subprocess.Process] = []
        self._watches: list[asyncio.Task[None]] = []
        self._closing = False

    def _address(self, client: int, core: int) -> ClientAddresses:
        name = f"ipc://{self._folder}"
        return ClientAddresses(f"{name}/to-{core}-{client}", f"{name}/from-{core}-{client}")

    @property
    def process(self) -> asyncio.subprocess.Process | None:
        """Of the first core, once it was started."""
        return self.processes[0] if self.processes else None

    async def start(self, client: CoreClient) -> None:
        """Start the processes; `client` learns of an unexpected end. Loading goes on in the background. Raises
        EngineDead when there can be no process."""
        for core, config in enumerate(self._configs):
            start = CoreStart(msgspec.to_builtins(config), [addresses[core] for addresses in self.addresses])
            try:
                process = await asyncio.create_subprocess_exec(
                    *CORE_COMMAND, stdin=asyncio.subprocess.PIPE, env=core_environment()
                )
            except OSError as error:
                raise EngineDead(f"the engine core's process cannot be started: {error}") from error
            assert process.stdin is not None
            with contextlib.suppress(ConnectionError):  # it has ended already: the watch says so
                process.stdin.write(msgspec.json.encode(start) + b"\n")
                await process.stdin.drain()
            self.processes.append(process)
            self._watches.append(asyncio.create_task(self._tell_the_end(process, client)))

    async def close(self, client: CoreClient) -> None:
        """End the processes, by word if they still listen, and remove the sockets."""
        self._closing = True
        running = [process for process in self.processes if process.returncode is None]
        if client.ready is not None and client.failure is None:
            client.shut_down_core()
        else:
            for process in running:
                process.terminate()
        await asyncio.gather(*(_wait_or_kill(process) for process in running))
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        await client.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _tell_the_end(self, process: asyncio.subprocess.Process, client: CoreClient) -> None:
        """Notice that the process has ended, even when it could not say so."""
        code = await process.wait()
        if self._closing:
            return
        await asyncio.sleep(DEAD_GRACE_SECONDS)
        client.fail(CoreFailed(_cause_of_end(code, client), exit_code=1))


def _cause_of_end(code: int, client: CoreClient) -> str:
    """Words for an end that a core could not tell of itself. The kernel kills what exceeds the container's memory."""
    if code == -signal.SIGKILL and client.ready is None:
        return (
            f"the engine core was killed (signal 9) in stage {client.progress.stage} of loading, most likely because "
            f"the container ran out of memory: raise its memory limit, or lower --max-num-batched-tokens and "
            f"--max-num-seqs (with their caps), --max-model-len, or use --dtype bfloat16 or a smaller model"
        )
    cause = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    return f"the engine core ended unexpectedly ({cause})"


async def _wait_or_kill(process: asyncio.subprocess.Process) -> None:
    try:
        await asyncio.wait_for(process.wait(), SHUTDOWN_SECONDS)
    except TimeoutError:
        process.kill()
        await process.wait()


def core_configs(config: EngineConfig, folder: Path) -> list[EngineConfig]:
    """One per data-parallel rank. Their ranks meet in the folder when a mixture of experts spans them."""
    if config.data_parallel_size == 1:
        return [config]
    return [
        msgspec.structs.replace(config, data_parallel_rank=rank, data_parallel_folder=str(folder))
        for rank in range(config.data_parallel_size)
    ]

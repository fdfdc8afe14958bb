"""The engine cores' processes, seen from the first process: start, unexpected end, orderly end.

There is one, or one per data-parallel rank, on this node or in equal shares on several (nodes/). The private folder
with the sockets of all clients belongs to it; clients and cores of different nodes meet on ports of this node's address
towards --master-addr.
"""

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.engine_client.client import CoreClient
from trimtab_engine.engine_client.early_core import EarlyCore
from trimtab_engine.engine_client.nodes.hub import Hub
from trimtab_engine.engine_client.nodes.messages import CoreEnded
from trimtab_engine.engine_client.started_core import DEAD_GRACE_SECONDS, StartedCore, cause_of_end
from trimtab_engine.ipc.network import ReservedPorts, in_url, own_address
from trimtab_engine.ipc.private_folder import PrivateFolder
from trimtab_engine.messages.lifecycle import ClientAddresses, CoreFailed, CoreStart


class CoreLauncher:
    """Starts the engine cores for `num_clients` clients. Client 0 is this process's own.

    `addresses`: for each client, where it meets each core. Raises ConfigError when other nodes cannot reach this one.
    """

    def __init__(self, config: EngineConfig, num_clients: int = 1) -> None:
        self._config = config
        self._private = PrivateFolder()
        self._folder = self._private.path
        self._ports: ReservedPorts | None = None
        if config.data_parallel_size > config.num_local_cores:
            self._ports = ReservedPorts(own_address(config.master_addr, config.master_port))
        self._configs = core_configs(config, self._rendezvous())
        self.addresses: Sequence[Sequence[ClientAddresses]] = [
            [self._address(client, core) for core in range(len(self._configs))] for client in range(num_clients)
        ]
        self._cores: dict[int, StartedCore] = {}
        """The cores of this node, by data-parallel rank."""
        self._watches: dict[int, asyncio.Task[None]] = {}
        self._hub: Hub | None = None
        self._closing = False

    def _rendezvous(self) -> str:
        """Return the rendezvous of the ranks of an MoE model that spans the cores."""
        if self._ports is None:
            return f"file:{self._folder}/store"
        return f"tcp:{self._ports.address}:{self._ports.take()}"

    def _address(self, client: int, core: int) -> ClientAddresses:
        if self._ports is not None and core >= self._config.num_local_cores:
            name = f"tcp://{in_url(self._ports.address)}"
            return ClientAddresses(f"{name}:{self._ports.take()}", f"{name}:{self._ports.take()}")
        name = f"ipc://{self._folder}"
        return ClientAddresses(f"{name}/to-{core}-{client}", f"{name}/from-{core}-{client}")

    @property
    def processes(self) -> list[asyncio.subprocess.Process | EarlyCore]:
        """The processes of this node's cores, once they were started."""
        return [core.process for core in self._cores.values()]

    @property
    def process(self) -> asyncio.subprocess.Process | EarlyCore | None:
        """The first core's process. None before it was started."""
        return self.processes[0] if self._cores else None

    async def start(self, client: CoreClient, on_stop: Callable[[], None] = lambda: None) -> None:
        """Start this node's cores, and let other nodes join and start theirs. Loading continues in the background.
        `client` is notified of an unexpected end; `on_stop` is called when another node receives a stop request.

        Raises:
            EngineDead: If a process cannot be started.
            ConfigError: If the port for other nodes is not available.
        """
        if self._ports is not None:
            self._hub = Hub(
                self._config,
                self._ports.address,
                self._cores_of_node,
                on_failure=client.fail,
                on_core_end=lambda host, end: client.fail(self._failure(client, end.core, host, end)),
                on_stop=on_stop,
            )
            await self._hub.open()
        for index in range(self._config.num_local_cores):
            await self.start_core(index, client)

    async def start_core(self, index: int, client: CoreClient, *, joins: bool = False) -> None:
        """Start one of this node's cores. `joins`: True if others already serve.

        Raises:
            EngineDead: If the process cannot be started.
        """
        start = self._core_start(index)
        start.joins = joins
        core = self._cores[index] = await StartedCore.start(index, start)
        self._watches[index] = asyncio.create_task(self._report_end(core, client))

    async def wait_for_end(self, index: int) -> None:
        """Return when the core's process has ended and the client knows it."""
        await self._watches[index]

    async def end_core(self, index: int) -> None:
        """End a core that does not serve."""
        core = self._cores.get(index)
        if core is not None:
            if core.process.returncode is None:
                core.process.terminate()
            await core.end()
            await self._watches[index]

    def _cores_of_node(self, node_rank: int) -> tuple[int, list[CoreStart]]:
        count = self._config.num_local_cores
        first = node_rank * count
        return first, [self._core_start(core) for core in range(first, first + count)]

    def _core_start(self, core: int) -> CoreStart:
        config = self._configs[core]
        addresses = [addresses[core] for addresses in self.addresses]
        return CoreStart(msgspec.to_builtins(config), addresses, media_cache_bytes=config.media_cache_bytes)

    async def close(self, client: CoreClient) -> None:
        """End the cores, by word if they still listen, and remove the sockets."""
        self._closing = True
        running = [core for core in self._cores.values() if core.process.returncode is None]
        if client.ready is not None and client.failure is None:
            client.shut_down_core()
        else:
            for core in running:
                core.process.terminate()
        cause = None if client.failure is None else client.failure.message
        nodes = [] if self._hub is None else [self._hub.close(cause)]
        await asyncio.gather(*(core.end() for core in running), *nodes)
        for watch in self._watches.values():
            watch.cancel()
        await asyncio.gather(*self._watches.values(), return_exceptions=True)
        await client.close()
        if self._ports is not None:
            self._ports.release()
        self._private.remove()

    async def _report_end(self, core: StartedCore, client: CoreClient) -> None:
        """Report the end of the process, even if it could not report it itself."""
        code = await core.process.wait()
        if self._closing:
            return
        await asyncio.sleep(DEAD_GRACE_SECONDS)
        if code == 0 and client.core_registry[core.index] == "retiring":
            client.core_ended(core.index, None)
            return
        end = CoreEnded(core.index, core.process.pid, code)
        client.core_ended(core.index, self._failure(client, core.index, "this node", end))

    def _failure(self, client: CoreClient, core: int, host: str, end: CoreEnded) -> CoreFailed:
        name = "the engine core"
        if len(self._configs) > 1:
            name = f"engine core {core} ({host}, pid {end.pid})"
        loads = client.core_registry[core] in ("loading", "joining")
        stage = client.progress_of(core).stage if loads else None
        return CoreFailed(cause_of_end(name, end.code, stage), exit_code=1)


def core_configs(config: EngineConfig, rendezvous: str) -> list[EngineConfig]:
    """Return one configuration per data-parallel rank. `rendezvous` is used by MoE models that span the cores."""
    if config.max_cores == 1:
        return [config]
    return [
        msgspec.structs.replace(config, data_parallel_rank=rank, data_parallel_rendezvous=rendezvous)
        for rank in range(config.max_cores)
    ]

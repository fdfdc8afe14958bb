"""Several API server processes, managed by the first process (--api-server-count N).

All accept from one inherited listening socket: a port in use is detected as with one server, a connection waits in one
queue until some server is free, and none is lost if a server exits. (SO_REUSEPORT has a queue per process, chosen by a
hash: connections wait for a busy server while another is idle, and a second engine could share the port unnoticed.)

If one server exits, the engine fails, so that the pod restarts as a whole.
"""

import asyncio
import contextlib
import socket
import sys
from collections.abc import Sequence

from trimtab_engine.api.metrics.exporter import EngineExporter
from trimtab_engine.api.metrics.observations import Observations
from trimtab_engine.api.openai.state import ServerOptions
from trimtab_engine.api.serving.server_messages import (
    AbortAll,
    BecomeNotReady,
    Drain,
    DropMediaCache,
    End,
    Failed,
    Flush,
    Flushed,
    FromServer,
    LoadFailed,
    Query,
    QueryResult,
    Serve,
    ServerLoaded,
    Start,
    ToServer,
)
from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.engine_client.client import CoreClient
from trimtab_engine.errors import ConfigError, EngineDead
from trimtab_engine.ipc.stream import StreamLink
from trimtab_engine.messages.lifecycle import ClientAddresses, CoreFailed

SERVER_COMMAND: tuple[str, ...] = (sys.executable, "-m", "trimtab_engine.api.serving.server_process")
FLUSH_SECONDS = 0.5  # timeout of a scrape for a server that is too busy to send its observations
KILL_SECONDS = 0.5  # after the closing time, before a hanging server is killed


class ServerPool:
    """N servers. An unexpected exit of one fails the engine, like a failure of the core. `core` is this process'
    connection to the core, which receives the statistics.
    """

    def __init__(
        self,
        config: EngineConfig,
        options: ServerOptions,
        exporter: EngineExporter,
        bound: socket.socket,
        addresses: Sequence[Sequence[ClientAddresses]],
        core: CoreClient,
    ) -> None:
        self._config, self._options, self._exporter, self._bound = config, options, exporter, bound
        self._addresses, self._core = addresses, core
        self._servers: list[_Server] = []
        self._closing = False
        self._last_flush = 0
        self.idle = asyncio.Event()
        self.idle.set()

    @property
    def num_http_requests(self) -> int:
        return sum(server.num_http_requests for server in self._servers)

    @property
    def num_arrivals(self) -> int:
        return sum(server.num_arrivals for server in self._servers)

    async def start(self) -> None:
        for index, addresses in enumerate(self._addresses, 1):
            start = Start(
                index, list(addresses), len(self._addresses), self._bound.fileno(), self._config, self._options
            )
            self._servers.append(await _Server.start(start, self))

    async def load(self) -> None:
        """Wait until every server has loaded, then let all accept requests at once."""
        for server in self._servers:
            await server.loaded
        self._broadcast(Serve())

    def drop_media_cache(self) -> None:
        self._broadcast(DropMediaCache())

    def become_not_ready(self) -> None:
        self._broadcast(BecomeNotReady())

    def begin_drain(self) -> None:
        self._broadcast(Drain())

    async def settle(self) -> None:
        """Wait until every server has sent its observations and the statistics of all steps that it has seen are here,
        for up to FLUSH_SECONDS.
        """
        self._last_flush += 1
        known = await asyncio.gather(*(server.flush(self._last_flush) for server in self._servers))
        newest = [max(steps) for steps in zip(*(steps for steps in known if steps), strict=True)]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._core.heard_of(newest), FLUSH_SECONDS)

    def abort_all(self) -> None:
        self._broadcast(AbortAll())

    def fail(self, failure: CoreFailed) -> None:
        self._broadcast(Failed(failure))

    async def close(self, seconds: int) -> None:
        self._closing = True
        self._broadcast(End(seconds))
        await asyncio.gather(*(server.close(seconds + KILL_SECONDS) for server in self._servers))

    # --- messages of the servers
    # ------------------------------------------------------------------------------------------

    def on_message(self, server: "_Server", message: FromServer) -> None:
        match message:
            case Observations():
                server.num_http_requests = message.num_http_requests
                server.num_arrivals = message.num_arrivals
                self._exporter.add(message)
                if self.num_http_requests:
                    self.idle.clear()
                else:
                    self.idle.set()
            case ServerLoaded():
                if not server.loaded.done():
                    server.loaded.set_result(None)
            case LoadFailed(text):
                if not server.loaded.done():
                    server.loaded.set_exception(ConfigError(text))
            case Flushed(flush_id, steps):
                server.flushed(flush_id, steps)
            case Query():
                server.pending_answers.add(task := asyncio.create_task(self._answer(server, message)))
                task.add_done_callback(server.pending_answers.discard)

    def on_end(self, server: "_Server", code: int) -> None:
        """Handle the exit of a server process."""
        if self._closing:
            return
        cause = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        self._core.fail(CoreFailed(f"API server {server.index} ended unexpectedly ({cause}); shutting down", 1))

    async def _answer(self, server: "_Server", ask: Query) -> None:
        await self.settle()
        body = self._exporter.text() if ask.what == "metrics" else str(self.num_http_requests).encode()
        server.link.send(QueryResult(ask.query_id, body))

    def _broadcast(self, message: ToServer) -> None:
        for server in self._servers:
            server.link.send(message)


class _Server:
    """One server's process and link."""

    def __init__(self, index: int, process: asyncio.subprocess.Process, link: StreamLink[FromServer]) -> None:
        self.index, self.process, self.link = index, process, link
        self.num_http_requests = self.num_arrivals = 0
        self.loaded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.pending_answers: set[asyncio.Task[None]] = set()
        self._flushes: dict[int, asyncio.Future[list[int]]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def start(cls, start: Start, owner: ServerPool) -> "_Server":
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            process = await asyncio.create_subprocess_exec(
                *SERVER_COMMAND,
                str(theirs.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), start.listen_fd),
                start_new_session=True,  # Ctrl-C is handled by the first process, which shuts this one down
            )
        except OSError as error:
            ours.close()
            raise EngineDead(f"API server {start.client_index} cannot start: {error}") from error
        finally:
            theirs.close()
        link: StreamLink[FromServer] = await StreamLink.over(ours, FromServer)
        link.send(start)
        server = cls(start.client_index, process, link)
        server._tasks = [asyncio.create_task(server._read(owner)), asyncio.create_task(server._watch(owner))]
        return server

    async def flush(self, flush_id: int) -> list[int]:
        """Return the newest step of each core that the server has seen, after it has sent all observations; an empty
        list on timeout (FLUSH_SECONDS).
        """
        future = self._flushes[flush_id] = asyncio.get_running_loop().create_future()
        self.link.send(Flush(flush_id))
        try:
            return await asyncio.wait_for(future, FLUSH_SECONDS)
        except TimeoutError:
            return []
        finally:
            del self._flushes[flush_id]

    def flushed(self, flush_id: int, steps: list[int]) -> None:
        future = self._flushes.get(flush_id)
        if future is not None and not future.done():
            future.set_result(steps)

    async def close(self, seconds: float) -> None:
        """Wait for the process to exit; kill it after `seconds`."""
        try:
            await asyncio.wait_for(self.process.wait(), seconds)
        except TimeoutError:
            self.process.kill()
            await self.process.wait()
        for task in (*self._tasks, *self.pending_answers):
            task.cancel()
        await asyncio.gather(*self._tasks, *self.pending_answers, return_exceptions=True)
        if self.loaded.done():
            self.loaded.exception()  # retrieved to avoid asyncio's warning
        self.link.close()

    async def _read(self, owner: ServerPool) -> None:
        while (message := await self.link.receive()) is not None:
            owner.on_message(self, message)

    async def _watch(self, owner: ServerPool) -> None:
        owner.on_end(self, await self.process.wait())

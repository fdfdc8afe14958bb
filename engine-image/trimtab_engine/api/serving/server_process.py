"""One of several API servers: HTTP on an inherited listening socket.

Started as `-m trimtab_engine.api.serving.server_process LINK_FD`.

It has its own event loop, tokenizer and connection to the engine core. Engine-wide state (metrics, readiness, draining,
shutdown) comes from the first process over the link; it exits when that process does.
"""

import asyncio
import logging
import signal
import socket
import sys

from trimtab_engine.api.http.server import HttpServer, loop_factory, share_global_lock
from trimtab_engine.api.metrics.observations import ObservationBuffer
from trimtab_engine.api.metrics.tracing import tracer_of
from trimtab_engine.api.openai.loading import load_serving
from trimtab_engine.api.openai.state import ServerState, Serving
from trimtab_engine.api.serving.app import build_app, connection_limits
from trimtab_engine.api.serving.server_messages import (
    AbortAll,
    BecomeNotReady,
    Drain,
    DropMediaCache,
    End,
    Failed,
    Flush,
    Flushed,
    LoadFailed,
    Query,
    QueryResult,
    Serve,
    ServerLoaded,
    Start,
    ToServer,
)
from trimtab_engine.config.engine import set_log_level
from trimtab_engine.engine_client.client import CoreClient
from trimtab_engine.errors import ConfigError, EngineDead
from trimtab_engine.ipc.malloc import set_up_for_requests
from trimtab_engine.ipc.parent_death import exit_with_parent
from trimtab_engine.ipc.process_exit import exit_process
from trimtab_engine.ipc.shared_secret import SharedSecret
from trimtab_engine.ipc.stream import StreamLink

BATCH_SECONDS = 0.1  # interval of sending observations; a scrape fetches newer ones
EXIT_LINK_LOST = 1

logger = logging.getLogger("trimtab_engine.api")


class LinkExporter:
    """Exporter that asks the first process over the link."""

    def __init__(self, link: StreamLink[ToServer]) -> None:
        self._link = link
        self._pending_queries: dict[int, asyncio.Future[bytes]] = {}
        self._last_id = 0

    async def exposition(self) -> bytes:
        return await self._query("metrics")

    async def server_load(self, own: int) -> int:
        return int(await self._query("load"))

    def answered(self, answer: QueryResult) -> None:
        future = self._pending_queries.pop(answer.query_id, None)
        if future is not None and not future.done():
            future.set_result(answer.body)

    def fail(self) -> None:
        """Fail all pending requests."""
        for future in self._pending_queries.values():
            if not future.done():
                future.set_exception(EngineDead("the first process has ended"))

    async def _query(self, what: str) -> bytes:
        self._last_id += 1
        query_id = self._last_id
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._pending_queries[query_id] = future
        self._link.send(Query(query_id, what))
        try:
            return await future
        finally:
            self._pending_queries.pop(query_id, None)


class ServerProcess:
    """The server process, controlled by messages of the first process."""

    def __init__(self, start: Start, link: StreamLink[ToServer]) -> None:
        self._start, self._link = start, link
        self._core = CoreClient(
            start.addresses,
            client_index=start.client_index,
            num_clients=start.num_clients,
            num_initial=start.config.data_parallel_size,
            first_rank=start.config.data_parallel_first_rank,
            silence_timeout=start.options.core_silence_timeout,
            secret=SharedSecret.read(start.config.rendezvous_secret_file),
            media_cache_bytes=start.config.media_cache_bytes,
            on_state=lambda state: set_log_level(state.log_level),
        )
        self._exporter = LinkExporter(link)
        self._observations = ObservationBuffer()
        self._state = ServerState(start.options, self._core, self._exporter)
        self._http = HttpServer(
            build_app(self._state), socket.socket(fileno=start.listen_fd), connection_limits(self._state)
        )
        self._tracer = tracer_of(start.options.otlp_traces_endpoint, start.options.served_model_names[0])
        self._reported_counts = (0, 0)
        self._serving: Serving | None = None

    async def run(self) -> int:
        self._core.open()
        self._http.start()
        tasks = [asyncio.create_task(self._load()), asyncio.create_task(self._send_observations())]
        try:
            return await self._run_commands()
        finally:
            self._exporter.fail()
            if self._tracer is not None:
                self._tracer.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._serving is not None:
                await self._serving.close()
            await self._core.close()

    async def _load(self) -> None:
        """Read the tokenizer while the core reads the weights."""
        try:
            self._serving = await load_serving(
                self._start.config, self._start.options, self._core, lambda: self._observations, self._tracer
            )
        except ConfigError as error:
            self._link.send(LoadFailed(str(error)))
            return
        if self._serving is not None:
            self._link.send(ServerLoaded())

    async def _run_commands(self) -> int:
        """Follow the first process' messages until End or its exit. Return the exit code."""
        while True:
            message = await self._link.receive()
            match message:
                case None:
                    logger.error("the first process has exited; exiting")
                    await self._http.close(0)
                    return EXIT_LINK_LOST
                case End(seconds):
                    await self._http.close(seconds)
                    self._flush()
                    return 0
                case Serve():
                    self._state.serving = self._serving
                case BecomeNotReady():
                    self._state.terminating = True
                case Drain():
                    self._state.begin_drain()
                case DropMediaCache():
                    self._state.drop_media_cache()
                case AbortAll():
                    self._core.abort_all()
                case Failed(failure):
                    self._core.fail(failure)
                case Flush(flush_id):
                    self._flush()
                    self._link.send(Flushed(flush_id, self._core.last_steps))
                case QueryResult():
                    self._exporter.answered(message)
                case Start():
                    raise AssertionError("Start is sent only once")

    async def _send_observations(self) -> None:
        while True:
            await asyncio.sleep(BATCH_SECONDS)
            self._flush()

    def _flush(self) -> None:
        batch = self._observations.take(self._state.num_http_requests, self._state.num_arrivals)
        counts = (batch.num_http_requests, batch.num_arrivals)
        if not batch.is_empty or counts != self._reported_counts:
            self._reported_counts = counts
            self._link.send(batch)


def main() -> int:
    """Read Start from the link, whose file descriptor is the argument, then serve. Return the exit code."""
    exit_with_parent()
    set_up_for_requests()
    share_global_lock()
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches the whole process group; the first process controls the shutdown
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(asctime)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_run(int(sys.argv[1])))


async def _run(link_fd: int) -> int:
    link: StreamLink[ToServer] = await StreamLink.over(socket.socket(fileno=link_fd), ToServer)
    start = await link.receive()
    if not isinstance(start, Start):
        return EXIT_LINK_LOST
    return await ServerProcess(start, link).run()


if __name__ == "__main__":
    exit_process(main())

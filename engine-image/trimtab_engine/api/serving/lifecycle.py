"""Engine lifecycle: bind, start the core and the API servers, serve, terminate, drain, exit. Returns an exit code.

A single API server runs in this process; with several, this process only has the admin API, the statistics and the
supervision of the servers (docs/guides/api-server-scale-out.md).
"""

import asyncio
import logging
import signal
import socket
import sys
from dataclasses import dataclass
from typing import Any

from trimtab_router.protocol import messages, prefix_keys

from trimtab_engine.api.admin.routes import MAX_ADMIN_BODY_BYTES, build_admin_app
from trimtab_engine.api.http.connections import ConnectionLimits
from trimtab_engine.api.http.server import CLOSE_SECONDS, HttpServer, bind, loop_factory, share_global_lock
from trimtab_engine.api.metrics.exporter import EngineExporter
from trimtab_engine.api.openai.state import ServerOptions, ServerState
from trimtab_engine.api.serving.frontend import ServerFrontend
from trimtab_engine.api.serving.server_pool import ServerPool
from trimtab_engine.api.serving.single_server import SingleServer
from trimtab_engine.config.engine import EngineConfig, set_log_level
from trimtab_engine.engine_client.client import CoreClient
from trimtab_engine.engine_client.launcher import CoreLauncher
from trimtab_engine.engine_client.scaling import CoreScaling
from trimtab_engine.engine_client.start_clock import StartClock, format_stages
from trimtab_engine.ipc.malloc import set_up_for_requests
from trimtab_engine.ipc.network import in_url
from trimtab_engine.ipc.open_files import raise_open_file_limit
from trimtab_engine.ipc.process_exit import EXIT_INTERRUPTED
from trimtab_engine.ipc.shared_secret import SharedSecret
from trimtab_engine.messages.admin import EngineState
from trimtab_engine.state_stream.hub import StateHub

QUIET_SECONDS = 1.0  # without requests: clients have stopped sending to this engine
ARRIVAL_POLL_SECONDS = 0.1  # poll interval of arrivals; each poll accepts waiting connections
MAX_TERMINATING_SHARE = 0.5  # maximum share of the shutdown timeout; the rest is for the last requests
MAX_TERMINATING_SECONDS = (
    15.0  # clients that continue longer address this engine directly and would keep it alive forever
)
MAX_ADMIN_CONNECTIONS = 64
SPARE_FILES = 256  # descriptors besides one per sequence: probes, metrics, waiting requests, other processes
ABORT_GRACE_SECONDS = 2.0  # for the last bytes of aborted requests
FAILURE_RESPONSE_SECONDS = 1.0  # after a failure: pending requests get their error, new ones 503
FAILURE_CLOSE_SECONDS = 1  # until connections close; with the core's grace period the exit takes less than 5 s

logger = logging.getLogger("trimtab_engine.api")


@dataclass(frozen=True, slots=True)
class Listen:
    """Listen addresses. `admin_port` is None without an admin API."""

    host: str
    port: int
    admin_host: str
    admin_port: int | None


def run_server(config: EngineConfig, options: ServerOptions, listen: Listen, shutdown_timeout: float) -> int:
    """Serve until a signal, or until the core or an API server fails.

    Raises:
        ConfigError: A port cannot be bound.
    """
    set_up_for_requests()
    share_global_lock()
    open_files = raise_open_file_limit()
    if open_files < config.max_num_seqs_cap + SPARE_FILES:
        logger.warning(
            "%d files may be open, but %d requests may run at once, each with a connection; raise the hard limit "
            "(ulimit -Hn) to %d or more",
            open_files,
            config.max_num_seqs_cap,
            config.max_num_seqs_cap + SPARE_FILES,
        )
    sockets = [bind(listen.host, listen.port, "--port")]
    if listen.admin_port is not None:
        sockets.append(bind(listen.admin_host, listen.admin_port, "--admin-port"))
    for name, bound in zip(("API", "admin API"), sockets, strict=False):  # with port 0 the kernel has chosen one
        logger.info("the %s listens on %s port %d", name, *bound.getsockname()[:2])
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_EngineServer(config, options, sockets, shutdown_timeout).run())


def _url_of(bound: socket.socket) -> str:
    """Return the URL of the API for clients on this machine."""
    host, port = bound.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"
    return f"http://{in_url(host)}:{port}/v1"


class _EngineServer:
    def __init__(
        self, config: EngineConfig, options: ServerOptions, sockets: list[socket.socket], shutdown_timeout: float
    ) -> None:
        self._options, self._shutdown_timeout = options, shutdown_timeout
        self._url = _url_of(sockets[0])
        count = options.api_server_count
        downloaded = options.downloaded
        self._clock = StartClock(download_seconds=0.0 if downloaded is None else downloaded.seconds)
        self._hub = StateHub(self._hello, lambda enabled: self._core.report_state(enabled=enabled))
        self._launcher = CoreLauncher(config, num_clients=1 if count == 1 else 1 + count)
        self._exporter = EngineExporter(
            options.served_model_names[0],
            options.custom_histogram_buckets,
            config.data_parallel_first_rank,
            config.device,
        )
        self._core = CoreClient(
            self._launcher.addresses[0],
            num_initial=config.data_parallel_size,
            first_rank=config.data_parallel_first_rank,
            silence_timeout=options.core_silence_timeout,
            secret=SharedSecret.read(config.rendezvous_secret_file),
            media_cache_bytes=config.media_cache_bytes,
            on_ready=self._exporter.begin,
            on_stage=self._clock.enter,
            on_step=self._exporter.on_step,
            on_state=self._on_state,
            on_gone=self._on_gone,
            on_report=self._hub.receive,
        )
        self._exporter.silences = self._core.silent_seconds
        self._exporter.start_clock = self._clock
        self._scaling = CoreScaling(self._core, self._launcher, config)
        self._state = ServerState(options, self._core, self._exporter)
        self._servers: ServerFrontend
        if count == 1:
            self._servers = SingleServer(config, self._state, self._exporter, sockets[0])
        else:
            others = self._launcher.addresses[1:]
            self._servers = ServerPool(config, options, self._exporter, sockets[0], others, self._core)
        self._state.on_drain = self._begin_drain
        self._state.on_drop_media_cache = self._servers.drop_media_cache
        self._admin = (
            HttpServer(
                build_admin_app(self._state, self._scaling.call, self._exporter.requests, self._hub),
                sockets[1],
                ConnectionLimits(MAX_ADMIN_CONNECTIONS, lambda: MAX_ADMIN_CONNECTIONS * MAX_ADMIN_BODY_BYTES),
            )
            if len(sockets) > 1
            else None
        )
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._was_told = False
        """Set by a separate signal: the end of another node is not a signal of this one, and its first signal comes
        later."""
        self._was_interrupted = False

    async def run(self) -> int:
        self._catch_signals()
        self._core.open()
        if self._admin is not None:
            self._admin.start()
        background: list[asyncio.Task[None]] = []
        try:
            await self._servers.start()
            await self._launcher.start(self._core, on_stop=self._stop.set)
            load = asyncio.create_task(self._load())
            statistics = asyncio.create_task(self._exporter.log_statistics())
            background = [load, statistics]
            return await self._wait_for_end(load, statistics)
        finally:
            for task in background:
                task.cancel()
            self._hub.close()
            seconds = CLOSE_SECONDS if self._core.is_alive else FAILURE_CLOSE_SECONDS
            admin = [self._admin.close(seconds)] if self._admin is not None else []
            await asyncio.gather(*background, *admin, self._servers.close(seconds), return_exceptions=True)
            await self._scaling.close()
            await self._launcher.close(self._core)

    def _on_state(self, state: EngineState) -> None:
        set_log_level(state.log_level)
        self._exporter.on_state(state)
        self._hub.rest(state.pause_mode, state.sleep_level)

    def _on_gone(self, rank: int) -> None:
        self._exporter.core_gone(rank)
        self._hub.remove_core(rank)

    def _begin_drain(self) -> None:
        self._hub.drain()
        self._servers.begin_drain()

    def _hello(self, epoch: str) -> messages.Hello | None:
        """Return the engine's description for routers, or None while it loads."""
        ready = self._core.ready
        if ready is None:
            return None
        return messages.Hello(
            messages.VERSION,
            epoch,
            self._core.ranks,
            ready.block_size,
            messages.KeyRule(
                prefix_keys.KEY_RULE,
                prefix_keys.CUT_BYTES,
                list(self._options.served_model_names),
                separates_api_keys=len(self._options.api_keys) > 1,
            ),
        )

    async def _load(self) -> None:
        """Load the servers. Raises ConfigError if a tokenizer cannot be read."""
        await self._servers.load()
        if self._core.ready is not None and self._core.is_alive:
            self._clock.finish()
            logger.info("start: %s", format_stages(self._clock.seconds))
            logger.info("ready: serving %s at %s", ", ".join(self._options.served_model_names), self._url)

    async def _wait_for_end(self, load: "asyncio.Task[None]", statistics: "asyncio.Task[None]") -> int:
        """Wait for the first of a signal, a failed load, or the end of the core."""
        stop = asyncio.create_task(self._stop.wait())
        ended = asyncio.create_task(self._core.ended.wait())
        waiting: set[asyncio.Task[Any]] = {stop, ended, load}
        try:
            while True:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if load in done and (error := load.exception()) is not None:
                    raise error
                if ended in done:
                    statistics.cancel()  # the cause must be the last log line
                    return await self._after_failure()
                if stop in done:
                    deadline = asyncio.get_running_loop().time() + self._shutdown_timeout
                    if load.done() and not self._was_interrupted:
                        await self._serve_until_traffic_stops()
                    await self._drain(deadline)
                    return EXIT_INTERRUPTED if self._was_interrupted else 0
        finally:
            for task in (stop, ended):
                task.cancel()

    async def _after_failure(self) -> int:
        failure = self._core.failure
        assert failure is not None
        self._servers.fail(failure)
        print(f"trimtab-engine: {' '.join(failure.message.split())}", file=sys.stderr, flush=True)
        await asyncio.sleep(FAILURE_RESPONSE_SECONDS)
        return failure.exit_code or 1

    async def _serve_until_traffic_stops(self) -> None:
        """Become not ready, but serve requests that still arrive: load balancers learn of the shutdown later than the
        engine. Ends after QUIET_SECONDS without arrivals; a draining engine already rejects requests.

        Counts polls instead of seconds: on a busy node connections wait until they are accepted.
        """
        self._hub.drain(self._shutdown_timeout)
        self._servers.become_not_ready()
        quiet_looks, arrivals = 0, self._servers.num_arrivals
        for _ in range(round(self._max_terminating_seconds / ARRIVAL_POLL_SECONDS)):
            if await self._wait_for_any(ARRIVAL_POLL_SECONDS, self._hurry, self._core.ended) or self._state.draining:
                return
            come = self._servers.num_arrivals
            quiet_looks, arrivals = quiet_looks + 1 if come == arrivals else 0, come
            if quiet_looks * ARRIVAL_POLL_SECONDS >= QUIET_SECONDS:
                return

    @property
    def _max_terminating_seconds(self) -> float:
        return min(MAX_TERMINATING_SECONDS, MAX_TERMINATING_SHARE * self._shutdown_timeout)

    async def _drain(self, deadline: float) -> None:
        """Reject new requests, let running ones finish, and abort the rest at the deadline or at a second signal."""
        servers = self._servers
        self._state.begin_drain()
        await servers.settle()
        if servers.num_http_requests:
            seconds = max(0.0, deadline - asyncio.get_running_loop().time())
            logger.info(
                "draining: %d running requests, timeout %.0f s; another signal ends them now",
                servers.num_http_requests,
                seconds,
            )
            await self._wait_until_idle(seconds, self._hurry, self._core.ended)
        if servers.num_http_requests and self._core.is_alive:
            cause = "at the second signal" if self._hurry.is_set() else "after the drain timeout"
            logger.warning("aborting %d requests %s", servers.num_http_requests, cause)
            servers.abort_all()
            await self._wait_until_idle(ABORT_GRACE_SECONDS)

    async def _wait_until_idle(self, timeout: float, *or_else: asyncio.Event) -> None:
        """Wait until no generation request is in progress, another event is set, or the timeout expires."""
        await self._wait_for_any(timeout, self._servers.idle, *or_else)

    async def _wait_for_any(self, timeout: float, *events: asyncio.Event) -> bool:
        """Wait for the first of these events, at most `timeout` seconds. Return False on timeout."""
        waits = [asyncio.create_task(event.wait()) for event in events]
        done, _ = await asyncio.wait(waits, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        return bool(done)

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: signal.Signals) -> None:
        """Handle a signal. SIGTERM is a regular shutdown with code 0; Ctrl-C shuts down too, with the shell's code."""
        self._was_interrupted |= number == signal.SIGINT
        if self._was_told:
            self._hurry.set()
        self._was_told = True
        self._stop.set()

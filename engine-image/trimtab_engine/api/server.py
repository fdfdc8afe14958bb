"""The life of the server process: bind, start the core, load the tokenizer, serve, drain, end. Returns an exit code."""

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import uvicorn
from fastapi import FastAPI

from trimtab_engine.api.admin import build_admin_app
from trimtab_engine.api.app import build_app
from trimtab_engine.api.generation import Generator
from trimtab_engine.api.http_protocol import BoundedHeadProtocol
from trimtab_engine.api.metrics import EngineMetrics, Interval, statistics_line
from trimtab_engine.api.state import ServerOptions, ServerState, Serving
from trimtab_engine.config import EngineConfig
from trimtab_engine.core_client import CoreClient
from trimtab_engine.errors import ConfigError, EngineDead
from trimtab_engine.messages import StepStats
from trimtab_engine.tokenizer import Tokenizer

STATS_SECONDS = 10.0
CLOSE_SECONDS = 3  # for connections to close after the drain
ABORT_GRACE_SECONDS = 2.0  # for aborted requests' last bytes to leave
DEAD_ANSWER_SECONDS = 1.0  # for in-flight requests to get their 500 before the process ends
BACKLOG = 2048

logger = logging.getLogger("trimtab_engine.api")


@dataclass(frozen=True, slots=True)
class Listen:
    """Where to listen. `admin_port` None: no admin API."""

    host: str
    port: int
    admin_host: str
    admin_port: int | None


def run_server(config: EngineConfig, options: ServerOptions, listen: Listen, shutdown_timeout: float) -> int:
    """Serve until told to end or until the core fails. Raises ConfigError when a port cannot be bound."""
    sockets = [_bind(listen.host, listen.port, "--port")]
    if listen.admin_port is not None:
        sockets.append(_bind(listen.admin_host, listen.admin_port, "--admin-port"))
    for name, bound in zip(("API", "admin API"), sockets, strict=False):  # port 0: the kernel has chosen one
        logger.info("the %s listens on %s port %d", name, *bound.getsockname()[:2])
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_Server(config, options, sockets, shutdown_timeout).run())


class _Server:
    def __init__(
        self, config: EngineConfig, options: ServerOptions, sockets: list[socket.socket], shutdown_timeout: float
    ) -> None:
        self._config, self._options, self._sockets = config, options, sockets
        self._shutdown_timeout = shutdown_timeout
        self._core = CoreClient(config, self._on_step)
        self._state = ServerState(options, self._core)
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()

    async def run(self) -> int:
        self._catch_signals()
        apps = [build_app(self._state), build_admin_app(self._state)]
        servers = [_uvicorn(app) for app, _ in zip(apps, self._sockets, strict=False)]
        serving = [
            asyncio.create_task(server.serve(sockets=[bound]))
            for server, bound in zip(servers, self._sockets, strict=True)
        ]
        background: list[asyncio.Task[None]] = []
        try:
            await self._start_core()
            load = asyncio.create_task(self._load())
            background = [load, asyncio.create_task(self._log_statistics())]
            return await self._until_the_end(load)
        finally:
            for task in background:
                task.cancel()
            for server in servers:
                server.should_exit = True
            await asyncio.gather(*background, *serving, return_exceptions=True)
            await self._core.close()

    async def _start_core(self) -> None:
        try:
            await self._core.start()
        except OSError as error:
            raise EngineDead(f"the engine core's process cannot be started: {error}") from error

    async def _load(self) -> None:
        """The tokenizer is read while the core reads the weights. Raises ConfigError when it cannot be."""
        tokenizer = await asyncio.to_thread(Tokenizer, self._config.tokenizer or self._config.model)
        await self._core.loaded.wait()
        facts = self._core.ready
        if facts is None:
            return
        metrics = EngineMetrics(self._options.served_model_names[0], facts.max_model_len)
        metrics.cache_config(facts.cache_config)
        self._state.metrics = metrics
        self._state.serving = Serving(facts, tokenizer, Generator(self._core, tokenizer, metrics))
        logger.info("ready: serving %s", ", ".join(self._options.served_model_names))

    async def _until_the_end(self, load: "asyncio.Task[None]") -> int:
        """Wait for a signal, a failed load, or the core's end, whichever is first."""
        stop = asyncio.create_task(self._stop.wait())
        ended = asyncio.create_task(self._core.ended.wait())
        waiting: set[asyncio.Task[Any]] = {stop, ended, load}
        try:
            while True:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if load in done and (error := load.exception()) is not None:
                    raise error
                if ended in done:
                    return await self._after_failure()
                if stop in done:
                    await self._drain()
                    return 0
        finally:
            for task in (stop, ended):
                task.cancel()

    async def _after_failure(self) -> int:
        failure = self._core.failure
        assert failure is not None
        print(f"trimtab-engine: {' '.join(failure.message.split())}", file=sys.stderr, flush=True)
        await asyncio.sleep(DEAD_ANSWER_SECONDS if self._state.num_http_requests else 0)
        return failure.exit_code or 1

    async def _drain(self) -> None:
        """Accept nothing new, let what runs finish, abort the rest at the deadline or at a second signal."""
        self._state.draining = True
        if self._state.num_http_requests:
            logger.info(
                "draining: %d requests run, up to %.0f s", self._state.num_http_requests, self._shutdown_timeout
            )
            await self._until_idle(self._shutdown_timeout, self._hurry, self._core.ended)
        if self._state.num_http_requests and self._core.is_alive:
            logger.warning("aborting %d requests that did not finish in time", self._state.num_http_requests)
            self._core.abort_all()
            await self._until_idle(ABORT_GRACE_SECONDS)

    async def _until_idle(self, timeout: float, *or_else: asyncio.Event) -> None:
        """Wait until no generation request is being answered, or another event, or the timeout."""
        waits = [asyncio.create_task(event.wait()) for event in (self._state.idle, *or_else)]
        await asyncio.wait(waits, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    def _on_step(self, stats: StepStats) -> None:
        if self._state.metrics is not None:
            self._state.metrics.on_step(stats)

    async def _log_statistics(self) -> None:
        """vLLM's line every 10 s while there is something to say."""
        was_idle = True
        while self._options.log_stats:
            await asyncio.sleep(STATS_SECONDS)
            metrics = self._state.metrics
            if metrics is None or metrics.latest is None:
                continue
            interval, metrics.interval = metrics.interval, Interval()
            latest = metrics.latest
            idle = not (
                interval.prompt_tokens or interval.generation_tokens or latest.num_running or latest.num_waiting
            )
            level = logging.DEBUG if idle and was_idle else logging.INFO
            logger.log(level, "%s", statistics_line(interval, latest, STATS_SECONDS))
            was_idle = idle

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()


class _Uvicorn(uvicorn.Server):
    """uvicorn without its own signal handling: the drain is ours."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _uvicorn(app: FastAPI) -> _Uvicorn:
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=CLOSE_SECONDS,
        server_header=False,
        http=BoundedHeadProtocol,
    )
    return _Uvicorn(config)


def _bind(host: str, port: int, flag: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}; choose another {flag}") from None
    bound.setblocking(False)
    return bound


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    import uvloop

    return uvloop.new_event_loop

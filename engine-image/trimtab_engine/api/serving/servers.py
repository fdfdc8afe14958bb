"""The API servers of one engine: one in the first process, or several in processes of their own.

server.py, which leads the engine's life, treats both alike. The first kind is here, the other in server_processes.py.
"""

import asyncio
import socket
from typing import Protocol

from trimtab_engine.api.metrics.exporter import EngineExporter
from trimtab_engine.api.metrics.observations import Observer
from trimtab_engine.api.metrics.tracing import tracer_of
from trimtab_engine.api.serving.app import build_app
from trimtab_engine.api.serving.http_server import HttpServer
from trimtab_engine.api.serving.loading import load_serving
from trimtab_engine.api.serving.state import ServerState
from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.messages import CoreFailed


class Servers(Protocol):
    """What answers on --port."""

    idle: asyncio.Event
    """Set while no generation request is being answered."""

    @property
    def num_http_requests(self) -> int:
        """Generation requests that are being answered."""

    async def start(self) -> None:
        """Answer probes from now on. Raises EngineDead when there can be no process."""

    async def load(self) -> None:
        """Return when all accept requests. Raises ConfigError. Cancelled when the core fails first."""

    def begin_drain(self) -> None:
        """Accept nothing new."""

    async def settle(self) -> None:
        """Return when num_http_requests is that of now."""

    def abort_all(self) -> None:
        """End what still runs."""

    def fail(self, failure: CoreFailed) -> None:
        """The engine serves no more: who waits gets an error, who comes gets 503."""

    async def close(self, seconds: int) -> None:
        """Write what is being written for up to `seconds`, and end."""


class LocalServer:
    """One API server in this process, on the same line to the core that the admin API uses."""

    def __init__(
        self, config: EngineConfig, state: ServerState, exporter: EngineExporter, bound: socket.socket
    ) -> None:
        self._config, self._state, self._exporter = config, state, exporter
        self._http = HttpServer(build_app(state), bound)
        self._tracer = tracer_of(state.options.otlp_traces_endpoint, state.options.served_model_names[0])
        self.idle = state.idle

    @property
    def num_http_requests(self) -> int:
        return self._state.num_http_requests

    async def start(self) -> None:
        self._http.start()

    async def load(self) -> None:
        """The tokenizer is read while the core reads the weights."""
        self._state.serving = await load_serving(
            self._config, self._state.options, self._state.core, self._observer, self._tracer
        )

    def _observer(self) -> Observer | None:
        return None if self._exporter.metrics is None else self._exporter

    def begin_drain(self) -> None:
        self._state.begin_drain()

    async def settle(self) -> None:
        """It always is."""

    def abort_all(self) -> None:
        self._state.core.abort_all()

    def fail(self, failure: CoreFailed) -> None:
        """Nothing to tell: it shares this process's line to the core."""

    async def close(self, seconds: int) -> None:
        await self._http.close(seconds)
        if self._state.serving is not None:
            await self._state.serving.close()
        if self._tracer is not None:
            self._tracer.close()

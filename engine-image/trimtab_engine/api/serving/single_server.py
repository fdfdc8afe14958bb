"""A single API server in the first process."""

import socket

from trimtab_engine.api.http.server import HttpServer
from trimtab_engine.api.metrics.exporter import EngineExporter
from trimtab_engine.api.metrics.observations import Observer
from trimtab_engine.api.metrics.tracing import tracer_of
from trimtab_engine.api.openai.loading import load_serving
from trimtab_engine.api.openai.state import ServerState
from trimtab_engine.api.serving.app import build_app, connection_limits, open_batches
from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.messages.lifecycle import CoreFailed


class SingleServer:
    """One API server in this process, sharing the admin API's connection to the core."""

    def __init__(
        self, config: EngineConfig, state: ServerState, exporter: EngineExporter, bound: socket.socket
    ) -> None:
        self._config, self._state, self._exporter = config, state, exporter
        self._batches = open_batches(state)
        self._http = HttpServer(build_app(state, self._batches), bound, connection_limits(state))
        self._tracer = tracer_of(state.options.otlp_traces_endpoint, state.options.served_model_names[0])
        self.idle = state.idle

    @property
    def num_http_requests(self) -> int:
        return self._state.num_http_requests

    @property
    def num_arrivals(self) -> int:
        return self._state.num_arrivals

    async def start(self) -> None:
        self._http.start()

    async def load(self) -> None:
        """Read the tokenizer while the core reads the weights."""
        serving = await load_serving(self._config, self._state.options, self._state.core, self._observer, self._tracer)
        if self._batches is not None:
            await self._batches.start()
        self._state.serving = serving

    def _observer(self) -> Observer | None:
        return None if self._exporter.metrics is None else self._exporter

    def drop_media_cache(self) -> None:
        self._state.drop_media_cache()

    def become_not_ready(self) -> None:
        self._state.terminating = True

    def begin_drain(self) -> None:
        self._state.begin_drain()
        if self._batches is not None:
            self._batches.stop()

    async def settle(self) -> None:
        """Return at once; the count is always current."""

    def abort_all(self) -> None:
        self._state.core.abort_all()

    def fail(self, failure: CoreFailed) -> None:
        """Do nothing: the failure is known through the shared connection to the core."""

    async def close(self, seconds: int) -> None:
        if self._batches is not None:
            await self._batches.close()
        await self._http.close(seconds)
        if self._state.serving is not None:
            await self._state.serving.close()
        if self._tracer is not None:
            self._tracer.close()

"""The proxy's listening server: accepts clients, answers the router's own paths, limits time, shuts down."""

from __future__ import annotations

import asyncio
import logging
import socket
from time import monotonic

import orjson

from trimtab_router.config import RouterConfig
from trimtab_router.proxy.broadcast import broadcast
from trimtab_router.proxy.client import ClientConnection
from trimtab_router.proxy.dispatcher import Dispatcher
from trimtab_router.proxy.errors import HttpError, json_response
from trimtab_router.proxy.exchange import Exchange
from trimtab_router.proxy.routes import Route

SWEEP_SECONDS = 1.0
QUIET_ROUTES = (Route.PROBE, Route.LOAD, Route.METRICS)
"""Routes that monitors of this pod use: their requests do not show that clients still send some here."""
QUIET_SECONDS = 5.0
"""Time without new requests after which a terminating router stops listening: until then its address may be in use."""

logger = logging.getLogger(__name__)


class ProxyServer:
    """Accepts client connections on the API port."""

    def __init__(self, config: RouterConfig, dispatcher: Dispatcher) -> None:
        self.config, self.dispatcher = config, dispatcher
        self.loop = asyncio.get_running_loop()
        self.time = monotonic
        self.is_draining = False
        """True once the router is about to end: it is not ready, but still accepts requests."""
        self.knows_replicas = False
        """True once the source of endpoints has listed them."""
        self.is_closing = False
        """True once connections are closed after their response."""
        self._connections: set[ClientConnection] = set()
        self._no_connection = asyncio.Event()
        self._no_connection.set()
        self._last_request_at = 0.0
        self._server: asyncio.Server | None = None
        self._sweep: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    # --- lifecycle ------------------------------------------------------------------------------------------------

    async def start(self, own_socket: socket.socket) -> None:
        """Listen on a bound socket."""
        self._server = await self.loop.create_server(lambda: ClientConnection(self), sock=own_socket, backlog=1024)
        self._sweep = self.loop.call_later(SWEEP_SECONDS, self._on_sweep)

    @property
    def is_ready(self) -> bool:
        """True if new requests should be sent here: the replicas are known, and requests can be answered or held."""
        return (
            self.knows_replicas
            and not self.is_draining
            and (self.config.max_hold_seconds > 0 or self.dispatcher.has_replicas())
        )

    def begin_drain(self) -> None:
        """Report not ready. Connections close after their next response, so that clients go elsewhere."""
        self.is_draining = True

    async def drain(self) -> None:
        """Accept requests until none arrive any more, finish all, and close; bounded by the drain timeout."""
        self.begin_drain()
        started_at = self.time()
        deadline = started_at + self.config.drain_timeout_seconds
        left = QUIET_SECONDS
        while left > 0:
            await asyncio.sleep(left)
            left = min(max(started_at, self._last_request_at) + QUIET_SECONDS, deadline) - self.time()
        await self.stop(deadline)

    async def stop(self, deadline: float) -> None:
        """Stop listening and finish requests in progress until a deadline."""
        self.is_closing = True
        if self._server is not None:
            self._server.close()
        for connection in [each for each in self._connections if each.is_idle]:
            connection.transport.close()
        try:
            async with asyncio.timeout_at(deadline):
                await self._no_connection.wait()
        except TimeoutError:
            logger.warning("drain: %d connections cut after the drain timeout", len(self._connections))
        for connection in list(self._connections):
            connection.transport.abort()
        if self._sweep is not None:
            self._sweep.cancel()

    # --- called by client connections -----------------------------------------------------------------------------

    def connected(self, connection: ClientConnection) -> None:
        """Record an open connection."""
        self._connections.add(connection)
        self._no_connection.clear()

    def disconnected(self, connection: ClientConnection) -> None:
        """Forget a closed connection."""
        self._connections.discard(connection)
        if not self._connections:
            self._no_connection.set()

    @property
    def num_connections(self) -> int:
        """Number of open client connections."""
        return len(self._connections)

    def handle(self, exchange: Exchange) -> None:
        """Answer a complete request."""
        if self.is_draining:
            exchange.client.close_after_response()
        if exchange.route not in QUIET_ROUTES:
            self._last_request_at = exchange.arrived_at
        try:
            if exchange.route is Route.GENERATE:
                self.dispatcher.submit(exchange)
            elif exchange.route is Route.FORWARD:
                self.dispatcher.forward(exchange)
            else:
                self._answer(exchange)
        except Exception:
            logger.exception("request failed: %s %s", exchange.head.method, exchange.head.path)
            exchange.client.close_after_response()
            exchange.fail(HttpError(500, "the router failed; see its log"))

    # --- parts ----------------------------------------------------------------------------------------------------

    def _answer(self, exchange: Exchange) -> None:
        """Answer a path of the router's own."""
        method, route = exchange.head.method, exchange.route
        if route is Route.ADAPTER:
            if method != b"POST":
                self.dispatcher.forward(exchange)
                return
            task = self.loop.create_task(broadcast(self.dispatcher, exchange))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif route is Route.PROBE:
            if self.is_ready or exchange.head.path == "/livez":
                self._respond(exchange, {"status": "ok"})
            else:
                exchange.fail(HttpError(503, "the router is draining" if self.is_draining else "no replica is ready"))
        elif route is Route.LOAD:
            self._respond(exchange, {"server_load": self.dispatcher.demand.in_flight + self.dispatcher.num_held})
        elif route is Route.METRICS:
            exchange.fail(
                HttpError(
                    404,
                    f"/metrics: not served here; read the router's metrics on port {self.config.admin_port}, and those "
                    "of engines from their pods",
                )
            )
        elif method in (b"GET", b"HEAD") and self.config.served_models and not self.dispatcher.has_replicas():
            models = [{"id": name, "object": "model", "owned_by": "trimtab"} for name in self.config.served_models]
            self._respond(exchange, {"object": "list", "data": models})
        else:
            self.dispatcher.forward(exchange)

    def _respond(self, exchange: Exchange, fields: dict[str, object]) -> None:
        close, head_only = exchange.client.closes_after_response, exchange.head.method == b"HEAD"
        exchange.respond(json_response(200, orjson.dumps(fields), close=close, head_only=head_only), 200)

    def _on_sweep(self) -> None:
        """Close connections of slow clients, and idle ones to replicas."""
        now = self.time()
        for connection in list(self._connections):
            connection.check_time(now)
        self.dispatcher.close_idle_connections()
        self._sweep = self.loop.call_later(SWEEP_SECONDS, self._on_sweep)

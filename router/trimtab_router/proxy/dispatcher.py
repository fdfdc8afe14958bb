"""Sends requests to the replicas that they are bound to: connections, retries, breakers."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from time import monotonic

from trimtab_router.config import RouterConfig
from trimtab_router.endpoints.endpoint import Endpoint
from trimtab_router.metrics import RouterMetrics
from trimtab_router.proxy.binding import RETRY_AFTER_SECONDS, BindableRequest, Binder
from trimtab_router.proxy.breaker import RetryBudget
from trimtab_router.proxy.description import Describer
from trimtab_router.proxy.errors import HttpError
from trimtab_router.proxy.exchange import Exchange
from trimtab_router.proxy.http1 import upstream_head
from trimtab_router.proxy.routes import Route
from trimtab_router.proxy.upstream import ReplicaConnections, UpstreamConnection
from trimtab_router.scoring.state import Candidate, Choice
from trimtab_router.state_stream.registry import Registry, dispatch_header

MAX_ATTEMPTS = 3
MIN_RETRY_DELAY_SECONDS = 0.025
MAX_RETRY_DELAY_SECONDS = 0.25
PROGRESS_SECONDS = 5.0
"""Interval of comments in held streams whose clients want them."""
RANK_HEADER = b"x-data-parallel-rank"
"""Selects an engine core of a replica with several."""
PROGRESS_HEADER = b"x-trimtab-progress"

logger = logging.getLogger(__name__)


class Dispatcher:
    """Chooses replicas for requests and follows each request to its end."""

    def __init__(self, config: RouterConfig, registry: Registry, metrics: RouterMetrics) -> None:
        self.config, self.registry, self.metrics = config, registry, metrics
        self.describer = Describer(config, registry)
        self.binder = Binder(config, registry, metrics)
        self.demand = self.binder.demand
        self.body_bytes = 0
        """Bytes of request bodies in memory: being received, held, or without a response so far."""
        self._replicas: dict[str, ReplicaConnections] = {}
        self._open: set[str] = set()
        """Replicas whose breaker is open or half open."""
        self._budget = RetryBudget()
        self._rng = random.Random()
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()

    # --- replicas -------------------------------------------------------------------------------------------------

    def set_endpoints(self, endpoints: Sequence[Endpoint]) -> None:
        """Replace the replicas. Requests in flight on removed ones continue."""
        given = {endpoint.name: endpoint for endpoint in endpoints}
        for name, replica in list(self._replicas.items()):
            endpoint = given.get(name)
            if endpoint is None or (endpoint.host, endpoint.port) != (replica.endpoint.host, replica.endpoint.port):
                replica.remove()
                self._open.discard(name)
                del self._replicas[name]
        for name, endpoint in given.items():
            known = self._replicas.get(name)
            if known is None:
                self._replicas[name] = ReplicaConnections(endpoint)
            else:
                known.endpoint = endpoint
        self.registry.set_endpoints(endpoints)
        self.binder.schedule()

    def close_idle_connections(self) -> None:
        """Close connections to replicas that have been idle for too long."""
        now = monotonic()
        for replica in self._replicas.values():
            replica.close_idle(now)

    # --- requests -------------------------------------------------------------------------------------------------

    @property
    def num_held(self) -> int:
        """Number of requests that are waiting for a replica."""
        return self.binder.num_held

    def submit(self, exchange: Exchange) -> None:
        """Dispatch a request for the model, or hold it."""
        self._budget.earn()
        self.binder.submit(exchange, self.describer.describe(exchange.head, exchange.body))

    def follow_hold(self, exchange: Exchange) -> None:
        """Send comments while a request is held, if its client wants them."""
        description = exchange.description
        if description is not None and description.is_stream and PROGRESS_HEADER in exchange.head.fields:
            self._loop.call_later(PROGRESS_SECONDS, self._send_progress, exchange)

    def _send_progress(self, exchange: Exchange) -> None:
        if not exchange.is_done and not exchange.response_started:
            exchange.send_progress()
            self._loop.call_later(PROGRESS_SECONDS, self._send_progress, exchange)

    def forward(self, exchange: Exchange) -> None:
        """Send a request that needs no scoring to the replica with the fewest requests."""
        now = monotonic()
        excluded = self.excluded(exchange, now)
        usable = [each for each in self.registry.replicas(now) if each.replica not in excluded]
        if not usable:
            exchange.fail(
                HttpError(
                    503,
                    "no replica is available; try again later",
                    retry_after=RETRY_AFTER_SECONDS,
                    reason="no-replica",
                )
            )
            return
        least = min(usable, key=lambda each: each.running + each.waiting + each.pending_requests)
        self._send(exchange, least.replica, now)

    def overloaded(self) -> HttpError:
        """Return the error of requests whose bodies do not fit into memory."""
        self.metrics.dropped("body-memory")
        return HttpError(
            429,
            "the router holds too many request bodies; try again later",
            retry_after=RETRY_AFTER_SECONDS,
            reason="body-memory",
        )

    def has_replicas(self) -> bool:
        """Return True if some replica can be used."""
        return bool(self.registry.replicas(monotonic()))

    def replicas(self) -> list[ReplicaConnections]:
        """Return all known replicas, including replicas that are not ready."""
        return list(self._replicas.values())

    # --- dispatch -------------------------------------------------------------------------------------------------

    def excluded(self, exchange: Exchange, now: float) -> frozenset[str]:
        """Return the replicas that have failed a request, or whose breaker is open."""
        if not self._open:
            return exchange.tried
        return exchange.tried.union(
            name for name in self._open if name in self._replicas and not self._replicas[name].breaker.allows(now)
        )

    def dispatch(self, exchange: Exchange, choice: Choice, now: float) -> None:
        """Send a request to the replica that it is bound to."""
        description = exchange.description
        assert description is not None
        exchange.choice = choice
        if description.computes:
            best = choice.best
            exchange.number = self.registry.dispatched(best.replica, description.routed, now, best.predicted_ttft)
        self._send(exchange, choice.best.replica, now)

    def _send(self, exchange: Exchange, name: str, now: float) -> None:
        """Send a request over an idle connection, or over a new one."""
        replica = self._replicas[name]
        exchange.replica, exchange.replica_name, exchange.dispatched_at = replica, name, now
        exchange.attempts += 1
        replica.breaker.sent()
        self.demand.in_flight += 1
        connection = replica.take(now)
        if connection is not None:
            self._send_over(exchange, connection)
        else:
            self._connect(exchange, replica)

    def _connect(self, exchange: Exchange, replica: ReplicaConnections) -> None:
        """Send a request over a new connection. Requests are sent in order, whichever connection is ready first."""
        replica.waiting.append(exchange)
        task = self._loop.create_task(self._open_connection(replica))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _open_connection(self, replica: ReplicaConnections) -> None:
        """Open a connection for the first request that waits for one, or fail that request."""
        connection: UpstreamConnection | None = None
        cause = ""
        try:
            connection = await replica.connect()
        except OSError as error:  # also TimeoutError
            cause = f"connect: {error or type(error).__name__}"
        while replica.waiting:
            exchange = replica.waiting.popleft()
            if exchange.is_done:
                continue
            if connection is None:
                self.retry_after_failure(exchange, cause, is_connect=True)
            else:
                self._send_over(exchange, connection)
            return
        if connection is not None:
            replica.put(connection)

    def _send_over(self, exchange: Exchange, connection: UpstreamConnection) -> None:
        assert exchange.replica is not None
        exchange.upstream = connection
        own = []
        if exchange.number is not None:
            number = dispatch_header(self.registry.router_id, exchange.number)
            own.append(b"x-trimtab-dispatch: " + number.encode())
            if RANK_HEADER not in exchange.head.fields:
                assert exchange.description is not None
                core = self.registry.best_core(exchange.replica.endpoint.name, exchange.description.routed)
                if core is not None:
                    own.append(RANK_HEADER + b": %d" % core)
        body = exchange.body
        head = upstream_head(exchange.head, len(body), own, self.describer.untrusted_headers)
        if exchange.attempts == 1 and not exchange.was_held:
            self.metrics.added_seconds.observe(monotonic() - exchange.arrived_at)
        connection.send(exchange, head, body)

    # --- outcomes, called by exchanges ----------------------------------------------------------------------------

    def response_headers(self, exchange: Exchange) -> list[bytes]:
        """Return the router's own header lines of a response."""
        assert exchange.replica is not None
        own = [b"x-trimtab-replica: " + exchange.replica.endpoint.name.encode()]
        if exchange.choice is not None and b"x-trimtab-why" in exchange.head.fields:
            own.append(b"x-trimtab-why: " + explain(exchange.choice).encode())
        return own

    def on_first_byte(self, exchange: Exchange) -> None:
        """Record the first byte of a response's body."""
        exchange.first_byte_at = now = monotonic()
        if exchange.number is not None:
            self.registry.first_byte(exchange.replica_name, exchange.number)
        if exchange.choice is not None and exchange.is_event_stream and exchange.dispatched_at is not None:
            self.metrics.first_byte(now - exchange.dispatched_at, exchange.choice.best.predicted_ttft)

    def on_usage(self, prompt_tokens: int, cached_tokens: int) -> None:
        """Record the usage that a replica has reported."""
        self.metrics.usage(prompt_tokens, cached_tokens)

    def on_end(self, exchange: Exchange) -> None:
        """Record a complete response."""
        self._end_dispatch(exchange)
        self.metrics.finished(exchange.route.value, exchange.status)
        self.binder.schedule()

    def on_interrupted(self, exchange: Exchange) -> None:
        """Record a replica's failure in the middle of a response."""
        self._record_failure(exchange)
        self._end_dispatch(exchange)
        self.metrics.interrupted.inc()
        self.metrics.finished(exchange.route.value, exchange.status)
        self.binder.schedule()

    def on_cancelled(self, exchange: Exchange) -> None:
        """Forget a request whose client left."""
        if exchange.replica is not None:
            if not exchange.response_started:
                exchange.replica.breaker.abandoned()
            self._end_dispatch(exchange)
        self.binder.cancel(exchange)
        self.metrics.finished(exchange.route.value, exchange.status)

    def retry_after_status(self, exchange: Exchange, status: int) -> bool:
        """Return True if the request goes to another replica because this one answered with a status."""
        if exchange.attempts >= MAX_ATTEMPTS or not exchange.is_repeatable:
            return False
        replica = exchange.replica
        assert replica is not None
        tried = exchange.tried | {replica.endpoint.name}
        has_other = any(each.replica not in tried for each in self.registry.replicas(monotonic()))
        can_wait = status != 429 and exchange.route is Route.GENERATE and self.config.max_hold_seconds > 0
        if not (has_other or can_wait) or not self._budget.spend():
            return False
        upstream, exchange.upstream = exchange.upstream, None
        assert upstream is not None
        upstream.abandon()
        self._retry(exchange, f"status-{status}")
        return True

    def retry_after_failure(
        self, exchange: Exchange, cause: str, *, is_stale: bool = False, is_connect: bool = False
    ) -> None:
        """Try again after a transport error, or answer with 502.

        Args:
            exchange: The request.
            cause: The error, for the answer and the log.
            is_stale: True if an idle connection turned out to be closed: this is no sign of a failing replica.
            is_connect: True if nothing was sent.
        """
        replica = exchange.replica
        assert replica is not None
        if is_stale and exchange.is_repeatable:
            self.metrics.retried("stale-connection")
            self._connect(exchange, replica)
            return
        self._record_failure(exchange)
        repeatable = exchange.is_repeatable or is_connect
        if exchange.attempts < MAX_ATTEMPTS and repeatable and self._budget.spend():
            self._retry(exchange, "connect" if is_connect else "reset")
            return
        self._end_dispatch(exchange)
        logger.warning("request failed: replica %s: %s", replica.endpoint.name, cause)
        exchange.fail(
            HttpError(
                502,
                f"replica {replica.endpoint.name} failed before it answered: {cause}; send the request again",
                retry_after=1,
            )
        )

    def _retry(self, exchange: Exchange, cause: str) -> None:
        """Wait for a moment, then try a replica that has not been tried."""
        assert exchange.replica is not None
        self.metrics.retried(cause)
        exchange.tried |= {exchange.replica.endpoint.name}
        self._end_dispatch(exchange)
        delay = self._rng.uniform(MIN_RETRY_DELAY_SECONDS, MAX_RETRY_DELAY_SECONDS)
        self.binder.park(exchange, delay, None if exchange.route is Route.GENERATE else self._forward_again)

    def _forward_again(self, request: BindableRequest) -> None:
        assert isinstance(request, Exchange)
        self.forward(request)

    def _record_failure(self, exchange: Exchange) -> None:
        replica = exchange.replica
        assert replica is not None
        name = replica.endpoint.name
        if replica.breaker.failed(monotonic()):
            self.metrics.breaker_opened.inc()
            logger.warning("breaker: open after transport errors of replica %s", name)
        if replica.breaker.is_open and self._replicas.get(name) is replica:
            self._open.add(name)

    def _end_dispatch(self, exchange: Exchange) -> None:
        """Remove the request from its replica's load."""
        replica, exchange.replica = exchange.replica, None
        if replica is None:
            return
        self.demand.in_flight -= 1
        name = replica.endpoint.name
        if exchange.number is not None:
            self.registry.finished(name, exchange.number)
            exchange.number = None
        if name in self._open and not replica.breaker.is_open:
            self._open.discard(name)


def explain(choice: Choice) -> str:
    """Return the choice in one line, for the header x-trimtab-why."""

    def text(candidate: Candidate) -> str:
        return (
            f"{candidate.replica} score={candidate.score:.4f} ttft={candidate.predicted_ttft:.4f} "
            f"cached={candidate.cached_tokens} queue={candidate.queue_seconds:.4f}"
        )

    line = f"rule={choice.rule}; best={text(choice.best)}"
    return line if choice.runner_up is None else f"{line}; next={text(choice.runner_up)}"

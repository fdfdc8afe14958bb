"""Several worker processes of one router, with a common state token, drain, demand and metrics.

Workers accept connections of the same port (SO_REUSEPORT) and route independently. The first one owns the admin port;
a socket pair connects it with each other worker. Messages are JSON objects, one a line.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterable
from typing import Any

import orjson
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.multiprocess import MultiProcessCollector

from trimtab_router.metrics import gauge
from trimtab_router.proxy.dispatcher import Dispatcher
from trimtab_router.proxy.server import ProxyServer

REPORT_SECONDS = 0.25
"""Interval of a worker's reports; the beginning and the end of holding are reported at once."""


SUMMED_GAUGES = {
    "held_requests": "held",
    "held_bytes": "held_bytes",
    "body_bytes": "body_bytes",
    "in_flight_requests": "in_flight",
    "connections": "connections",
}
"""Gauges that are sums over the workers, with their names in a worker's status."""

logger = logging.getLogger(__name__)


class Worker:
    """The proxy of this process."""

    def __init__(self, server: ProxyServer, dispatcher: Dispatcher) -> None:
        self.server, self.dispatcher = server, dispatcher
        self.drain_requested = asyncio.Event()

    def set_token(self, token: str, former_token: str | None) -> None:
        """Use the state token for all streams."""
        self.dispatcher.registry.set_token(token, former_token)

    def begin_drain(self) -> None:
        """Report not ready and begin to drain."""
        self.server.begin_drain()
        self.drain_requested.set()

    def status(self) -> dict[str, Any]:
        """Return readiness, demand and gauges of this process."""
        demand, now = self.dispatcher.demand, self.server.time()
        return {
            "ready": self.server.is_ready,
            "sequence": demand.sequence,
            "held": self.dispatcher.num_held,
            "oldest_held_seconds": _age(demand.oldest_held_at, now),
            "arrived": demand.arrived,
            "arrived_prompt_tokens": demand.arrived_prompt_tokens,
            "last_arrival_seconds_ago": _age(demand.last_arrival_at, now),
            "in_flight": demand.in_flight,
            "held_bytes": self.dispatcher.binder.queue.num_bytes,
            "body_bytes": self.dispatcher.body_bytes,
            "connections": self.server.num_connections,
        }


class WorkerFleet:
    """All workers, as the first one sees them (see admin.Fleet)."""

    def __init__(self, own: Worker, links: Iterable[socket.socket] = ()) -> None:
        self._own = own
        self._changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._links = list(links)
        self._reports: dict[int, dict[str, Any]] = {}
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._token: tuple[str, str | None] | None = None
        self.has_failed = False
        """True if a worker ended unexpectedly."""
        own.dispatcher.demand.on_change = self._on_change

    async def start(self) -> None:
        """Connect to the other workers."""
        for number, link in enumerate(self._links):
            reader, writer = await asyncio.open_connection(sock=link)
            self._writers[number] = writer
            self._tasks.append(asyncio.create_task(self._receive(number, reader)))

    async def all_ended(self) -> None:
        """Wait until the other workers have ended."""
        await asyncio.gather(*self._tasks)

    @property
    def is_ready(self) -> bool:
        return self._own.server.is_ready and all(
            self._reports.get(number, {}).get("ready") for number in range(len(self._links))
        )

    def demand(self) -> dict[str, Any]:
        reports = self._all()
        summed = {
            name: sum(report[name] for report in reports)
            for name in ("sequence", "held", "arrived", "arrived_prompt_tokens", "in_flight")
        }
        ages = [report["last_arrival_seconds_ago"] for report in reports]
        known = [age for age in ages if age is not None]
        oldest = [report["oldest_held_seconds"] or 0.0 for report in reports]
        return summed | {
            "oldest_held_seconds": max(oldest),
            "last_arrival_seconds_ago": min(known) if known else None,
        }

    async def demand_changed(self) -> None:
        await asyncio.shield(self._changed)

    def set_token(self, token: str, former_token: str | None) -> None:
        self._own.set_token(token, former_token)
        self._send({"token": token, "former_token": former_token})

    def begin_drain(self) -> None:
        self._own.begin_drain()
        self._send({"drain": True})

    async def metrics(self) -> bytes:
        if not self._links:
            return generate_latest(self._own.dispatcher.metrics.registry) + generate_latest(self._gauges())
        registry = CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry) + generate_latest(self._gauges())

    # --- parts ----------------------------------------------------------------------------------------------------

    def _all(self) -> list[dict[str, Any]]:
        return [self._own.status(), *self._reports.values()]

    def _gauges(self) -> CollectorRegistry:
        """Return the metrics that are read at each scrape."""
        reports = self._all()
        registry = CollectorRegistry()
        dispatcher, now = self._own.dispatcher, self._own.server.time()

        def total(name: str) -> list[tuple[tuple[str, ...], float]]:
            return [((), float(sum(report[name] for report in reports)))]

        ages = []
        for replica in dispatcher.replicas():
            age = dispatcher.registry.state_age(replica.endpoint.name, now)
            if age is not None:
                ages.append(((replica.endpoint.name,), age))
        families = [
            *(gauge(name, total(field)) for name, field in SUMMED_GAUGES.items()),
            gauge("replicas", [((), float(len(dispatcher.registry.replicas(now))))]),
            gauge("state_age_seconds", ages),
        ]
        registry.register(_Families(families))
        return registry

    def _on_change(self) -> None:
        changed, self._changed = self._changed, asyncio.get_running_loop().create_future()
        changed.set_result(None)

    def _send(self, message: dict[str, Any]) -> None:
        if "token" in message:
            self._token = message["token"], message["former_token"]
        for writer in self._writers.values():
            if writer.is_closing():
                continue
            writer.write(orjson.dumps(message) + b"\n")

    async def _receive(self, number: int, reader: asyncio.StreamReader) -> None:
        while line := await _read_line(reader):
            report = orjson.loads(line)
            former = self._reports.get(number)
            self._reports[number] = report
            if former is None or former["sequence"] != report["sequence"]:
                self._on_change()
        self._reports.pop(number, None)
        if not self._own.drain_requested.is_set():
            logger.error("worker %d ended unexpectedly; draining, so that the router is started again", number + 1)
            self.has_failed = True
            self.begin_drain()


class _Families:
    """A collector of given metrics."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


async def follow_first_worker(own: Worker, link: socket.socket) -> None:
    """Report to the first worker and follow its messages, until it ends: then this worker drains."""
    reader, writer = await asyncio.open_connection(sock=link)

    def report() -> None:
        writer.write(orjson.dumps(own.status()) + b"\n")

    async def report_regularly() -> None:
        while not writer.is_closing():
            report()
            await asyncio.sleep(REPORT_SECONDS)

    own.dispatcher.demand.on_change = report
    reporting = asyncio.create_task(report_regularly())
    try:
        while line := await _read_line(reader):
            message = orjson.loads(line)
            if "token" in message:
                own.set_token(message["token"], message["former_token"])
            if message.get("drain"):
                own.begin_drain()
    finally:
        reporting.cancel()
        own.begin_drain()


async def _read_line(reader: asyncio.StreamReader) -> bytes:
    """Return a line; empty once the other process has ended."""
    try:
        return await reader.readline()
    except OSError:
        return b""


def _age(since: float | None, now: float) -> float | None:
    return None if since is None else round(now - since, 3)

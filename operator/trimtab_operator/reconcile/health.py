"""Is the operator alive? Every loop leaves a mark when it ticks; a mark that grows old means restart. Plus `/metrics`.

Probes are answered in another thread than the loops': a busy operator
answers in time, and a blocked one is found out.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

LAG_PERIOD_SECONDS = 1.0  # how often the event loop's own delay is measured
MAX_LAG_SECONDS = 60.0  # an event loop that is blocked for so long serves nobody


@dataclass(slots=True)
class Heartbeats:
    """When each loop last ticked, by the monotonic clock, and what is being missed."""

    max_age_seconds: float
    clock: Callable[[], float] = time.monotonic
    _ticks: dict[str, float] = field(default_factory=dict)
    _ran_at: float | None = None
    """When the event loop of all of them last ran."""

    def beat(self, name: str) -> None:
        self._ticks[name] = self.clock()

    def wait_in_line(self, name: str) -> None:
        """Note that a loop waits until there is room for its tick: a long line is no hang, and those in front have a
        deadline."""
        self._ticks[name] = math.inf

    def ran(self) -> None:
        """Note that the event loop runs."""
        self._ran_at = self.clock()

    def ran_within(self, seconds: float) -> bool:
        """Whether the event loop has run so lately; one that was never asked about has."""
        return self._ran_at is None or self.clock() - self._ran_at <= seconds

    def forget(self, name: str) -> None:
        self._ticks.pop(name, None)

    def problems(self) -> list[str]:
        """What is wrong, as lines; empty when all is well."""
        now = self.clock()
        found = [
            f"{name} has not ticked for {now - at:.0f} s"
            for name, at in self._ticks.copy().items()  # the loops' thread goes on meanwhile
            if now - at > self.max_age_seconds
        ]
        if self._ran_at is not None and now - self._ran_at > MAX_LAG_SECONDS:
            found.append(f"the event loop has been blocked for {now - self._ran_at:.0f} s")
        return found


class OperatorMetrics:
    """What the operator says of itself."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.reconcile_seconds = Histogram(
            "trimtab_operator_reconcile_seconds",
            "Time of one tick of one resource, until all is told of it: under many edits telling waits for up to 20 s",
            registry=self.registry,
            buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
        )
        self.reconcile_errors = Counter(
            "trimtab_operator_reconcile_errors_total", "Ticks that failed", ["error"], registry=self.registry
        )
        self.writes = Counter(
            "trimtab_operator_writes_total", "Writes to the API server", ["verb", "kind"], registry=self.registry
        )
        self.decisions = Counter(
            "trimtab_operator_decisions_total",
            "Decisions of the tuner",
            ["namespace", "name", "knob", "reason", "mode"],
            registry=self.registry,
        )
        self.desired_replicas = Gauge(
            "trimtab_desired_replicas",
            "Replicas that are wanted, as far as a GPU budget allows",
            ["namespace", "name"],
            registry=self.registry,
        )
        self.wanted_replicas = Gauge(
            "trimtab_wanted_replicas",
            "Replicas that would be wanted without a GPU budget",
            ["namespace", "name"],
            registry=self.registry,
        )
        self.loop_lag = Gauge(
            "trimtab_operator_loop_lag_seconds", "Delay of the event loop, latest", registry=self.registry
        )
        self.leader = Gauge("trimtab_operator_leader", "1 while this process holds the Lease", registry=self.registry)

    def forget(self, namespace: str, name: str) -> None:
        """Drop the series of a resource that is gone."""
        for metric in (self.desired_replicas, self.wanted_replicas, self.decisions):
            metric.remove_by_labels({"namespace": namespace, "name": name})


async def measure_lag(heartbeats: Heartbeats, metrics: OperatorMetrics) -> None:
    """Sleep, and see how much later than asked we wake."""
    while True:
        heartbeats.ran()
        before = time.monotonic()
        await asyncio.sleep(LAG_PERIOD_SECONDS)
        metrics.loop_lag.set(max(0.0, time.monotonic() - before - LAG_PERIOD_SECONDS))


async def serve_health(port: int, heartbeats: Heartbeats, *, is_ready: Callable[[], bool]) -> web.AppRunner:
    """`/healthz` for liveness, `/readyz` for the webhook's Service."""

    async def healthz(_: web.Request) -> web.Response:
        problems = heartbeats.problems()
        return web.Response(status=500 if problems else 200, text="\n".join(problems) or "ok")

    async def readyz(_: web.Request) -> web.Response:
        return web.Response(text="ok") if is_ready() else web.Response(status=503, text="starting")

    return await _serve(port, {"/healthz": healthz, "/readyz": readyz})


async def serve_metrics(port: int, metrics: OperatorMetrics) -> web.AppRunner:
    """`/metrics` in Prometheus' text format."""

    async def page(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    return await _serve(port, {"/metrics": page})


async def _serve(port: int, routes: dict[str, Callable[[web.Request], object]]) -> web.AppRunner:
    application = web.Application()
    for path, handler in routes.items():
        application.router.add_get(path, handler)  # type: ignore[arg-type]
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, port=port).start()
    return runner

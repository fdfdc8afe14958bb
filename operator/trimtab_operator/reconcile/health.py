"""Liveness, readiness and metrics of the operator.

Each loop records a heartbeat when it ticks; an old heartbeat means that the pod must restart. Probes are served from
another thread than the loops, so a busy operator still responds and a blocked one is detected.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version

from aiohttp import web
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

LAG_PERIOD_SECONDS = 1.0  # interval of the delay measurement
MAX_LAG_SECONDS = 60.0  # a longer block fails the liveness probe


@dataclass(slots=True)
class Heartbeats:
    """Last tick of each loop and of the event loop, by the monotonic clock."""

    max_age_seconds: float
    clock: Callable[[], float] = time.monotonic
    _ticks: dict[str, float] = field(default_factory=dict)
    _ran_at: float | None = None
    """When the event loop of all loops last ran. None before the first measurement."""

    def beat(self, name: str) -> None:
        self._ticks[name] = self.clock()

    def mark_waiting(self, name: str) -> None:
        """Record that a loop waits for a slot. Waiting is no hang: the ticks that run have a deadline."""
        self._ticks[name] = math.inf

    def mark_loop_ran(self) -> None:
        """Record that the event loop runs."""
        self._ran_at = self.clock()

    def has_run_within(self, seconds: float) -> bool:
        """Return True if the event loop ran within `seconds`, or was never measured."""
        return self._ran_at is None or self.clock() - self._ran_at <= seconds

    def forget(self, name: str) -> None:
        self._ticks.pop(name, None)

    def problems(self) -> list[str]:
        """Return one line per problem. Empty if the operator is healthy."""
        now = self.clock()
        found = [
            f"{name} has not ticked for {now - at:.0f} s"
            for name, at in self._ticks.copy().items()  # the main thread changes it concurrently
            if now - at > self.max_age_seconds
        ]
        if self._ran_at is not None and now - self._ran_at > MAX_LAG_SECONDS:
            found.append(f"the event loop has been blocked for {now - self._ran_at:.0f} s")
        return found


class ConditionCollector(Collector):
    """Conditions of all resources, as one series per resource and condition type, with its status and reason."""

    def __init__(self) -> None:
        self._conditions: dict[tuple[str, str], tuple[tuple[str, str, str], ...]] = {}

    def set(self, namespace: str, name: str, conditions: Iterable[Mapping[str, object]]) -> None:
        found = ((str(c["type"]), str(c["status"]), str(c["reason"])) for c in conditions)
        self._conditions[namespace, name] = tuple(found)

    def forget(self, namespace: str, name: str) -> None:
        self._conditions.pop((namespace, name), None)

    def collect(self) -> Iterator[Metric]:
        labels = ("namespace", "name", "type", "status", "reason")
        family = GaugeMetricFamily("trimtab_condition", "1 for the status and reason of each condition", labels=labels)
        for key, conditions in self._conditions.copy().items():  # the main thread changes it concurrently
            for condition in conditions:
                family.add_metric([*key, *condition], 1.0)
        yield family


class OperatorMetrics:
    """Prometheus metrics of the operator."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.reconcile_seconds = Histogram(
            "trimtab_operator_reconcile_seconds",
            "Duration of one reconcile of one resource; its status update may wait up to 20 s during bursts of edits",
            registry=self.registry,
            buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
        )
        self.reconcile_errors = Counter(
            "trimtab_operator_reconcile_errors_total", "Failed reconciles", ["error"], registry=self.registry
        )
        self.writes = Counter(
            "trimtab_operator_writes_total", "Writes to the API server", ["verb", "kind"], registry=self.registry
        )
        self.decisions = Counter(
            "trimtab_operator_decisions_total",
            "Tuning decisions",
            ["namespace", "name", "knob", "reason", "mode"],
            registry=self.registry,
        )
        self.desired_replicas = Gauge(
            "trimtab_desired_replicas",
            "Desired replicas within the GPU budget",
            ["namespace", "name"],
            registry=self.registry,
        )
        self.wanted_replicas = Gauge(
            "trimtab_wanted_replicas",
            "Desired replicas without the GPU budget",
            ["namespace", "name"],
            registry=self.registry,
        )
        self.loop_lag = Gauge(
            "trimtab_operator_loop_lag_seconds", "Latest delay of the event loop", registry=self.registry
        )
        self.leader = Gauge("trimtab_operator_leader", "1 while this process holds the Lease", registry=self.registry)
        self.conditions = ConditionCollector()
        self.registry.register(self.conditions)
        self.events = Counter(
            "trimtab_operator_events_total", "Events by reason, such as RolledBack", ["reason"], registry=self.registry
        )
        self.evictions = Counter(
            "trimtab_operator_evictions_total",
            "Evictions of replicas: done, or blocked by a PodDisruptionBudget",
            ["result"],
            registry=self.registry,
        )
        self.poll_failures = Counter(
            "trimtab_operator_engine_poll_failures_total",
            "Polls of ready engines without usable metrics or configuration",
            ["reason"],
            registry=self.registry,
        )
        self.api_requests = Histogram(
            "trimtab_operator_api_request_seconds",
            "Time until the API server answers, by method and status code; 429: it limits the operator",
            ["method", "code"],
            registry=self.registry,
            buckets=(0.005, 0.025, 0.1, 0.25, 1, 5, 30),
        )
        self.watch_age = Gauge(
            "trimtab_operator_watch_age_seconds",
            "Time since the last event or bookmark of a watch; a kind is read from the API server after 75 s",
            ["kind"],
            registry=self.registry,
        )
        self.webhook_reviews = Histogram(
            "trimtab_operator_webhook_review_seconds",
            "Duration of admission reviews by verdict: allowed, denied, or failed",
            ["verdict"],
            registry=self.registry,
            buckets=(0.005, 0.025, 0.1, 0.25, 1, 4),
        )
        self.certificate_expiry = Gauge(
            "trimtab_operator_webhook_certificate_expiry_seconds",
            "Unix time at which the webhook's certificate expires",
            registry=self.registry,
        )
        self.clock_skew = Gauge(
            "trimtab_operator_clock_skew_seconds",
            "Time by which the node's clock is ahead of the API server's; the operator uses the API server's",
            registry=self.registry,
        )
        build = Gauge("trimtab_operator_build_info", "1, with the version", ["version"], registry=self.registry)
        build.labels(version=version("trimtab")).set(1)
        ProcessCollector(registry=self.registry)
        GCCollector(registry=self.registry)

    def forget(self, namespace: str, name: str) -> None:
        """Remove the series of a deleted resource."""
        self.conditions.forget(namespace, name)
        for metric in (self.desired_replicas, self.wanted_replicas, self.decisions):
            metric.remove_by_labels({"namespace": namespace, "name": name})


async def measure_lag(heartbeats: Heartbeats, metrics: OperatorMetrics) -> None:
    """Measure the delay of the event loop, until cancelled."""
    while True:
        heartbeats.mark_loop_ran()
        before = time.monotonic()
        await asyncio.sleep(LAG_PERIOD_SECONDS)
        metrics.loop_lag.set(max(0.0, time.monotonic() - before - LAG_PERIOD_SECONDS))


async def serve_health(port: int, heartbeats: Heartbeats, *, is_ready: Callable[[], bool]) -> web.AppRunner:
    """Serve `/healthz` for liveness and `/readyz` for the webhook's Service."""

    async def healthz(_: web.Request) -> web.Response:
        problems = heartbeats.problems()
        return web.Response(status=500 if problems else 200, text="\n".join(problems) or "ok")

    async def readyz(_: web.Request) -> web.Response:
        return web.Response(text="ok") if is_ready() else web.Response(status=503, text="starting")

    return await _serve(port, {"/healthz": healthz, "/readyz": readyz})


async def serve_metrics(port: int, metrics: OperatorMetrics) -> web.AppRunner:
    """Serve `/metrics` in the Prometheus text format."""

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

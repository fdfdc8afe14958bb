"""Prometheus metrics of the router, all with the prefix trimtab_router_."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric

if TYPE_CHECKING:
    from trimtab_router.proxy.exchange import Exchange
    from trimtab_router.scoring.state import Choice

MAX_TENANT_LABELS = 20
"""Tenants with a label of their own, first come, first served; the others are `other`."""
OTHER_TENANTS = "other"
TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
QUEUE_BUCKETS = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0, 120.0, 600.0)
RATIO_BUCKETS = (0.25, 0.5, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0)
ADDED_BUCKETS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05)


class RouterMetrics:
    """The metrics of one router process."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = own = CollectorRegistry() if registry is None else registry
        prefix = "trimtab_router_"
        self._requests = Counter(
            prefix + "requests",
            "Finished requests; code 499 if the client left before the response ended.",
            ("route", "code"),
            registry=own,
        )
        self._prompt_tokens = Counter(
            prefix + "prompt_tokens_offered", "Prompt tokens of arrived requests, estimated.", registry=own
        )
        self._uncached = Counter(
            prefix + "uncached_tokens_offered",
            "Prompt tokens of dispatched requests that are predicted not to be cached.",
            registry=own,
        )
        self._cached = Counter(
            prefix + "cached_tokens_predicted",
            "Prompt tokens of dispatched requests that are predicted to be cached.",
            registry=own,
        )
        self._cached_actual = Counter(
            prefix + "cached_tokens_actual", "Cached prompt tokens in the usage of relayed answers.", registry=own
        )
        self._prompt_actual = Counter(
            prefix + "prompt_tokens_actual", "Prompt tokens in the usage of relayed answers.", registry=own
        )
        self._queue = Histogram(
            prefix + "queue_seconds",
            "Time from a request's arrival until its last dispatch.",
            ("band", "tenant"),
            buckets=QUEUE_BUCKETS,
            registry=own,
        )
        self._predicted = Histogram(
            prefix + "ttft_predicted_seconds",
            "Predicted time from dispatch to the first byte of a streamed answer.",
            buckets=TTFT_BUCKETS,
            registry=own,
        )
        self._actual = Histogram(
            prefix + "ttft_actual_seconds",
            "Time from dispatch to the first byte of a streamed answer.",
            buckets=TTFT_BUCKETS,
            registry=own,
        )
        self._ratio = Histogram(
            prefix + "ttft_actual_to_predicted_ratio",
            "Actual divided by predicted time to the first byte of a streamed answer.",
            buckets=RATIO_BUCKETS,
            registry=own,
        )
        self.added_seconds = Histogram(
            prefix + "added_seconds",
            "Time from a request's last byte until the router sends it, without holding.",
            buckets=ADDED_BUCKETS,
            registry=own,
        )
        self._rules = Counter(
            prefix + "choices", "Dispatches by the rule that chose the replica.", ("rule",), registry=own
        )
        self._retries = Counter(prefix + "retries", "Attempts at another replica, by cause.", ("cause",), registry=own)
        self._dropped = Counter(
            prefix + "dropped", "Requests that the router rejected, by reason.", ("reason",), registry=own
        )
        self.interrupted = Counter(
            prefix + "interrupted", "Responses that a replica's failure cut after their first byte.", registry=own
        )
        self.breaker_opened = Counter(prefix + "breaker_opened", "Times that a replica's breaker opened.", registry=own)
        self._tenants: set[str] = set()
        self._queues: dict[tuple[int, str], Histogram] = {}
        self._finished: dict[tuple[str, int], Counter] = {}

    def add_gauges(self, read: Callable[[], Iterable[Metric]]) -> None:
        """Add gauges whose values are read at each scrape."""
        self.registry.register(_Collector(read))

    def offered(self, prompt_tokens: int) -> None:
        """Record the arrival of a request for the model."""
        self._prompt_tokens.inc(prompt_tokens)

    def dispatched(self, exchange: Exchange, choice: Choice, now: float) -> None:
        """Record a dispatch."""
        assert exchange.description is not None
        best = choice.best
        self._cached.inc(best.cached_tokens)
        self._uncached.inc(max(exchange.description.routed.prompt_tokens - best.cached_tokens, 0))
        self._rules.labels(choice.rule).inc()
        key = exchange.priority, self._tenant_label(exchange.tenant)
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = self._queue.labels(str(key[0]), key[1])
        queue.observe(now - exchange.arrived_at)

    def first_byte(self, exchange: Exchange, now: float) -> None:
        """Record the first byte of a response's body."""
        if exchange.choice is None or not exchange.is_event_stream or exchange.dispatched_at is None:
            return
        actual, predicted = now - exchange.dispatched_at, exchange.choice.best.predicted_ttft
        self._actual.observe(actual)
        if predicted > 0:
            self._predicted.observe(predicted)
            self._ratio.observe(actual / predicted)

    def usage(self, prompt_tokens: int, cached_tokens: int) -> None:
        """Record the usage in an answer."""
        self._prompt_actual.inc(prompt_tokens)
        self._cached_actual.inc(cached_tokens)

    def retried(self, cause: str) -> None:
        """Record an attempt at another replica."""
        self._retries.labels(cause).inc()

    def dropped(self, reason: str) -> None:
        """Record a rejected request."""
        self._dropped.labels(reason).inc()

    def finished(self, route: str, status: int) -> None:
        """Record a finished request."""
        key = route, status
        counter = self._finished.get(key)
        if counter is None:
            counter = self._finished[key] = self._requests.labels(route, str(status))
        counter.inc()

    def _tenant_label(self, tenant: str) -> str:
        if tenant in self._tenants:
            return tenant
        if len(self._tenants) >= MAX_TENANT_LABELS:
            return OTHER_TENANTS
        self._tenants.add(tenant)
        return tenant


class _Collector:
    """Reads gauges at each scrape."""

    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        return self._read()


def gauge(
    name: str, description: str, values: Iterable[tuple[tuple[str, ...], float]], labels: tuple[str, ...] = ()
) -> Metric:
    """Return a gauge of the router; `values` are label values and the value."""
    family = GaugeMetricFamily(f"trimtab_router_{name}", description, labels=labels)
    for label_values, value in values:
        family.add_metric(label_values, value)
    return family

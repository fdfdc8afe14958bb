"""Prometheus metrics of the router, all with the prefix trimtab_router_."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric

from trimtab_router.scoring.state import Choice, RoutedRequest

PREFIX = "trimtab_router_"
MAX_TENANT_LABELS = 20
"""Tenants with a label of their own, first come, first served; the others are `other`."""
OTHER_TENANTS = "other"
TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
QUEUE_BUCKETS = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0, 120.0, 600.0)
RATIO_BUCKETS = (0.25, 0.5, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0)
ADDED_BUCKETS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05)


METRIC_LABELS: dict[str, tuple[str, ...]] = {
    "requests": ("route", "code"),
    "queue_seconds": ("band", "tenant"),
    "choices": ("rule",),
    "retries": ("cause",),
    "dropped": ("reason",),
}
"""Labels by metric; the others have none."""


class RouterMetrics:
    """The metrics of one router process."""

    def __init__(self) -> None:
        self.registry = own = CollectorRegistry()
        self._requests = Counter(
            PREFIX + "requests",
            "Finished requests; code 499 if the client left before the response ended.",
            METRIC_LABELS["requests"],
            registry=own,
        )
        self._prompt_tokens = Counter(
            PREFIX + "prompt_tokens_offered", "Prompt tokens of arrived requests, estimated.", registry=own
        )
        self._uncached = Counter(
            PREFIX + "uncached_tokens_offered",
            "Prompt tokens of dispatched requests that are predicted not to be cached.",
            registry=own,
        )
        self._cached = Counter(
            PREFIX + "cached_tokens_predicted",
            "Prompt tokens of dispatched requests that are predicted to be cached.",
            registry=own,
        )
        self._cached_actual = Counter(
            PREFIX + "cached_tokens_actual", "Cached prompt tokens in the usage of relayed answers.", registry=own
        )
        self._prompt_actual = Counter(
            PREFIX + "prompt_tokens_actual", "Prompt tokens in the usage of relayed answers.", registry=own
        )
        self._queue = Histogram(
            PREFIX + "queue_seconds",
            "Time from a request's arrival until its last dispatch.",
            METRIC_LABELS["queue_seconds"],
            buckets=QUEUE_BUCKETS,
            registry=own,
        )
        self._predicted = Histogram(
            PREFIX + "ttft_predicted_seconds",
            "Predicted time from dispatch to the first byte of a streamed answer.",
            buckets=TTFT_BUCKETS,
            registry=own,
        )
        self._actual = Histogram(
            PREFIX + "ttft_actual_seconds",
            "Time from dispatch to the first byte of a streamed answer.",
            buckets=TTFT_BUCKETS,
            registry=own,
        )
        self._ratio = Histogram(
            PREFIX + "ttft_actual_to_predicted_ratio",
            "Actual divided by predicted time to the first byte of a streamed answer.",
            buckets=RATIO_BUCKETS,
            registry=own,
        )
        self.added_seconds = Histogram(
            PREFIX + "added_seconds",
            "Time from a request's last byte until the router sends it, without holding.",
            buckets=ADDED_BUCKETS,
            registry=own,
        )
        self._rules = Counter(
            PREFIX + "choices", "Dispatches by the rule that chose the replica.", METRIC_LABELS["choices"], registry=own
        )
        self._retries = Counter(
            PREFIX + "retries", "Attempts at another replica, by cause.", METRIC_LABELS["retries"], registry=own
        )
        self._dropped = Counter(
            PREFIX + "dropped", "Requests that the router rejected, by reason.", METRIC_LABELS["dropped"], registry=own
        )
        self.interrupted = Counter(
            PREFIX + "interrupted", "Responses that a replica's failure cut after their first byte.", registry=own
        )
        self.breaker_opened = Counter(PREFIX + "breaker_opened", "Times that a replica's breaker opened.", registry=own)
        self._tenants: set[str] = set()
        self._choices: dict[str, Counter] = {}
        self._queues: dict[tuple[int, str], Histogram] = {}
        self._finished: dict[tuple[str, int], Counter] = {}

    def offered(self, prompt_tokens: int) -> None:
        """Record the arrival of a request for the model."""
        self._prompt_tokens.inc(prompt_tokens)

    def bound(self, request: RoutedRequest, choice: Choice, queue_seconds: float) -> None:
        """Record the choice of a replica for a request that has waited for some time."""
        best = choice.best
        self._cached.inc(best.cached_tokens)
        self._uncached.inc(max(request.prompt_tokens - best.cached_tokens, 0))
        rule = self._choices.get(choice.rule)
        if rule is None:
            rule = self._choices[choice.rule] = self._rules.labels(choice.rule)
        rule.inc()
        key = request.priority, self._tenant_label(request.tenant)
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = self._queue.labels(str(key[0]), key[1])
        queue.observe(queue_seconds)

    def first_byte(self, actual_seconds: float, predicted_seconds: float) -> None:
        """Record the time to the first byte of a streamed answer; the prediction is 0 if there was none."""
        self._actual.observe(actual_seconds)
        if predicted_seconds > 0:
            self._predicted.observe(predicted_seconds)
            self._ratio.observe(actual_seconds / predicted_seconds)

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


GAUGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "held_requests": ("Requests that wait for a replica.", ()),
    "held_bytes": ("Memory of the held requests, in bytes.", ()),
    "body_bytes": ("Request bodies in memory, in bytes.", ()),
    "in_flight_requests": ("Requests that a replica is answering.", ()),
    "connections": ("Open client connections.", ()),
    "replicas": ("Replicas that can be used.", ()),
    "state_age_seconds": ("Age of a replica's last report.", ("replica",)),
}
"""Description and labels of the gauges, which are read at each scrape."""


def gauge(name: str, values: Iterable[tuple[tuple[str, ...], float]]) -> Metric:
    """Return one of GAUGES; `values` are label values with the value."""
    description, labels = GAUGES[name]
    family = GaugeMetricFamily(f"{PREFIX}{name}", description, labels=labels)
    for label_values, value in values:
        family.add_metric(label_values, value)
    return family

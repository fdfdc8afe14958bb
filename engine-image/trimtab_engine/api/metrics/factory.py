"""Construction of metric families: vLLM's labels, one registry per engine, replaceable histogram buckets."""

from bisect import bisect_left
from collections import Counter as Counted
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric

from trimtab_engine.errors import ConfigError

LABELS = ("model_name", "engine")
LATENCY_BUCKETS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip

Buckets = Mapping[str, Sequence[float]]
"""Upper bounds by name of the histogram family, such as vllm:time_to_first_token_seconds."""

Child = TypeVar("Child", Counter, Gauge, "BulkHistogram")


class LazyRegistry(CollectorRegistry):
    """Registry that calls `before_look` before each scrape, so that frequent events can be counted in batches."""

    def __init__(self, before_collect: Callable[[], None]) -> None:
        super().__init__()
        self._before_look = before_collect

    def collect(self) -> Iterable[Metric]:
        self._before_look()
        return super().collect()


class BulkHistogram(Histogram):
    """Histogram that observes many values at once, taking each bucket's lock once instead of once per value."""

    def observe_all(self, values: Sequence[float]) -> None:
        """Observe each of the values."""
        self._sum.inc(sum(values))
        for place, count in Counted(bisect_left(self._upper_bounds, value) for value in values).items():
            self._buckets[place].inc(count)


class Labelled(Generic[Child]):
    """Family with labels in addition to the model's and the engine's. Children are cached: prometheus_client takes a
    lock and formats all labels at each lookup, a dozen times per step.
    """

    def __init__(self, family: Child, values: Sequence[str]) -> None:
        self._family: Child = family
        self._values = values
        self._children: dict[tuple[str, ...], Child] = {}

    def of(self, *labels: str) -> Child:
        """Return the child with these label values; creates its sample."""
        child = self._children.get(labels)
        if child is None:
            child = self._children[labels] = self._family.labels(*self._values, *labels)
        return child

    def clear(self) -> None:
        """Remove all samples."""
        self._family.clear()
        self._children.clear()


class FamilyFactory:
    """Factory of one engine core's families. `custom` replaces the buckets of the named histograms."""

    def __init__(self, registry: CollectorRegistry, model_name: str, engine: str, custom: Buckets) -> None:
        self._registry, self._custom = registry, custom
        self._values = (model_name, engine)
        self._unused = set(custom)

    def gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, LABELS, registry=self._registry).labels(*self._values)

    def labelled_gauge(self, name: str, text: str, *labels: str) -> Labelled[Gauge]:
        return Labelled(Gauge(name, text, (*LABELS, *labels), registry=self._registry), self._values)

    def counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, LABELS, registry=self._registry).labels(*self._values)

    def labelled_counter(self, name: str, text: str, *labels: str) -> Labelled[Counter]:
        return Labelled(Counter(name, text, (*LABELS, *labels), registry=self._registry), self._values)

    def histogram(self, name: str, text: str, buckets: Sequence[float]) -> BulkHistogram:
        return self.labelled_histogram(name, text, buckets).of()

    def labelled_histogram(
        self, name: str, text: str, buckets: Sequence[float], *labels: str
    ) -> Labelled[BulkHistogram]:
        self._unused.discard(name)
        bounds = self._custom.get(name, buckets)
        family = BulkHistogram(name, text, (*LABELS, *labels), registry=self._registry, buckets=bounds)
        return Labelled(family, self._values)

    def check_all_used(self) -> None:
        """Raise ConfigError if custom buckets name an unknown histogram."""
        if self._unused:
            raise ConfigError(f"--custom-histogram-buckets : unknown histogram {sorted(self._unused)[0]}")

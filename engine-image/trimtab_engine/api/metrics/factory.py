"""How families of metrics are made: vLLM's labels on each, one registry per engine, buckets that can be replaced."""

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
"""Upper bounds by name of a histogram family, such as vllm:time_to_first_token_seconds."""

Child = TypeVar("Child", Counter, Gauge, "BulkHistogram")


class LazyRegistry(CollectorRegistry):
    """Calls `before_look` when somebody looks, so that what happens often is counted many at a time."""

    def __init__(self, before_look: Callable[[], None]) -> None:
        super().__init__()
        self._before_look = before_look

    def collect(self) -> Iterable[Metric]:
        self._before_look()
        return super().collect()


class BulkHistogram(Histogram):
    """A histogram that takes many values at once: one look at each bucket's lock instead of one per value."""

    def observe_all(self, values: Sequence[float]) -> None:
        """As observe(), for each of them."""
        self._sum.inc(sum(values))
        for place, count in Counted(bisect_left(self._upper_bounds, value) for value in values).items():
            self._buckets[place].inc(count)


class Labelled(Generic[Child]):
    """A family that has labels beside the model's and the engine's. Each child is looked up once: prometheus_client
    takes a lock and formats every label at each look, which steps would pay for a dozen times."""

    def __init__(self, family: Child, values: Sequence[str]) -> None:
        self._family: Child = family
        self._values = values
        self._children: dict[tuple[str, ...], Child] = {}

    def of(self, *labels: str) -> Child:
        """The child with these values of the further labels; it shows from now on."""
        child = self._children.get(labels)
        if child is None:
            child = self._children[labels] = self._family.labels(*self._values, *labels)
        return child

    def clear(self) -> None:
        """Show none any more."""
        self._family.clear()
        self._children.clear()


class FamilyFactory:
    """Makes families for one engine core. `custom` replaces the buckets of the histograms that it names."""

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
        """Raise ConfigError when custom buckets name a histogram that there is not."""
        if self._unused:
            raise ConfigError(
                f"--custom-histogram-buckets names {sorted(self._unused)[0]}, which is no histogram of /metrics"
            )

"""How families of metrics are made: vLLM's labels on each, one registry per engine, buckets that can be replaced."""

from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from trimtab_engine.errors import ConfigError

LABELS = ("model_name", "engine")
LATENCY_BUCKETS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip

Buckets = Mapping[str, Sequence[float]]
"""Upper bounds by name of a histogram family, such as vllm:time_to_first_token_seconds."""


class FamilyFactory:
    """Makes families for one engine core. `custom` replaces the buckets of the histograms that it names."""

    def __init__(self, registry: CollectorRegistry, model_name: str, engine: str, custom: Buckets) -> None:
        self._registry, self._custom = registry, custom
        self.values = (model_name, engine)
        self._unused = set(custom)

    def gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, LABELS, registry=self._registry).labels(*self.values)

    def labelled_gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, (*LABELS, *labels), registry=self._registry)

    def counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, LABELS, registry=self._registry).labels(*self.values)

    def labelled_counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, (*LABELS, *labels), registry=self._registry)

    def histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return self.labelled_histogram(name, text, buckets).labels(*self.values)

    def labelled_histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
        self._unused.discard(name)
        bounds = self._custom.get(name, buckets)
        return Histogram(name, text, (*LABELS, *labels), registry=self._registry, buckets=bounds)

    def check_all_used(self) -> None:
        """Raise ConfigError when custom buckets name a histogram that there is not."""
        if self._unused:
            raise ConfigError(
                f"--custom-histogram-buckets names {sorted(self._unused)[0]}, which is no histogram of /metrics"
            )

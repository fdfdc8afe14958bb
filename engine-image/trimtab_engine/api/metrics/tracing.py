"""OpenTelemetry spans, an optional extra: one span per sequence, named and attributed as vLLM's (`llm_request`).

A request that brings a W3C traceparent continues its caller's trace. Spans are made when a sequence has ended, from the
times that the metrics have anyway, so tracing costs nothing while tokens flow.
"""

import importlib.util
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from trimtab_engine.api.metrics.observations import FinishedSequence
from trimtab_engine.errors import ConfigError
from trimtab_engine.scheduling.sampling import Sampling

if TYPE_CHECKING:  # the packages may be absent
    from opentelemetry.sdk.trace.export import SpanExporter

SPAN_NAME = "llm_request"
TRACE_HEADERS = ("traceparent", "tracestate")
EXPORT_SECONDS = 2.0  # for one batch to reach the collector
CLOSE_SECONDS = 3.0  # for the last spans to leave; a collector that is gone does not hold up the end


def check_endpoint(endpoint: str) -> None:
    """Raises ConfigError for what is no address of a collector."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"--otlp-traces-endpoint {endpoint} is no URL; write one such as http://collector:4318/v1/traces"
        )


def check_tracing_is_installed() -> None:
    """Raises ConfigError without the extra's packages."""
    if importlib.util.find_spec("opentelemetry") is None or importlib.util.find_spec("opentelemetry.sdk") is None:
        raise ConfigError(
            "--otlp-traces-endpoint needs the OpenTelemetry packages, which are not installed; install the extra "
            "`tracing`, or leave the flag out"
        )


def tracer_of(endpoint: str | None, model_name: str) -> "Tracer | None":
    return Tracer.to(endpoint, model_name) if endpoint is not None else None


class Tracer:
    """Makes spans and hands them to the exporter in batches, in a thread of its own."""

    def __init__(self, exporter: "SpanExporter", model_name: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._model_name = model_name
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": "trimtab-engine"}), shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("trimtab_engine")
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def to(cls, endpoint: str, model_name: str) -> "Tracer":
        """Spans go to an OTLP collector over HTTP, such as http://collector:4318/v1/traces."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        return cls(OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_SECONDS), model_name)

    def record(
        self, request_id: str, life: FinishedSequence, sampling: Sampling | None, n: int, headers: Mapping[str, str]
    ) -> None:
        """One sequence has ended. `headers` are those of TRACE_HEADERS that the request brought. `sampling` None: it
        was to have no tokens."""
        from opentelemetry.trace import SpanKind

        to_wall_clock = time.time_ns() - time.monotonic_ns()
        span = self._tracer.start_span(
            SPAN_NAME,
            context=self._propagator.extract(headers),
            kind=SpanKind.SERVER,
            start_time=to_wall_clock + int(life.arrival * 1e9),
            attributes={
                "gen_ai.response.model": self._model_name,
                "gen_ai.request.id": request_id,
                **_asked(sampling, n),
                "gen_ai.response.finish_reasons": (life.reason,),
                "gen_ai.usage.prompt_tokens": life.num_prompt_tokens,
                "gen_ai.usage.completion_tokens": life.num_generation_tokens,
                **_latencies(life),
            },
        )
        span.end(to_wall_clock + int(life.end * 1e9))

    def close(self) -> None:
        """Send what is left, for up to CLOSE_SECONDS."""
        thread = threading.Thread(target=self._provider.shutdown, daemon=True)
        thread.start()
        thread.join(CLOSE_SECONDS)


def _asked(sampling: Sampling | None, n: int) -> dict[str, float]:
    if sampling is None:
        return {}
    return {
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.n": n,
    }


def _latencies(life: FinishedSequence) -> dict[str, float]:
    """Seconds by vLLM's names; phases that were not reached are left out."""
    seconds = {"e2e": life.end - life.arrival}
    if life.scheduled is not None:
        seconds["time_in_queue"] = life.scheduled - life.arrival
    if life.first_token is not None:
        seconds["time_to_first_token"] = life.first_token - life.arrival
    if life.scheduled is not None and life.first_token is not None and life.last_token is not None:
        seconds["time_in_model_prefill"] = life.first_token - life.scheduled
        seconds["time_in_model_decode"] = life.last_token - life.first_token
        seconds["time_in_model_inference"] = life.last_token - life.scheduled
    return {f"gen_ai.latency.{name}": value for name, value in seconds.items()}

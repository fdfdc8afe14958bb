"""OpenTelemetry spans, an optional extra: one span per sequence, with vLLM's name and attributes (`llm_request`).

A request with a W3C traceparent continues its caller's trace. Spans are created after a sequence has ended, from times
that the metrics record anyway, so tracing costs nothing during generation.
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

if TYPE_CHECKING:  # optional packages
    from opentelemetry.sdk.trace.export import SpanExporter

SPAN_NAME = "llm_request"
TRACE_HEADERS = ("traceparent", "tracestate")
EXPORT_SECONDS = 2.0  # timeout of one batch
CLOSE_SECONDS = 3.0  # time for the last spans; an unreachable collector does not delay the shutdown


def check_endpoint(endpoint: str) -> None:
    """Raise ConfigError if the endpoint is not a URL."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"--otlp-traces-endpoint {endpoint} is not a URL; use one such as http://collector:4318/v1/traces"
        )


def check_tracing_is_installed() -> None:
    """Raise ConfigError if the extra's packages are missing."""
    if importlib.util.find_spec("opentelemetry") is None or importlib.util.find_spec("opentelemetry.sdk") is None:
        raise ConfigError(
            "--otlp-traces-endpoint requires the OpenTelemetry packages; install the extra `tracing`, or remove the "
            "flag"
        )


def tracer_of(endpoint: str | None, model_name: str) -> "Tracer | None":
    return Tracer.to(endpoint, model_name) if endpoint is not None else None


class Tracer:
    """Creates spans and exports them in batches in a background thread."""

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
        """Return a tracer that exports to an OTLP collector over HTTP, such as http://collector:4318/v1/traces."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        return cls(OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_SECONDS), model_name)

    def record(
        self, request_id: str, sequence: FinishedSequence, sampling: Sampling | None, n: int, headers: Mapping[str, str]
    ) -> None:
        """Create the span of a finished sequence. `headers` are the request's TRACE_HEADERS; `sampling` is None for
        pooling.
        """
        from opentelemetry.trace import SpanKind

        to_wall_clock = time.time_ns() - time.monotonic_ns()
        span = self._tracer.start_span(
            SPAN_NAME,
            context=self._propagator.extract(headers),
            kind=SpanKind.SERVER,
            start_time=to_wall_clock + int(sequence.arrival * 1e9),
            attributes={
                "gen_ai.response.model": self._model_name,
                "gen_ai.request.id": request_id,
                **_request_attributes(sampling, n),
                "gen_ai.response.finish_reasons": (sequence.reason,),
                "gen_ai.usage.prompt_tokens": sequence.num_prompt_tokens,
                "gen_ai.usage.completion_tokens": sequence.num_generation_tokens,
                **_latencies(sequence),
            },
        )
        span.end(to_wall_clock + int(sequence.end * 1e9))

    def close(self) -> None:
        """Send the remaining spans, for up to CLOSE_SECONDS."""
        thread = threading.Thread(target=self._provider.shutdown, daemon=True)
        thread.start()
        thread.join(CLOSE_SECONDS)


def _request_attributes(sampling: Sampling | None, n: int) -> dict[str, float]:
    if sampling is None:
        return {}
    return {
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.n": n,
    }


def _latencies(sequence: FinishedSequence) -> dict[str, float]:
    """Return seconds by vLLM's attribute names; phases that were not reached are omitted."""
    seconds = {"e2e": sequence.end - sequence.arrival}
    if sequence.scheduled is not None:
        seconds["time_in_queue"] = sequence.scheduled - sequence.arrival
    if sequence.first_token is not None:
        seconds["time_to_first_token"] = sequence.first_token - sequence.arrival
    if sequence.scheduled is not None and sequence.first_token is not None and sequence.last_token is not None:
        seconds["time_in_model_prefill"] = sequence.first_token - sequence.scheduled
        seconds["time_in_model_decode"] = sequence.last_token - sequence.first_token
        seconds["time_in_model_inference"] = sequence.last_token - sequence.scheduled
    return {f"gen_ai.latency.{name}": value for name, value in seconds.items()}

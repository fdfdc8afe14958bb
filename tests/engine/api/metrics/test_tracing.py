"""OpenTelemetry spans: vLLM's name and attributes, the caller's trace; missing packages, missing collector."""

import importlib.util
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from trimtab_engine.api.metrics.observations import FinishedSequence
from trimtab_engine.api.metrics.tracing import Tracer, check_tracing_is_installed
from trimtab_engine.errors import ConfigError
from trimtab_engine.scheduling.sampling import Sampling

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CALLER = {"traceparent": f"00-{TRACE_ID}-b7ad6b7169203331-01"}


def make_finished_sequence(**fields: Any) -> FinishedSequence:
    now = time.monotonic()
    times = {"arrival": now - 8, "scheduled": now - 7, "first_token": now - 5, "last_token": now - 1, "end": now}
    counts = {"num_prompt_tokens": 5, "num_generation_tokens": 3, "max_tokens": 8, "num_preemptions": 0}
    return FinishedSequence(**{"reason": "stop", **times, **counts, **fields})


def span_of(life: FinishedSequence, headers: dict[str, str]) -> Any:
    exporter = InMemorySpanExporter()
    tracer = Tracer(exporter, "m")
    tracer.record("cmpl-1", life, Sampling(max_tokens=8, temperature=0.5), 2, headers)
    tracer.close()
    (span,) = exporter.get_finished_spans()
    return span


def test_span_has_vllm_name_attributes_and_request_times() -> None:
    span = span_of(make_finished_sequence(), {})
    assert span.name == "llm_request"
    assert span.kind.name == "SERVER"
    assert (span.end_time - span.start_time) / 1e9 == pytest.approx(8, abs=0.001)
    assert span.end_time / 1e9 == pytest.approx(time.time(), abs=60)
    values = dict(span.attributes)
    latencies = {k: round(values.pop(k)) for k in list(values) if k.startswith("gen_ai.latency.")}
    assert values == {
        "gen_ai.response.model": "m",
        "gen_ai.request.id": "cmpl-1",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.max_tokens": 8,
        "gen_ai.request.n": 2,
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.prompt_tokens": 5,
        "gen_ai.usage.completion_tokens": 3,
    }
    assert latencies == {
        "gen_ai.latency.e2e": 8,
        "gen_ai.latency.time_in_queue": 1,
        "gen_ai.latency.time_to_first_token": 3,
        "gen_ai.latency.time_in_model_prefill": 2,
        "gen_ai.latency.time_in_model_decode": 4,
        "gen_ai.latency.time_in_model_inference": 6,
    }


def test_span_continues_callers_trace() -> None:
    span = span_of(make_finished_sequence(), CALLER)
    assert format(span.context.trace_id, "032x") == TRACE_ID
    assert format(span.parent.span_id, "016x") == "b7ad6b7169203331"


@pytest.mark.parametrize("header", ["", "nonsense", "00-0-0-01", "ff-" + "0" * 32 + "-" + "0" * 16 + "-01"])
def test_invalid_traceparent_starts_a_new_trace(header: str) -> None:
    assert span_of(make_finished_sequence(), {"traceparent": header}).parent is None


def test_request_that_never_ran_only_has_total_time() -> None:
    span = span_of(make_finished_sequence(reason="abort", scheduled=None, first_token=None, last_token=None), {})
    assert [name for name in span.attributes if "latency" in name] == ["gen_ai.latency.e2e"]


def test_missing_packages_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    check_tracing_is_installed()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="install the extra `tracing`"):
        check_tracing_is_installed()


class Collector:
    """Receives spans over HTTP, as an OTLP collector does."""

    def __init__(self) -> None:
        collected: list[Any] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                request = ExportTraceServiceRequest.FromString(body)
                collected.extend(s for r in request.resource_spans for scope in r.scope_spans for s in scope.spans)
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.spans = collected
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}/v1/traces"


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.server.shutdown()
    collector.server.server_close()


@pytest.mark.parametrize("flags", [(), ("--api-server-count", "2")])
def test_server_sends_spans_to_collector(start_server: Any, collector: Collector, flags: tuple[str, ...]) -> None:
    server = start_server("--otlp-traces-endpoint", collector.url, *flags)
    headers = {**CALLER, "X-Request-Id": "r1"}
    server.http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 2, "n": 2}, headers=headers)
    server.process.terminate()  # the last spans are sent at shutdown
    assert server.process.wait(60) == 0
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE_ID}
    ids = [a.value.string_value for s in collector.spans for a in s.attributes if a.key == "gen_ai.request.id"]
    assert sorted(ids) == ["cmpl-r1-0", "cmpl-r1-1"]


def test_unreachable_collector_does_not_delay_shutdown(start_server: Any) -> None:
    server = start_server("--otlp-traces-endpoint", "http://127.0.0.1:9/v1/traces")
    assert server.http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 2}).status_code == 200
    server.process.terminate()
    assert server.process.wait(60) == 0
    assert "Traceback" not in server.log.read_text()

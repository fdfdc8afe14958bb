"""A Prometheus that keeps what it is given and answers range selectors as the real one does: matchers are evaluated,
and each query is read by a real parser of PromQL, which refuses what is none.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import httpx
import promql_parser
from trimtab_operator.tuner.samples import Histogram, Sample, Work

NAMESPACE = "n"
Row = tuple[str, dict[str, str], float]


def exposed(sample: Sample) -> list[Row]:
    """The series that an engine shows for a sample: name, labels, value."""
    counters, gauges = sample.counters, sample.gauges
    rows: list[Row] = [
        ("vllm:num_requests_running", {}, gauges.running),
        ("vllm:num_requests_waiting", {}, gauges.waiting),
        ("vllm:kv_cache_usage_perc", {}, gauges.kv_usage),
        ("vllm:generation_tokens_total", {}, counters.generated_tokens),
        ("vllm:prompt_tokens_total", {}, counters.prompt_tokens),
        ("vllm:request_success_total", {"finished_reason": "stop"}, counters.finished),
        *(
            ("trimtab_preempted_requests_total", {"mode": "recompute", "reason": reason}, count)
            for reason, count in counters.preemptions.items()
        ),
        *(("trimtab_blocked_seconds_total", {"reason": why}, s) for why, s in counters.blocked_seconds.items()),
    ]
    for name, value in (
        ("trimtab_arrived_requests_total", counters.arrived),
        ("trimtab_arrived_prompt_tokens_total", counters.arrived_prompt_tokens),
        ("trimtab_recomputed_tokens_total", counters.recomputed_tokens),
        ("trimtab_config_generation", gauges.config_generation),
        ("trimtab_waiting_tokens", gauges.waiting_tokens),
        ("trimtab_oldest_waiting_seconds", gauges.oldest_waiting_seconds),
    ):
        if value is not None:
            rows.append((name, {}, value))
    for kind, work in (("decode", counters.decode), ("prefill", counters.prefill)):
        rows += _of_steps(kind, work) if work is not None else []
    for name, histogram in (
        ("vllm:time_to_first_token_seconds", sample.ttft),
        ("vllm:inter_token_latency_seconds", sample.itl),
        ("vllm:request_time_per_output_token_seconds", sample.mean_itl),
    ):
        rows += _of_histogram(name, histogram) if histogram is not None else []
    return [(name, {"engine": "0", "model_name": "m", **labels}, float(value)) for name, labels, value in rows]


def _of_steps(kind: str, work: Work) -> list[Row]:
    sums = {
        "seconds_count": work.steps,
        "seconds_sum": work.seconds,
        "tokens_total": work.tokens,
        "sequences_total": work.sequences,
        "context_tokens_total": work.context,
        "attended_tokens_total": work.attended,
    }
    return [(f"trimtab_step_{name}", {"kind": kind}, value) for name, value in sums.items()]


def _of_histogram(name: str, histogram: Histogram) -> list[Row]:
    edges = ["+Inf" if edge == math.inf else f"{edge:g}" for edge in histogram.edges]
    buckets = [(f"{name}_bucket", {"le": edge}, n) for edge, n in zip(edges, histogram.counts, strict=True)]
    return [*buckets, (f"{name}_sum", {}, histogram.total), (f"{name}_count", {}, histogram.counts[-1])]


@dataclass
class FakePrometheus:
    """`scrape` gives it what a pod shows; `transport` answers the operator. `clock` is its own."""

    clock: Callable[[], float]
    stored: dict[tuple[tuple[str, str], ...], list[tuple[float, float]]] = field(default_factory=dict)
    queries: list[str] = field(default_factory=list)
    requests: list[httpx.Request] = field(default_factory=list)
    answer: Callable[[httpx.Request], httpx.Response] | None = None
    """What it answers instead, while it is broken."""

    def scrape(
        self,
        rows: Iterable[Row],
        *,
        pod: str = "m-g0-0",
        at: float | None = None,
        target: Mapping[str, str] | None = None,
    ) -> None:
        """Keep what a pod shows now, under the labels that scraping gives."""
        given = {"namespace": NAMESPACE, "pod": pod, "job": "engines", "instance": "10.0.0.1:8000", **(target or {})}
        when = self.clock() if at is None else at
        for name, labels, value in rows:
            key = tuple(sorted({"__name__": name, **labels, **given}.items()))
            self.stored.setdefault(key, []).append((when, value))

    @property
    def transport(self) -> httpx.AsyncBaseTransport:
        """For an HTTP client."""
        return _Streaming(self._answered)

    def _answered(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        if self.answer is not None:
            return self.answer(request)
        asked = dict(httpx.QueryParams(request.content.decode()))
        self.queries.append(asked["query"])
        if asked["query"] == "time()":
            return answered("scalar", [self.clock(), f"{self.clock()}"])
        try:
            parsed = promql_parser.parse(asked["query"])
        except ValueError as error:
            return httpx.Response(400, json={"status": "error", "errorType": "bad_data", "error": str(error)})
        assert isinstance(parsed, promql_parser.MatrixSelector)
        at = float(asked.get("time", self.clock()))
        return answered("matrix", self._matrix(parsed, at))

    def _matrix(self, asked: promql_parser.MatrixSelector, at: float) -> list[dict[str, object]]:
        matchers = [(m.name, m.op, m.value) for m in asked.vector_selector.matchers.matchers]
        found: list[dict[str, object]] = []
        for key, samples in self.stored.items():
            labels = dict(key)
            inside = [[t, number(v)] for t, v in samples if at - asked.range.total_seconds() < t <= at]
            if inside and all(_matches(op, labels.get(name, ""), value) for name, op, value in matchers):
                found.append({"metric": labels, "values": inside})
        return found


@dataclass
class _Streaming(httpx.AsyncBaseTransport):
    """Answers whose body is still to be read, as those of a socket are."""

    answer: Callable[[httpx.Request], httpx.Response]

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        await request.aread()
        made = self.answer(request)
        return httpx.Response(made.status_code, headers=made.headers, stream=httpx.ByteStream(made.content))


def _matches(op: promql_parser.MatchOp, have: str, want: str) -> bool:
    if op == promql_parser.MatchOp.Equal:
        return have == want
    assert op == promql_parser.MatchOp.Re
    return re.fullmatch(want, have) is not None


def answered(kind: str, result: object) -> httpx.Response:
    """A success, as Prometheus writes it."""
    return httpx.Response(
        200, content=json.dumps({"status": "success", "data": {"resultType": kind, "result": result}})
    )


def number(value: float) -> str:
    """A value as Prometheus writes it."""
    if math.isnan(value):
        return "NaN"
    return f"{value!r}" if math.isfinite(value) else ("+Inf" if value > 0 else "-Inf")

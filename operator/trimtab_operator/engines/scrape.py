"""Observation of one engine: a scrape of its pod joined with its admin API. I/O only, no rules.

Impossible values are passed on; the tuner validates them.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeVar

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample as PageSample
from pydantic import BaseModel, Field, ValidationError

from trimtab_operator.engines.admin_client import ConfigReport, EngineClient, Failure, Layout, MemoryLedger
from trimtab_operator.engines.http import Reply, Unreachable, fetch, pod_url
from trimtab_operator.layout.degrees import Degrees
from trimtab_operator.observed.engines import EngineObservation, EngineTarget
from trimtab_operator.tuner.moves import Reason
from trimtab_operator.tuner.samples import RequestUpdates, Sample, Source
from trimtab_operator.tuner.samples.requests import parse_request_updates
from trimtab_operator.tuner.samples.series import USED_NAMES, Labels, Unreadable, sample_of

MAX_METRICS_BYTES = 1 << 20  # about ten times what an engine exposes
MAX_SERIES = 8000  # used series: sixty data-parallel ranks have fewer
LARGE_PAGE_BYTES = 1 << 17  # larger pages are filtered in a thread, to keep the event loop responsive
MAX_CACHED_HEADS = 8192  # cached heads: of about sixty engines, at most 8 MB
MAX_HEAD_CHARS = 400  # characters of a cached head
NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*(?:[eE][+-]?\d+)?|Inf|NaN)", re.ASCII)
LARGE_BODY_BYTES = 1 << 13  # larger bodies are parsed in a thread: about 2 ms
USED_PREFIXES = tuple(sorted(name.encode() for name in USED_NAMES))
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ScrapeFailure:
    """Reason why metrics are missing or unusable."""

    reason: str
    kind: Reason = Reason.METRICS_MISSING


@dataclass(frozen=True, slots=True)
class PrometheusReading:
    """Pending Prometheus result for one pod; one query covers all pods of a resource. With `allow_scrape`, the pod
    is scraped if the result is unusable.
    """

    reading: asyncio.Task[Mapping[str, Sample | ScrapeFailure]]
    pod: str
    allow_scrape: bool


@dataclass(frozen=True, slots=True)
class _MetricsReading:
    """Metrics of one engine and their source."""

    found: Sample | ScrapeFailure
    source: Source
    fallback_reason: str | None = None
    page: bytes | None = None


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """Response of `/startupz`: loading stage and its progress, 0..100 percent."""

    stage: str
    percent: float
    message: str | None = None
    downloaded_bytes: int | None = None
    """Bytes of the model downloaded before loading."""


async def observe_engine(
    target: EngineTarget,
    *,
    http: aiohttp.ClientSession,
    token: str,
    after_request: int | None = None,
    stored: PrometheusReading | None = None,
    clock: Callable[[], float] = time.time,
) -> EngineObservation:
    """Observe one engine with concurrent requests.

    While it loads: progress and configuration. When it is Ready: metrics (from Prometheus if `stored` is given),
    configuration, memory ledger, the requests that finished after number `after_request`, and the layout if it is not
    known yet.
    """
    assert target.address is not None
    api = pod_url(target.address, target.api_port)
    client = EngineClient(http, pod_url(target.address, target.admin_port), token)
    if not target.ready:
        progress, config = await asyncio.gather(load_progress(http, api), client.config())
        seen, queue = (config.for_tuner(), config.queue()) if isinstance(config, ConfigReport) else (None, None)
        load = None if progress is None else (progress.stage, round(progress.percent))
        said = None if progress is None else progress.message
        fetched = None if progress is None else progress.downloaded_bytes
        return EngineObservation(
            False, "not ready", config=seen, queue=queue, load=load, load_message=said, downloaded_bytes=fetched
        )
    read, told, config, memory, layout = await asyncio.gather(
        _read(http, api, stored, clock=clock),
        _requests(client, after_request, clock=clock),
        client.config(),
        client.memory(),
        _layout(client, target),
    )
    scraped, (news, next_request) = read.found, told
    report = config if isinstance(config, ConfigReport) else None
    problem = _problem(scraped, config, memory)
    return EngineObservation(
        True,
        problem,
        scraped.kind if isinstance(scraped, ScrapeFailure) else Reason.METRICS_MISSING,
        source=read.source,
        fallback_reason=read.fallback_reason,
        sample=replace(scraped, requests=news) if isinstance(scraped, Sample) else None,
        config=None if report is None else report.for_tuner(),
        ledger=memory.for_tuner() if isinstance(memory, MemoryLedger) else None,
        applied=None if report is None else report.applied,
        queue=None if report is None else report.queue(),
        layout=layout,
        next_request=next_request if isinstance(scraped, Sample) else None,  # otherwise they are requested again
        page=read.page if problem is None and read.fallback_reason is None else None,
    )


def _problem(
    scraped: Sample | ScrapeFailure, config: ConfigReport | Failure, memory: MemoryLedger | Failure
) -> str | None:
    if isinstance(scraped, ScrapeFailure):
        return scraped.reason
    if not isinstance(config, ConfigReport):
        return f"configuration: {config.message}"
    if not isinstance(memory, MemoryLedger):
        return f"memory ledger: {memory.message}"
    return None


async def _read(
    http: aiohttp.ClientSession, api_url: str, stored: PrometheusReading | None, *, clock: Callable[[], float]
) -> _MetricsReading:
    """Return the metrics from Prometheus, or from the pod if Prometheus is not used or its result is unusable."""
    if stored is None:
        lines = await fetch_metric_lines(http, api_url)
        if isinstance(lines, ScrapeFailure):
            return _MetricsReading(lines, Source.PODS)
        return _MetricsReading(await _parse_body(_parsed, lines, at=clock()), Source.PODS, page=hash_of(lines))
    found = (await asyncio.shield(stored.reading))[stored.pod]
    if isinstance(found, Sample) or not stored.allow_scrape:
        return _MetricsReading(found, Source.PROMETHEUS)
    scraped = await scrape(http, api_url, clock=clock)
    if isinstance(scraped, Sample):
        return _MetricsReading(scraped, Source.PODS, fallback_reason=found.reason)
    return _MetricsReading(ScrapeFailure(f"{found.reason}; and {scraped.reason}", found.kind), Source.PODS)


async def _layout(client: EngineClient, target: EngineTarget) -> Degrees | None:
    layout = await client.layout() if target.needs_layout else None
    return layout.degrees() if isinstance(layout, Layout) else None


async def _requests(
    client: EngineClient, after: int | None, *, clock: Callable[[], float]
) -> tuple[RequestUpdates | None, int | None]:
    """Return the finished requests and the number for the next call. An older engine without this endpoint can still
    be tuned.
    """
    body = await client.requests(after)
    if not isinstance(body, bytes):
        return None, None
    return await _parse_body(parse_requests, body, at=clock())


def parse_requests(body: bytes, *, at: float) -> tuple[RequestUpdates | None, int | None]:
    """Parse a list of requests. (None, None) if it violates docs/reference/contract.md."""
    try:
        return parse_request_updates(json.loads(body), at=at)
    except (Unreadable, ValueError, RecursionError):
        return None, None


async def scrape(
    http: aiohttp.ClientSession, api_url: str, *, clock: Callable[[], float] = time.time
) -> Sample | ScrapeFailure:
    """Fetch and parse `/metrics`. The sample has the operator's time of arrival."""
    lines = await fetch_metric_lines(http, api_url)
    return lines if isinstance(lines, ScrapeFailure) else await _parse_body(_parsed, lines, at=clock())


async def fetch_metric_lines(http: aiohttp.ClientSession, api_url: str) -> bytes | ScrapeFailure:
    """Fetch `/metrics` and return the lines that are used."""
    reply = await fetch(http, "GET", f"{api_url}/metrics", max_bytes=MAX_METRICS_BYTES)
    if isinstance(reply, Unreachable):
        return ScrapeFailure(reply.message)
    if reply.status != 200:
        return ScrapeFailure(f"{api_url}/metrics responded with status {reply.status}")
    if len(reply.body) <= LARGE_PAGE_BYTES:
        return _lines_to_read(reply.body)
    return await asyncio.to_thread(_lines_to_read, reply.body)


def hash_of(lines: bytes) -> bytes:
    """Return a hash of the metric lines, to detect changes."""
    return hashlib.blake2b(lines, digest_size=16).digest()


async def _parse_body(read: Callable[..., T], body: bytes, *, at: float) -> T:
    """Parse a body; a large one in a thread."""
    return read(body, at=at) if len(body) <= LARGE_BODY_BYTES else await asyncio.to_thread(read, body, at=at)


Series = dict[str, list[tuple[Labels, float]]]


def parse_metrics(page: bytes, *, at: float) -> Sample | ScrapeFailure:
    """Parse a page in the Prometheus text format. Return a failure with the reason if it is malformed or lacks a
    metric.
    """
    return _parsed(_lines_to_read(page), at=at)


def _parsed(lines: bytes, *, at: float) -> Sample | ScrapeFailure:
    try:
        return sample_of(_series(lines), at=at)
    except Unreadable as error:
        return ScrapeFailure(str(error))
    except (ValueError, KeyError, IndexError) as error:
        return ScrapeFailure(f"the metrics page cannot be read: {error}")


def _lines_to_read(page: bytes) -> bytes:
    """Return the lines of the series that are used, about a hundredth of all."""
    return b"\n".join((*(line for line in page.split(b"\n") if line.startswith(USED_PREFIXES)), b""))


def _series(lines: bytes) -> Series:
    """Return all series by name.

    Raises:
        ValueError: The text is malformed, has too many series, or has a duplicate.
    """
    count = lines.count(b"\n")
    if count > MAX_SERIES:
        raise ValueError(f"it has {count:,} series; at most {MAX_SERIES:,} are supported")
    series: Series = {}
    seen: set[_Key] = set()
    for line in lines.decode().split("\n"):
        for head, value in _samples(line):
            if head.key in seen:
                raise ValueError(f"{head.key[0]} appears twice with the same labels")
            seen.add(head.key)
            series.setdefault(head.key[0], []).append((head.labels, value))
    return series


_Key = tuple[str, tuple[tuple[str, str], ...]]


@dataclass(frozen=True, slots=True)
class _Head:
    """Name and labels of a series: its line without the value."""

    key: _Key
    """Name and sorted labels."""
    labels: Labels


def _samples(line: str) -> list[tuple[_Head, float]]:
    """Return the samples of a line. The head is cached, since only values change between polls."""
    text, _, value = line.rpartition(" ")
    if 0 < len(text) <= MAX_HEAD_CHARS:
        head = _head(text)
        if head is not None and NUMBER.fullmatch(value):
            return [(head, float(value))]
    return [(_head_of(sample), float(sample.value)) for sample in _parsed_line(line)]


@lru_cache(maxsize=MAX_CACHED_HEADS)
def _head(text: str) -> _Head | None:
    """Parse a line without its value. None if it is not exactly one sample."""
    try:
        found = _parsed_line(f"{text} 0")
    except (ValueError, KeyError, IndexError):
        return None
    return _head_of(found[0]) if len(found) == 1 and found[0].timestamp is None else None


def _head_of(sample: PageSample) -> _Head:
    return _Head((sample.name, tuple(sorted(sample.labels.items()))), sample.labels)


def _parsed_line(line: str) -> list[PageSample]:
    return [sample for family in text_string_to_metric_families(line) for sample in family.samples]


async def load_progress(http: aiohttp.ClientSession, api_url: str) -> LoadProgress | None:
    """Return the progress from `/startupz`, which is served while the engine loads. None if the response is missing
    or malformed.
    """
    reply = await fetch(http, "GET", f"{api_url}/startupz")
    if not isinstance(reply, Reply) or reply.status not in (200, 503):
        return None
    try:
        body = _StartupBody.model_validate_json(reply.body)
    except ValidationError:
        return None
    return LoadProgress(body.stage, body.percent, body.message, body.downloaded_bytes)


class _StartupBody(BaseModel):
    stage: str = Field(max_length=40)
    percent: float = Field(ge=0, le=100, allow_inf_nan=False)
    message: str | None = Field(default=None, max_length=256)
    downloaded_bytes: int | None = Field(default=None, ge=0, le=1 << 60)

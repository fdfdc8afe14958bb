"""What the engine of one group reports now: a scrape of its pod, joined with its admin API. I/O, no rules.

Impossible values are passed on as they are; the tuner judges them and says so.
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
MAX_SERIES = 8000  # of those that are read: an engine of sixty data-parallel ranks has fewer
LARGE_PAGE_BYTES = 1 << 17  # from which on its lines are chosen beside the event loop: it would hold up everybody
KNOWN_HEADS = 8192  # lines without their values that are remembered: of some sixty engines, in 8 MB at most
LONGEST_HEAD = 400  # characters of one that is
NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*(?:[eE][+-]?\d+)?|Inf|NaN)", re.ASCII)
LARGE_BYTES = 1 << 13  # of what is parsed, likewise: some 2 ms
READ = tuple(sorted(name.encode() for name in USED_NAMES))
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ScrapeFailure:
    """Why a page of metrics cannot be used, or why there is none."""

    reason: str
    kind: Reason = Reason.METRICS_MISSING


@dataclass(frozen=True, slots=True)
class Stored:
    """What Prometheus will say of one pod: one answer tells of all pods of a resource. `may_scrape`: the pod is asked
    itself where that is of no use."""

    reading: asyncio.Task[Mapping[str, Sample | ScrapeFailure]]
    pod: str
    may_scrape: bool


@dataclass(frozen=True, slots=True)
class _Reading:
    """Metrics of one engine, and where they were read."""

    found: Sample | ScrapeFailure
    source: Source
    fallback_reason: str | None = None
    page: bytes | None = None


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """`/startupz`: how far the engine has come, 0..100 percent of the stage's whole."""

    stage: str
    percent: float
    message: str | None = None
    downloaded_bytes: int | None = None
    """What it fetched of its model before it began to load."""


async def ask(
    target: EngineTarget,
    *,
    http: aiohttp.ClientSession,
    token: str,
    after_request: int | None = None,
    stored: Stored | None = None,
    clock: Callable[[], float] = time.time,
) -> EngineObservation:
    """Ask one engine all that matters now, at once: while it loads, how far it is; when it is Ready, its metrics (from
    Prometheus where `stored` says so), its ledger and the requests that ended after number `after_request`; its
    configuration in either case, and its layout where that is still to be learned."""
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
        next_request=next_request if isinstance(scraped, Sample) else None,  # else they are asked for again
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
    http: aiohttp.ClientSession, api_url: str, stored: Stored | None, *, clock: Callable[[], float]
) -> _Reading:
    """What Prometheus has; the pod's own page where nothing is stored, or it is of no use."""
    if stored is None:
        lines = await lines_of(http, api_url)
        if isinstance(lines, ScrapeFailure):
            return _Reading(lines, Source.PODS)
        return _Reading(await _beside(_parsed, lines, at=clock()), Source.PODS, page=hash_of(lines))
    found = (await asyncio.shield(stored.reading))[stored.pod]
    if isinstance(found, Sample) or not stored.may_scrape:
        return _Reading(found, Source.PROMETHEUS)
    scraped = await scrape(http, api_url, clock=clock)
    if isinstance(scraped, Sample):
        return _Reading(scraped, Source.PODS, fallback_reason=found.reason)
    return _Reading(ScrapeFailure(f"{found.reason}; and {scraped.reason}", found.kind), Source.PODS)


async def _layout(client: EngineClient, target: EngineTarget) -> Degrees | None:
    layout = await client.layout() if target.needs_layout else None
    return layout.degrees() if isinstance(layout, Layout) else None


async def _requests(
    client: EngineClient, after: int | None, *, clock: Callable[[], float]
) -> tuple[RequestUpdates | None, int | None]:
    """The requests that ended since, and the number to ask after next time. An engine that does not list its requests
    (an older one) can be tuned all the same."""
    body = await client.requests(after)
    if not isinstance(body, bytes):
        return None, None
    return await _beside(parse_requests, body, at=clock())


def parse_requests(body: bytes, *, at: float) -> tuple[RequestUpdates | None, int | None]:
    """Read one list of requests; nothing where it is not what docs/reference/contract.md says."""
    try:
        return parse_request_updates(json.loads(body), at=at)
    except (Unreadable, ValueError, RecursionError):
        return None, None


async def scrape(
    http: aiohttp.ClientSession, api_url: str, *, clock: Callable[[], float] = time.time
) -> Sample | ScrapeFailure:
    """Fetch and parse `/metrics`. The sample is dated by the operator's clock, when the page has arrived."""
    lines = await lines_of(http, api_url)
    return lines if isinstance(lines, ScrapeFailure) else await _beside(_parsed, lines, at=clock())


async def lines_of(http: aiohttp.ClientSession, api_url: str) -> bytes | ScrapeFailure:
    """Fetch `/metrics`; the lines of it that are read."""
    reply = await fetch(http, "GET", f"{api_url}/metrics", max_bytes=MAX_METRICS_BYTES)
    if isinstance(reply, Unreachable):
        return ScrapeFailure(reply.message)
    if reply.status != 200:
        return ScrapeFailure(f"{api_url}/metrics answered with status {reply.status}")
    if len(reply.body) <= LARGE_PAGE_BYTES:
        return _lines_to_read(reply.body)
    return await asyncio.to_thread(_lines_to_read, reply.body)


def hash_of(lines: bytes) -> bytes:
    """A name for what a page says."""
    return hashlib.blake2b(lines, digest_size=16).digest()


async def _beside(read: Callable[..., T], body: bytes, *, at: float) -> T:
    """What is read from a body; a large one beside the event loop."""
    return read(body, at=at) if len(body) <= LARGE_BYTES else await asyncio.to_thread(read, body, at=at)


Series = dict[str, list[tuple[Labels, float]]]


def parse_metrics(page: bytes, *, at: float) -> Sample | ScrapeFailure:
    """Read one page of Prometheus text. A page that cannot be read, or lacks a metric, is a failure that says which."""
    return _parsed(_lines_to_read(page), at=at)


def _parsed(lines: bytes, *, at: float) -> Sample | ScrapeFailure:
    try:
        return sample_of(_series(lines), at=at)
    except Unreadable as error:
        return ScrapeFailure(str(error))
    except (ValueError, KeyError, IndexError) as error:
        return ScrapeFailure(f"the metrics page cannot be read: {error}")


def _lines_to_read(page: bytes) -> bytes:
    """The lines of the series that are read: there are a hundred times as many."""
    return b"\n".join((*(line for line in page.split(b"\n") if line.startswith(READ)), b""))


def _series(lines: bytes) -> Series:
    """Every series by name. Raises ValueError where the text is malformed, has too many or one that appears twice."""
    count = lines.count(b"\n")
    if count > MAX_SERIES:
        raise ValueError(f"it has {count:,} series where an engine has a few")
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
    """What names a series: all of its line but the value."""

    key: _Key
    """Its name, and its labels in order."""
    labels: Labels


def _samples(line: str) -> list[tuple[_Head, float]]:
    """What a line says. From look to look an engine's lines differ in their values, and what names them is known."""
    text, _, value = line.rpartition(" ")
    if 0 < len(text) <= LONGEST_HEAD:
        head = _head(text)
        if head is not None and NUMBER.fullmatch(value):
            return [(head, float(value))]
    return [(_head_of(sample), float(sample.value)) for sample in _parsed_line(line)]


@lru_cache(maxsize=KNOWN_HEADS)
def _head(text: str) -> _Head | None:
    """What names the series of this line, which is given without its value; None: it is not that what stands there."""
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
    """`/startupz`, which answers while the engine loads; None when it does not answer, or not as it should."""
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

"""What the engine of one group reports now: a scrape of its pod, joined with its admin API. I/O, no rules.

Impossible values are passed on as they are; the tuner judges them and says so.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel, Field, ValidationError

from trimtab_operator.edge.bounded_http import Reply, Unreachable, fetch, pod_url
from trimtab_operator.edge.engine_client import ConfigReport, EngineClient, Failure, Layout, MemoryLedger
from trimtab_operator.layout.degrees import Degrees
from trimtab_operator.observed.engines import EngineSeen, Target
from trimtab_operator.tuner import EngineLoad, GroupReading

MAX_METRICS_BYTES = 1 << 20  # about ten times what an engine exposes
MAX_SERIES = 2000  # of those that are read: an engine of a hundred ranks has fewer

# Names in order of preference: ours and vLLM's of today, then the names of older vLLM releases.
RUNNING = ("vllm:num_requests_running",)
WAITING = ("vllm:num_requests_waiting",)
KV_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
PREEMPTIONS = ("vllm:num_preemptions_total", "vllm:num_preemptions")
GENERATION_TOKENS = ("vllm:generation_tokens_total", "vllm:generation_tokens")
PREEMPTED_BY_REASON = "trimtab_preempted_requests_total"
CONFIG_GENERATION = "trimtab_config_generation"
READ = tuple(
    name.encode()
    for name in (
        *RUNNING,
        *WAITING,
        *KV_USAGE,
        *PREEMPTIONS,
        *GENERATION_TOKENS,
        PREEMPTED_BY_REASON,
        CONFIG_GENERATION,
    )
)
NOT_FOR_WANT_OF_ROOM = "resize"  # the reason of preemptions that a shrink of the KV cache made


@dataclass(frozen=True, slots=True)
class ScrapeFailure:
    """Why a page of metrics cannot be used."""

    reason: str


@dataclass(frozen=True, slots=True)
class EngineSample:
    """The counters and gauges of one scrape, summed over the engine's ranks. `config_generation` only Trimtab has."""

    at: float
    running: float
    waiting: float
    kv_usage: float
    preemptions_total: float
    generation_tokens_total: float
    config_generation: int | None


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """`/startupz`: how far the engine has come, 0..100 percent of the stage's whole."""

    stage: str
    percent: float


async def ask(
    target: Target, *, http: httpx.AsyncClient, token: str, clock: Callable[[], float] = time.time
) -> EngineSeen:
    """Ask one engine all that matters now, at once: while it loads, how far it is; when it is Ready, its metrics and
    ledger; its configuration in either case, and its layout where that is still to be learned."""
    assert target.address is not None
    api = pod_url(target.address, target.api_port)
    client = EngineClient(http, pod_url(target.address, target.admin_port), token)
    if not target.ready:
        progress, config = await asyncio.gather(load_progress(http, api), client.config())
        seen = config.for_tuner() if isinstance(config, ConfigReport) else None
        reading = GroupReading(target.group, False, seen, problem="not ready", instance=target.instance)
        return EngineSeen(reading, None if progress is None else (progress.stage, round(progress.percent)))
    scraped, config, memory, layout = await asyncio.gather(
        scrape(http, api, clock=clock), client.config(), client.memory(), _layout(client, target)
    )
    applied = config.applied if isinstance(config, ConfigReport) else None
    return EngineSeen(_joined(target, scraped, config, memory), applied=applied, layout=layout)


async def _layout(client: EngineClient, target: Target) -> Degrees | None:
    layout = await client.layout() if target.asks_layout else None
    return layout.degrees() if isinstance(layout, Layout) else None


def _joined(
    target: Target,
    scraped: EngineSample | ScrapeFailure,
    config: ConfigReport | Failure,
    memory: MemoryLedger | Failure,
) -> GroupReading:
    report = config if isinstance(config, ConfigReport) else None
    ledger = memory if isinstance(memory, MemoryLedger) else None
    sample = scraped if isinstance(scraped, EngineSample) else None
    load = _load(sample, report, ledger) if sample and report and ledger else None
    problem = None
    if isinstance(scraped, ScrapeFailure):
        problem = scraped.reason
    elif not isinstance(config, ConfigReport):
        problem = f"configuration: {config.message}"
    elif not isinstance(memory, MemoryLedger):
        problem = f"memory ledger: {memory.message}"
    seen = report.for_tuner() if report else None
    return GroupReading(target.group, True, seen, load, problem, target.instance)


def _load(sample: EngineSample, config: ConfigReport, ledger: MemoryLedger) -> EngineLoad:
    return EngineLoad(
        at=sample.at,
        config_generation=config.generation if sample.config_generation is None else sample.config_generation,
        preemptions_total=sample.preemptions_total,
        generation_tokens_total=sample.generation_tokens_total,
        running=sample.running,
        waiting=sample.waiting,
        kv_usage=sample.kv_usage,
        blocks_total=ledger.kv.blocks_total,
        blocks_used=ledger.kv.blocks_used,
        block_size=ledger.kv.block_size,
        bytes_per_block=ledger.kv.bytes_per_block,
        device_bytes=ledger.device_bytes,
    )


async def scrape(
    http: httpx.AsyncClient, api_url: str, *, clock: Callable[[], float] = time.time
) -> EngineSample | ScrapeFailure:
    """Fetch and parse `/metrics`. The sample is dated by the operator's clock, when the page has arrived."""
    reply = await fetch(http, "GET", f"{api_url}/metrics", max_bytes=MAX_METRICS_BYTES)
    if isinstance(reply, Unreachable):
        return ScrapeFailure(reply.message)
    if reply.status != 200:
        return ScrapeFailure(f"{api_url}/metrics answered with status {reply.status}")
    at = clock()
    return await asyncio.to_thread(parse_metrics, reply.body, at=at)  # a large page would hold up everybody


Series = dict[str, list[tuple[dict[str, str], float]]]


def parse_metrics(page: bytes, *, at: float) -> EngineSample | ScrapeFailure:
    """Read one page of Prometheus text. A page that cannot be read, or lacks a metric, is a failure that says which."""
    try:
        series = _series(_lines_to_read(page))
        values = {aliases[0]: _first(series, aliases) for aliases in (RUNNING, WAITING, KV_USAGE, GENERATION_TOKENS)}
        values[PREEMPTIONS[0]] = _preemptions(series)
        generation = _generation(series)
    except (ValueError, KeyError, IndexError) as error:
        return ScrapeFailure(f"the metrics page cannot be read: {error}")
    missing = [name for name, found in values.items() if not found]
    if missing:
        return ScrapeFailure(f"the metrics page lacks {', '.join(missing)} (is --disable-log-stats set?)")
    usage = values[KV_USAGE[0]]
    return EngineSample(
        at=at,
        running=sum(values[RUNNING[0]]),
        waiting=sum(values[WAITING[0]]),
        kv_usage=math.nan if any(math.isnan(value) for value in usage) else max(usage),
        preemptions_total=sum(values[PREEMPTIONS[0]]),
        generation_tokens_total=sum(values[GENERATION_TOKENS[0]]),
        config_generation=generation,
    )


def _lines_to_read(page: bytes) -> str:
    """The lines of the series that are read: there are a hundred times as many. Raises ValueError for too many."""
    lines = [line for line in page.split(b"\n") if line.startswith(READ)]
    if len(lines) > MAX_SERIES:
        raise ValueError(f"it has {len(lines):,} series where an engine has a few")
    return b"\n".join((*lines, b"")).decode()


def _series(page: str) -> Series:
    """Every series of the page by name. Raises ValueError where the text is malformed or a series appears twice."""
    series: Series = {}
    seen: set[tuple[str, tuple[tuple[str, str], ...]]] = set()
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            if key in seen:
                raise ValueError(f"{sample.name} appears twice with the same labels")
            seen.add(key)
            series.setdefault(sample.name, []).append((sample.labels, float(sample.value)))
    return series


def _first(series: Series, aliases: Sequence[str]) -> list[float]:
    """The values of the first alias that the page has, one for each rank; empty when it has none."""
    found = next((series[name] for name in aliases if name in series), [])
    return [value for _, value in found]


def _preemptions(series: Series) -> list[float]:
    """Preemptions for want of room. Our engine says why; those that a resize made are not evidence of pressure."""
    by_reason = series.get(PREEMPTED_BY_REASON)
    if by_reason is None:
        return _first(series, PREEMPTIONS)
    return [value for labels, value in by_reason if labels.get("reason") != NOT_FOR_WANT_OF_ROOM] or [0.0]


def _generation(series: Series) -> int | None:
    """The applied configuration's generation; the lowest, where ranks differ. None: not our engine."""
    found = _first(series, (CONFIG_GENERATION,))
    if not found:
        return None
    if not all(value.is_integer() for value in found):
        raise ValueError(f"{CONFIG_GENERATION} is not a whole number")
    return int(min(found))


async def load_progress(http: httpx.AsyncClient, api_url: str) -> LoadProgress | None:
    """`/startupz`, which answers while the engine loads; None when it does not answer, or not as it should."""
    reply = await fetch(http, "GET", f"{api_url}/startupz")
    if not isinstance(reply, Reply) or reply.status not in (200, 503):
        return None
    try:
        body = _StartupBody.model_validate_json(reply.body)
    except ValidationError:
        return None
    return LoadProgress(body.stage, body.percent)


class _StartupBody(BaseModel):
    stage: str = Field(max_length=40)
    percent: float = Field(ge=0, le=100, allow_inf_nan=False)

"""Snapshots at every tick from a range that Prometheus stored, for replays. Pure.

Metrics are as recorded. Data of the admin port is derived: the configuration from `trimtab_config_value`, the ledger
from `trimtab_memory_bytes` and `trimtab_kv_blocks`. Single requests are sampled from histograms of lengths and
latencies, whose sums are kept; prompts and answers are paired evenly, because their real pairing is unknown.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from trimtab_operator.tuner.parameters import FieldRange, Parameter, Value, typed
from trimtab_operator.tuner.samples.prometheus import (
    DuplicateTargets,
    Page,
    PrometheusNaming,
    StoredSeries,
    group_scrapes,
)
from trimtab_operator.tuner.samples.sample import (
    Config,
    Finished,
    Histogram,
    Ledger,
    Phase,
    ReplicaSnapshot,
    RequestUpdates,
    Sample,
)
from trimtab_operator.tuner.samples.series import USED_NAMES, Series, Unreadable, histogram_of, sample_of

PROMPTS, ANSWERS = ("vllm:request_prompt_tokens",), ("vllm:request_generation_tokens",)
CONFIG, MEMORY, BLOCKS = "trimtab_config_value", "trimtab_memory_bytes", "trimtab_kv_blocks"
RECORDED_NAMES = USED_NAMES | {
    CONFIG,
    MEMORY,
    BLOCKS,
    *(f"{name}_{part}" for name in PROMPTS + ANSWERS for part in ("bucket", "sum", "count")),
}
"""All series that a recording queries."""
GONE_AFTER = 3  # ticks without a scrape after which a replica is gone
MAX_TICKS = 50_000
MAX_DRAWN = 20_000  # requests per interval
GOLDEN = (math.sqrt(5) - 1) / 2  # its multiples modulo 1 are spread evenly
Limits = Mapping[Parameter, tuple[Value | None, Value | None]]
"""Range of each parameter, as far as the spec sets it."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Snapshots of all replicas at one time."""

    at: float
    snapshots: tuple[ReplicaSnapshot, ...]


@dataclass(frozen=True, slots=True)
class _ReplicaTimeline:
    """Snapshots of one replica over the recording, oldest first."""

    dates: tuple[float, ...]
    snapshots: tuple[ReplicaSnapshot, ...]


def build_ticks(
    found: Iterable[StoredSeries], naming: PrometheusNaming, *, every: float, limits: Limits, block_size: int
) -> tuple[Tick, ...]:
    """Return snapshots of all replicas every `every` seconds of the recording. Raise Unreadable."""
    timelines = {
        pod: _timeline_of(pod, targets, limits, block_size)
        for pod, targets in sorted(group_scrapes(found, naming, names=RECORDED_NAMES).items())
    }
    timelines = {pod: one for pod, one in timelines.items() if one.snapshots}
    if not timelines:
        raise Unreadable(f"no series of an engine with a pod name in label {naming.pod}")
    begin = min(one.dates[0] for one in timelines.values())
    end = max(one.dates[-1] for one in timelines.values())
    count = math.ceil((end - begin) / every) + 1  # the last one includes every scrape
    if count > MAX_TICKS:
        raise Unreadable(f"{count:,} ticks of {every:g} s exceed {MAX_TICKS:,}; use a shorter range or a longer tick")
    dates = [begin + number * every for number in range(count)]
    return tuple(Tick(at, tuple(_present_snapshots(timelines.values(), at, begin=begin, every=every))) for at in dates)


def _present_snapshots(
    timelines: Iterable[_ReplicaTimeline], at: float, *, begin: float, every: float
) -> Iterator[ReplicaSnapshot]:
    """Return snapshots of the replicas that existed at that time."""
    for one in timelines:
        snapshot = _snapshot_at(one, at, begin=begin, every=every)
        if snapshot is not None:
            yield snapshot


def _snapshot_at(one: _ReplicaTimeline, at: float, *, begin: float, every: float) -> ReplicaSnapshot | None:
    """Return the last snapshot of a replica at that time; None before its first and after its last one."""
    first, index = one.dates[0], bisect_left(one.dates, at + every / 1000)
    if index == 0 or at - one.dates[-1] > GONE_AFTER * every:
        return None
    since = first if first > begin + GONE_AFTER * every else 0.0
    return replace(one.snapshots[index - 1], since=since)


def _timeline_of(pod: str, targets: Mapping[str, Sequence[Page]], limits: Limits, block_size: int) -> _ReplicaTimeline:
    if len(targets) > 1:
        raise DuplicateTargets(f"pod {pod} was scraped as {len(targets)} targets: {'; '.join(sorted(targets))[:300]}")
    snapshots: list[ReplicaSnapshot] = []
    dates: list[float] = []
    before: Page | None = None
    for page in next(iter(targets.values())):
        if before is not None and page.series == before.series:
            continue  # a range query repeats a sample until the next scrape
        snapshots.append(_snapshot(pod, before, page, limits, block_size))
        dates.append(page.at)
        before = page
    return _ReplicaTimeline(tuple(dates), tuple(snapshots))


def _snapshot(pod: str, before: Page | None, page: Page, limits: Limits, block_size: int) -> ReplicaSnapshot:
    try:
        sample = sample_of(page.series, at=page.at)
    except Unreadable as error:
        return ReplicaSnapshot(pod, Phase.READY, pod, sample=None, problem=str(error))
    if before is not None:
        sample = replace(sample, requests=_requests(before, page))
    config, ledger = _config(page.series, sample, limits), _ledger(page.series, block_size)
    missing = [name for name, there in ((CONFIG, config), (f"{MEMORY}, {BLOCKS}", ledger)) if there is None]
    problem = f"the recording lacks {', '.join(missing)}" if missing else None
    return ReplicaSnapshot(pod, Phase.READY, pod, sample=sample, config=config, ledger=ledger, problem=problem)


# --- data of the admin port ------------------------------------------------------------------------------


def _of_one_core(series: Series, name: str, label: str) -> dict[str, float]:
    """Return the values of a family by a label, of the first core: all cores are alike."""
    found: dict[str, tuple[str, float]] = {}
    for labels, value in series.get(name, ()):
        core, key = labels.get("engine", ""), labels.get(label, "")
        if key not in found or core < found[key][0]:
            found[key] = (core, value)
    return {key: value for key, (_, value) in found.items()}


def _config(series: Series, sample: Sample, limits: Limits) -> Config | None:
    values = _of_one_core(series, CONFIG, "field")
    applied = {
        parameter: typed(parameter, values[parameter.value])
        for parameter in Parameter
        if math.isfinite(values.get(parameter.value, math.nan))
    }
    if not applied:
        return None
    fields = {}
    for parameter, value in applied.items():
        low, high = limits.get(parameter, (None, None))
        low = value if low is None else min(low, value)
        high = _cap(series, value) if high is None and parameter is Parameter.GPU_MEMORY_UTILIZATION else high
        fields[parameter] = FieldRange(True, low, value if high is None else max(high, value))
    return Config(sample.gauges.config_generation or 1, applied, fields)


def _cap(series: Series, utilization: Value) -> float:
    """Return the maximum utilization by the KV blocks that the engine reserves addresses for."""
    ledger, cap = _ledger(series, 1), _of_one_core(series, BLOCKS, "state").get("cap", 0.0)
    if ledger is None:
        return utilization
    return min(1.0, utilization + max(0.0, cap - ledger.blocks_total) * ledger.bytes_per_block / ledger.device_bytes)


def _ledger(series: Series, block_size: int) -> Ledger | None:
    sizes, blocks = _of_one_core(series, MEMORY, "kind"), _of_one_core(series, BLOCKS, "state")
    values = (*sizes.values(), *blocks.values())
    device = math.fsum(size for kind, size in sizes.items() if kind != "kv_used")  # that part of kv_mapped in use
    total = blocks.get("total", 0.0)
    if not all(map(math.isfinite, values)) or device <= 0 or total <= 0 or "kv_mapped" not in sizes:
        return None
    return Ledger(
        device_bytes=int(device),
        blocks_total=int(total),
        block_size=block_size,
        bytes_per_block=max(1, int(sizes["kv_mapped"] / total)),
        other_bytes=int(sizes.get("other", 0.0)),
        free_bytes=int(sizes["free"]) if "free" in sizes else None,
        blocks_cap=int(blocks["cap"]) if "cap" in blocks else None,
    )


# --- single requests --------------------------------------------------------------------------------------------------


def _requests(before: Page, page: Page) -> RequestUpdates:
    """Return requests that ended between two pages, sampled from histograms. Unfinished ones are unknown."""
    answers, prompts = _added(before, page, ANSWERS), _added(before, page, PROMPTS)
    if answers is None or prompts is None:
        return RequestUpdates((), ())
    ended = round(answers.counts[-1])
    count = min(ended, MAX_DRAWN)
    ttft = _added(before, page, ("vllm:time_to_first_token_seconds",))
    gaps = _added(before, page, ("vllm:request_time_per_output_token_seconds",))
    lengths = zip(sample_histogram(prompts, count), _spread(sample_histogram(answers, count), 1), strict=True)
    firsts = _spread(sample_histogram(ttft, count), 2) if ttft is not None else [None] * count
    means = _spread(sample_histogram(gaps, count), 3) if gaps is not None else [None] * count
    step = (page.at - before.at) / max(1, count)
    rows = []
    for number, ((prompt, answer), first, gap) in enumerate(zip(lengths, firsts, means, strict=True)):
        tokens = max(1, round(answer))
        decode = None if gap is None or tokens < 2 else gap * (tokens - 1)
        finished_at = before.at + (number + 0.5) * step
        took = (first or 0.0) + (decode or 0.0)
        rows.append(Finished(finished_at - took, finished_at, max(1, round(prompt)), tokens, first, decode))
    return RequestUpdates(tuple(rows), (), ended - count)


def _added(before: Page, page: Page, names: Sequence[str]) -> Histogram | None:
    """Return the observations between two pages; None without any, or when a count fell."""
    old, new = histogram_of(before.series, names), histogram_of(page.series, names)
    if new is None:
        return None
    if old is None or old.edges != new.edges or old.counts[-1] > new.counts[-1]:
        return None
    counts = tuple(after - earlier for earlier, after in zip(old.counts, new.counts, strict=True))
    if counts[-1] <= 0 or any(count < 0 or not math.isfinite(count) for count in counts):
        return None
    return Histogram(new.edges, counts, new.total - old.total)


def sample_histogram(histogram: Histogram, count: int) -> list[float]:
    """Return `count` values spread evenly over the histogram's buckets, scaled to its mean."""
    total = histogram.counts[-1]
    finite = [edge for edge in histogram.edges if math.isfinite(edge)]
    values = []
    for number in range(count):
        rank = (number + 0.5) / count * total
        index = bisect_left(histogram.counts, rank)
        low = histogram.edges[index - 1] if index else 0.0
        high = histogram.edges[index] if math.isfinite(histogram.edges[index]) else 2 * (finite[-1] if finite else 1.0)
        below = histogram.counts[index - 1] if index else 0.0
        values.append(low + (high - low) * (rank - below) / (histogram.counts[index] - below))
    mean, wanted = math.fsum(values) / max(1, count), histogram.total / total
    factor = wanted / mean if mean > 0 and wanted > 0 and math.isfinite(wanted) else 1.0
    return [value * factor for value in values]


def _spread(values: list[float], salt: int) -> list[float]:
    """Return the values in another order that is spread evenly over this one."""
    order = sorted(range(len(values)), key=lambda number: (number * GOLDEN * salt + salt / 7) % 1.0)
    return [values[number] for number in order]

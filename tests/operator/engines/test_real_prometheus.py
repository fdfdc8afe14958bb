"""Real Prometheus on loopback: its samples equal those scraped from the engine.

Debian's package `prometheus` is enough (TRIMTAB_PROMETHEUS selects another binary); without it the tests are skipped.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import aiohttp
import httpx
import pytest
from aiohttp import web
from fake_prometheus import exposed
from trimtab_operator.engines.prometheus import Connection, Prometheus
from trimtab_operator.engines.scrape import ScrapeFailure, scrape
from trimtab_operator.tuner.moves import Reason
from trimtab_operator.tuner.samples import Histogram, Sample
from trimtab_operator.tuner.samples.prometheus import PrometheusNaming, parse_matrix, range_query
from trimtab_operator.tuner.samples.recorded import RECORDED_NAMES, Tick, build_ticks
from trimtab_operator.tuner.samples.series import Unreadable
from tuner_snapshots import make_sample

DEADLINE_SECONDS = 60.0  # for what takes seconds: the machine may be loaded
POD, NAMESPACE = "m-g0-0", "team-a"
T = TypeVar("T")


def find_prometheus() -> str | None:
    """Search TRIMTAB_PROMETHEUS, PATH, then the cache of the e2e scenarios."""
    named = os.environ.get("TRIMTAB_PROMETHEUS")
    if named:
        return named
    cache = Path(os.environ.get("TRIMTAB_CACHE", "~/.cache/trimtab")).expanduser()
    cached = sorted(path for path in cache.glob("tools/prometheus*/usr/bin/prometheus") if os.access(path, os.X_OK))
    return shutil.which("prometheus") or (str(cached[0]) if cached else None)


BINARY = find_prometheus()
pytestmark = pytest.mark.skipif(
    BINARY is None, reason="no prometheus: set TRIMTAB_PROMETHEUS, or put Debian's package on PATH"
)


@dataclass
class Shown:
    """Metrics page on loopback."""

    sample: Sample
    port: int = 0

    async def answer(self, _: web.Request) -> web.Response:
        return web.Response(text=text_of(self.sample))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def text_of(sample: Sample) -> str:
    """Return a sample in the engine's text format."""
    lines = []
    for name, labels, value in exposed(sample):
        inside = ",".join(f'{label}="{text}"' for label, text in labels.items())
        lines.append(f"{name}{{{inside}}} {'NaN' if math.isnan(value) else repr(float(value))}")
    return "\n".join(lines) + "\n"


@pytest.fixture
async def shown() -> AsyncIterator[Shown]:
    histogram = Histogram((0.1, 0.5, math.inf), (3.0, 9.0, 10.0), 4.5)
    page = Shown(replace(make_sample(1000.0, blocked_seconds={"kv": 2.5}), ttft=histogram, itl=histogram))
    application = web.Application()
    application.router.add_get("/metrics", page.answer)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    page.port = runner.addresses[0][1]
    yield page
    await runner.cleanup()


def configuration(target: str, *, jobs: tuple[str, ...]) -> str:
    """Return a configuration that scrapes every second, with pod and namespace labels."""
    lines = ["global: {scrape_interval: 1s}", "scrape_configs:"]
    for job in jobs:
        lines += [
            f"  - job_name: {job}",
            f'    static_configs: [{{targets: ["{target}"], labels: {{pod: {POD}, namespace: {NAMESPACE}}}}}]',
        ]
    return "\n".join(lines) + "\n"


class RealPrometheus:
    """Prometheus process with its data in the test's folder."""

    def __init__(self, folder: Path, target: str) -> None:
        assert BINARY is not None
        self.file, self.target = folder / "prometheus.yml", target
        self.file.write_text(configuration(target, jobs=("engines",)))
        self._held = socket.socket()  # reserves the port; SO_REUSEPORT shares it with the server
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._held.bind(("127.0.0.1", 0))
        self.port = self._held.getsockname()[1]
        self.log = (folder / "prometheus.log").open("wb")
        self.process = subprocess.Popen(
            [
                BINARY,
                f"--config.file={self.file}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{self.port}",
                "--web.enable-lifecycle",
            ],
            stdout=self.log,
            stderr=subprocess.STDOUT,
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def reload(self, *, jobs: tuple[str, ...]) -> None:
        self.file.write_text(configuration(self.target, jobs=jobs))
        httpx.post(f"{self.url}/-/reload", timeout=30.0).raise_for_status()

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(DEADLINE_SECONDS)
        self._held.close()
        self.log.close()


@pytest.fixture
async def real(tmp_path: Path, shown: Shown) -> AsyncIterator[RealPrometheus]:
    started = await asyncio.to_thread(RealPrometheus, tmp_path, f"127.0.0.1:{shown.port}")
    yield started
    await asyncio.to_thread(started.end)


async def until(found: Callable[[], Awaitable[T | None]]) -> T:
    """Return the first result; fails after the deadline."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline:
        thing = await found()
        if thing is not None:
            return thing
        await asyncio.sleep(0.2)
    pytest.fail(f"nothing came within {DEADLINE_SECONDS:g} s")


async def read(prometheus: Prometheus, labels: dict[str, str] | None = None) -> Sample | ScrapeFailure:
    return (await prometheus.samples(NAMESPACE, {POD: 0.0}, labels or {}))[POD]


async def test_both_sources_read_the_same_engine_alike(
    real: RealPrometheus, shown: Shown, http: aiohttp.ClientSession
) -> None:
    connection = Connection(real.url, scrape_seconds=1.0)
    async with Prometheus(connection) as prometheus:

        async def same_as_direct(wanted: float) -> Sample | None:
            prometheus._failures.clear()  # no back-off while it starts
            found = await read(prometheus)
            has_come = isinstance(found, Sample) and found.counters.generated_tokens == wanted
            return found if has_come and isinstance(found, Sample) else None

        for seconds in (1000.0, 1060.0):  # two scrapes of an engine at work, and what it did in between
            shown.sample = replace(
                make_sample(seconds, blocked_seconds={"kv": seconds / 400}),
                ttft=shown.sample.ttft,
                itl=shown.sample.itl,
            )
            stored = await until(lambda: same_as_direct(shown.sample.counters.generated_tokens))
            direct = await scrape(http, shown.url)
            assert isinstance(direct, Sample)
            assert replace(stored, at=0.0) == replace(direct, at=0.0)
            assert direct.at - stored.at < 20.0
            assert stored.at - direct.at < 1.1  # two clocks of one machine


async def test_scrape_problems_are_reported(real: RealPrometheus, shown: Shown) -> None:
    connection = Connection(real.url, scrape_seconds=1.0)
    async with Prometheus(connection) as prometheus:

        async def sample() -> Sample | None:
            prometheus._failures.clear()
            found = await read(prometheus)
            return found if isinstance(found, Sample) else None

        async def duplicated() -> ScrapeFailure | None:
            found = await read(prometheus)
            is_named = isinstance(found, ScrapeFailure) and found.kind is Reason.METRICS_DUPLICATED
            return found if is_named and isinstance(found, ScrapeFailure) else None

        first = await until(sample)
        shown.sample = make_sample(5.0, kv_usage=math.nan)  # restarted, and the value is NaN
        reset = await until(lambda: _if_reset(prometheus, first))
        assert math.isnan(reset.gauges.kv_usage)
        await asyncio.to_thread(real.reload, jobs=("engines", "annotated"))
        named = await until(duplicated)
        assert "job=annotated" in named.reason
        chosen = await read(prometheus, {"job": "engines"})
        assert isinstance(chosen, Sample)
        assert isinstance(await read(prometheus, {"job": 'no "such\\ job'}), ScrapeFailure)


async def _if_reset(prometheus: Prometheus, before: Sample) -> Sample | None:
    found = await read(prometheus)
    if isinstance(found, Sample) and found.counters.generated_tokens < before.counters.generated_tokens:
        return found
    return None


async def test_rejected_query_has_reason(real: RealPrometheus) -> None:
    async with Prometheus(Connection(real.url, scrape_seconds=1.0)) as prometheus:

        async def refused() -> str | None:
            try:
                parse_matrix(await prometheus.query('{job="a"'))
            except Unreadable as error:
                return str(error) if "it rejects the query" in str(error) else None
            return None

        assert "bad_data" in await until(refused)


async def test_stored_range_is_read_as_scrapes(real: RealPrometheus, shown: Shown) -> None:
    """Queries like `trimtab replay`: by a pod pattern, with the additional series of recordings."""
    query = range_query(
        PrometheusNaming(), namespace=NAMESPACE, pods=re.compile(r"m-g[0-9]+-0"), seconds=60, names=RECORDED_NAMES
    )
    async with Prometheus(Connection(real.url, scrape_seconds=1.0)) as prometheus:

        async def ending_with(wanted: float) -> list[Tick] | None:
            try:
                found = parse_matrix(await prometheus.query(query))
                ticks = build_ticks(found, PrometheusNaming(), every=0.5, limits={}, block_size=16)
            except Unreadable:
                return None
            last = ticks[-1].snapshots[0].sample
            return list(ticks) if last is not None and last.counters.generated_tokens == wanted else None

        for seconds in (1010.0, 1020.0, 1030.0):
            shown.sample = make_sample(seconds)
            ticks = await until(lambda: ending_with(shown.sample.counters.generated_tokens))
        assert {look.replica for tick in ticks for look in tick.snapshots} == {POD}
        seen = [tick.snapshots[0].sample for tick in ticks]
        generated = [one.counters.generated_tokens for one in seen if one is not None]
        assert list(dict.fromkeys(generated))[-3:] == [40.0 * seconds for seconds in (1010.0, 1020.0, 1030.0)]

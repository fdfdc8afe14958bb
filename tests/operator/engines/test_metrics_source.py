"""Source of a resource's metrics: Prometheus first, then the pods if allowed; each finished request is reported
once.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Literal

import aiohttp
import httpx
import pytest
from fake_prometheus import NAMESPACE, FakePrometheus, exposed
from trimtab_operator.builders.admin_token import Tokens
from trimtab_operator.engines.poller import NO_PROMETHEUS, EnginePoller
from trimtab_operator.engines.prometheus import Connection, Prometheus
from trimtab_operator.observed.engines import EngineObservation, EngineTarget, MetricsSettings
from trimtab_operator.tuner.moves import Reason
from trimtab_operator.tuner.samples import Source
from tuner_snapshots import make_sample

if TYPE_CHECKING:
    from tests.operator.conftest import ContractEngine

Asked = Literal["Auto", "Prometheus", "Pods"]
IN_PROMETHEUS = 77.0  # running requests in Prometheus; the pod reports 8
POD = "m-g0-0"


class Scene:
    """One engine, polled with a resource's settings, and the Prometheus that scrapes it."""

    def __init__(self, engine: ContractEngine, http: aiohttp.ClientSession, *, has_prometheus: bool = True) -> None:
        self.fake = FakePrometheus(time.time)
        prometheus = Prometheus(Connection("http://prometheus:9090"), transport=self.fake.transport)
        self.engines = EnginePoller(http, timeout_seconds=10.0, prometheus=prometheus if has_prometheus else None)
        self.target = EngineTarget(
            "m-g0", "127.0.0.1", True, "uid", api_port=engine.port, admin_port=engine.port, pod=POD, created_at=0.0
        )

    def scrape(self, **target: str) -> None:
        self.fake.scrape(exposed(make_sample(time.time(), running=IN_PROMETHEUS)), target=target)

    async def look(self, source: Asked = "Auto") -> EngineObservation:
        said = await self.engines.poll([self.target], Tokens("right"), MetricsSettings(source, NAMESPACE))
        return said["m-g0"]


def running(said: EngineObservation) -> float | None:
    return None if said.sample is None else said.sample.gauges.running


@pytest.mark.parametrize(
    ("source", "has_prometheus", "read", "from_where"),
    [
        ("Auto", True, IN_PROMETHEUS, Source.PROMETHEUS),
        ("Prometheus", True, IN_PROMETHEUS, Source.PROMETHEUS),
        ("Pods", True, 8.0, Source.PODS),
        ("Auto", False, 8.0, Source.PODS),
        ("Pods", False, 8.0, Source.PODS),
    ],
)
async def test_metrics_source_follows_spec_and_flags(
    source: Asked,
    has_prometheus: bool,
    read: float,
    from_where: Source,
    engine: ContractEngine,
    http: aiohttp.ClientSession,
) -> None:
    scene = Scene(engine, http, has_prometheus=has_prometheus)
    scene.scrape()
    said = await scene.look(source)
    assert (running(said), said.source, said.fallback_reason, said.problem) == (read, from_where, None, None)
    assert said.config is not None  # the configuration and the ledger are the engine's own word in any case
    assert said.ledger is not None
    assert ("GET /metrics" in engine.calls) is (from_where is Source.PODS)


async def test_auto_source_falls_back_to_pod(engine: ContractEngine, http: aiohttp.ClientSession) -> None:
    scene = Scene(engine, http)
    for job in ("a", "b"):
        scene.scrape(job=job)
    said = await scene.look("Auto")
    assert (running(said), said.source, said.problem) == (8.0, Source.PODS, None)
    assert said.fallback_reason is not None
    assert "scraped as 2 targets" in said.fallback_reason


async def test_prometheus_source_has_no_fallback(engine: ContractEngine, http: aiohttp.ClientSession) -> None:
    scene = Scene(engine, http)
    for job in ("a", "b"):
        scene.scrape(job=job)
    said = await scene.look("Prometheus")
    assert (said.sample, said.problem_reason, said.source) == (None, Reason.METRICS_DUPLICATED, Source.PROMETHEUS)
    assert "GET /metrics" not in engine.calls


async def test_prometheus_source_without_flag_is_reported(engine: ContractEngine, http: aiohttp.ClientSession) -> None:
    said = await Scene(engine, http, has_prometheus=False).look("Prometheus")
    assert (said.sample, said.problem, said.problem_reason) == (None, NO_PROMETHEUS, Reason.PROMETHEUS_UNAVAILABLE)


async def test_both_source_failures_are_reported(engine: ContractEngine, http: aiohttp.ClientSession) -> None:
    engine.metrics = "nonsense"
    said = await Scene(engine, http).look("Auto")
    assert said.problem is not None
    assert "no scrape of pod m-g0-0" in said.problem
    assert "; and the metrics page" in said.problem


async def test_requests_between_scrapes_are_reported_once(engine: ContractEngine, http: aiohttp.ClientSession) -> None:
    scene = Scene(engine, http)
    told: list[int] = []
    for finished, scrapes in ((2, True), (5, False), (6, False), (9, True), (9, False), (10, True)):
        engine.finished = finished
        if scrapes:
            scene.scrape()
        said = await scene.look()
        assert said.sample is not None
        if said.sample.requests is not None:
            told += [row.prompt_tokens - 64 for row in said.sample.requests.finished]
    assert told == list(range(10))


async def test_source_change_never_goes_back_in_time(engine: ContractEngine, http: aiohttp.ClientSession) -> None:
    scene = Scene(engine, http)
    scene.fake.scrape(exposed(make_sample(5.0)), at=time.time() - 10)
    scene.fake.answer = lambda _: httpx.Response(500)
    direct = await scene.look()
    assert direct.sample is not None
    scene.fake.answer, scene.engines.prometheus = None, None
    scene = same_engines(scene)
    stored = await scene.look()
    assert stored.sample is not None
    assert stored.sample.at >= direct.sample.at


def same_engines(scene: Scene) -> Scene:
    """Return the same poller with a Prometheus that responds again."""
    scene.engines.prometheus = Prometheus(Connection("http://prometheus:9090"), transport=scene.fake.transport)
    return scene

"""Wrong Prometheus data: tuning stops, the condition names the problem, and tuning resumes afterwards."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import httpx
import pytest
from fake_prometheus import NAMESPACE, FakePrometheus, Row, exposed
from trimtab_operator.engines.prometheus import Connection, Prometheus
from trimtab_operator.engines.scrape import ScrapeFailure
from trimtab_operator.tuner.decide import TunerOutput, decide
from trimtab_operator.tuner.moves import Reason
from trimtab_operator.tuner.samples import Sample
from trimtab_operator.tuner.settings import Mode, Pace, Settings
from trimtab_operator.tuner.state import TunerState
from tuner_snapshots import PARAMETERS, make_replica_snapshot, make_sample

TICK, SCRAPE = 5.0, 15.0
BEGIN = 1000.0
LIE_BEGINS, LIE_ENDS, END = 60.0, 240.0, 420.0  # seconds after that
TOLD_WITHIN = 61.0  # seconds: three scrapes, and the next
SETTINGS = Settings(Mode.AUTO, starts=PARAMETERS, pace=Pace(tick_seconds=TICK, sample_seconds=SCRAPE))


def pressed(at: float) -> Sample:
    """Return the metrics of an engine that recomputes 14 % of its tokens from the start of the fault."""
    since = max(0.0, at - BEGIN - LIE_BEGINS)
    return make_sample(at, kv_usage=0.99, preemptions={"capacity": since}, recomputed_tokens=20.0 * since)


@dataclass
class Scene:
    """One engine, the Prometheus that scrapes it, and the tuner's output."""

    now: float = BEGIN
    ahead: float = 0.0
    outcomes: list[tuple[float, TunerOutput]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.fake = FakePrometheus(lambda: self.now + self.ahead)
        self.prometheus = Prometheus(
            Connection("http://prometheus:9090", scrape_seconds=SCRAPE),
            clock=lambda: self.now,
            transport=self.fake.transport,
        )

    @property
    def lies(self) -> bool:
        return LIE_BEGINS <= self.now - BEGIN < LIE_ENDS

    def rows(self) -> list[Row]:
        return exposed(pressed(self.now))

    async def look(self, memory: TunerState, values: dict[object, object], generation: int) -> TunerOutput:
        found = (await self.prometheus.samples(NAMESPACE, {"m-g0-0": 0.0}, {}))["m-g0-0"]
        if isinstance(found, ScrapeFailure):
            known = make_replica_snapshot(sample=make_sample(self.now, generation=generation), values=values)  # type: ignore[arg-type]
            look = replace(known, sample=None, problem=found.reason, problem_reason=found.kind)
        else:
            gauges = replace(found.gauges, config_generation=generation)
            look = make_replica_snapshot(sample=replace(found, gauges=gauges), values=values)  # type: ignore[arg-type]
        return decide([look], memory, SETTINGS, self.now)

    async def play(self, lie: Callable[[Scene], None]) -> None:
        """Observe every 5 s with a scrape every 15 s. `lie` scrapes during the fault."""
        memory, values, generation = TunerState(starts=PARAMETERS), dict(PARAMETERS), 1
        for step in range(int(END / TICK)):
            self.now = BEGIN + step * TICK
            if step % (SCRAPE // TICK) == 0:
                if self.lies:
                    lie(self)
                else:
                    self.fake.answer, self.ahead = None, 0.0
                    self.fake.scrape(self.rows())
            outcome = await self.look(memory, values, generation)  # type: ignore[arg-type]
            memory = outcome.state
            self.outcomes.append((self.now - BEGIN, outcome))
            for patch in outcome.patches.values():
                values.update(patch)
                generation += 1

    def reasons(self, begin: float, end: float) -> set[str]:
        return {outcome.metrics_available.reason for at, outcome in self.outcomes if begin <= at < end}

    def decisions(self, begin: float, end: float) -> list[Reason]:
        return [d.reason for at, outcome in self.outcomes if begin <= at < end for d in outcome.decisions]


# --- lies -------------------------------------------------------------------------------------------------------------


def is_gone(scene: Scene) -> None:
    def refused(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    scene.fake.answer = refused


def refuses_us(scene: Scene) -> None:
    scene.fake.answer = lambda _: httpx.Response(401)


def is_something_else(scene: Scene) -> None:
    scene.fake.answer = lambda _: httpx.Response(200, content=b"<html>Welcome</html>")


def scrapes_no_more(_scene: Scene) -> None:
    pass


def scrapes_twice(scene: Scene) -> None:
    for job in ("engines", "annotated"):
        scene.fake.scrape(scene.rows(), target={"job": job})


def is_a_minute_behind(scene: Scene) -> None:
    scene.fake.scrape(exposed(pressed(scene.now - 60)), at=scene.now - 60)


def dates_into_the_future(scene: Scene) -> None:
    scene.fake.scrape(scene.rows(), at=scene.now + 600)


def shows_frozen_counters(scene: Scene) -> None:
    scene.fake.scrape(exposed(pressed(BEGIN + LIE_BEGINS - SCRAPE)))


def changed(name: str, value: float | None) -> Callable[[Scene], None]:
    """Return a scrape in which one metric family is changed or missing."""

    def lie(scene: Scene) -> None:
        kept = [row for row in scene.rows() if row[0] != name or value is not None]
        scene.fake.scrape([(n, labels, value if n == name and value is not None else v) for n, labels, v in kept])

    return lie


LIES: list[tuple[Callable[[Scene], None], str]] = [
    (is_gone, Reason.PROMETHEUS_UNAVAILABLE.value),
    (refuses_us, Reason.PROMETHEUS_UNAVAILABLE.value),
    (is_something_else, Reason.PROMETHEUS_UNAVAILABLE.value),
    (scrapes_no_more, Reason.METRICS_MISSING.value),
    (is_a_minute_behind, Reason.METRICS_MISSING.value),
    (dates_into_the_future, Reason.METRICS_MISSING.value),
    (scrapes_twice, Reason.METRICS_DUPLICATED.value),
    (shows_frozen_counters, "MetricsFrozen"),
    (changed("vllm:kv_cache_usage_perc", math.nan), "MetricsInconsistent"),
    (changed("vllm:kv_cache_usage_perc", 1.7), "MetricsInconsistent"),
    (changed("vllm:num_requests_running", -3.0), "MetricsInconsistent"),
    (changed("vllm:generation_tokens_total", math.inf), "MetricsInconsistent"),
    (changed("vllm:num_requests_waiting", None), Reason.METRICS_MISSING.value),
    (changed("vllm:generation_tokens_total", None), Reason.METRICS_MISSING.value),
]


@pytest.mark.parametrize(("lie", "reason"), LIES)
async def test_wrong_metrics_stop_tuning_with_condition(lie: Callable[[Scene], None], reason: str) -> None:
    scene = Scene()
    await scene.play(lie)
    assert scene.reasons(SCRAPE, LIE_BEGINS) == {"Scraped"}
    assert scene.reasons(LIE_BEGINS + TOLD_WITHIN, LIE_ENDS) == {reason}
    assert scene.decisions(0, LIE_ENDS) == []
    assert scene.reasons(LIE_ENDS + TOLD_WITHIN, END) == {"Scraped"}
    assert scene.decisions(LIE_ENDS, END)[0] is Reason.KV_CACHE_TOO_SMALL


# --- what is no lie ---------------------------------------------------------------------------------------------------


def tells_the_truth(scene: Scene) -> None:
    scene.fake.scrape(scene.rows())


def misses_every_other_scrape(scene: Scene) -> None:
    if int((scene.now - BEGIN) / SCRAPE) % 2 == 0:
        scene.fake.scrape(scene.rows())


@pytest.mark.parametrize("lie", [tells_the_truth, misses_every_other_scrape])
async def test_valid_metrics_are_used_despite_faults(lie: Callable[[Scene], None]) -> None:
    scene = Scene()
    await scene.play(lie)
    assert scene.reasons(SCRAPE, END) == {"Scraped"}
    assert scene.decisions(LIE_BEGINS, LIE_ENDS)[0] is Reason.KV_CACHE_TOO_SMALL


async def test_prometheus_clock_skew_changes_nothing() -> None:
    honest, ahead = Scene(), Scene(ahead=3600.0)
    for scene in (honest, ahead):
        shift = scene.ahead

        def scraped(scene: Scene, shift: float = shift) -> None:
            scene.ahead = shift
            scene.fake.scrape(scene.rows())

        memory, told = TunerState(starts=PARAMETERS), []
        for step in range(int(END / TICK)):
            scene.now = BEGIN + step * TICK
            if step % (SCRAPE // TICK) == 0:
                scraped(scene)
            outcome = await scene.look(memory, dict(PARAMETERS), 1)  # type: ignore[arg-type]
            memory = outcome.state
            told.append((outcome.metrics_available.reason, [d.reason for d in outcome.decisions]))
        scene.outcomes = told  # type: ignore[assignment]
    assert honest.outcomes == ahead.outcomes


async def test_engine_restart_causes_no_decision() -> None:
    scene = Scene()

    def restarts(scene: Scene) -> None:
        scene.fake.scrape(exposed(make_sample(scene.now - BEGIN - LIE_BEGINS, kv_usage=0.1)))

    await scene.play(restarts)
    assert scene.reasons(SCRAPE, END) == {"Scraped"}
    assert scene.decisions(0, LIE_ENDS) == []

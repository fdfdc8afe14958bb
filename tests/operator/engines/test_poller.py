"""Poller: late results are taken by the next poll, and a hung engine delays neither others nor the loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import aiohttp
import pytest
from trimtab_operator.builders.admin_token import Tokens
from trimtab_operator.engines import scrape
from trimtab_operator.engines.admin_client import OutOfBounds, Patched
from trimtab_operator.engines.poller import (
    REJECTED_PATCH_RETRY_SECONDS,
    STALE_STATUS_SECONDS,
    EnginePoller,
    PatchAnswer,
)
from trimtab_operator.observed.actions import Patch
from trimtab_operator.observed.engines import EngineObservation, EngineTarget, MetricsSettings
from trimtab_operator.tuner.parameters import Parameter
from trimtab_operator.tuner.samples import Source

if TYPE_CHECKING:
    from tests.operator.conftest import ContractEngine

TOKEN = Tokens("right")
IN_TIME_SECONDS = 60.0  # for what takes milliseconds: the machine may be loaded


def a_target(engine: ContractEngine, uid: str = "u", *, ready: bool = True) -> EngineTarget:
    return EngineTarget(uid, "127.0.0.1", ready, uid, api_port=engine.port, admin_port=engine.port)


def engines_at(http: aiohttp.ClientSession, timeout_seconds: float = IN_TIME_SECONDS) -> EnginePoller:
    return EnginePoller(http, timeout_seconds=timeout_seconds)


def engines_in_time(engines: EnginePoller) -> EnginePoller:
    """Return the same poller without a timeout."""
    engines.timeout_seconds = IN_TIME_SECONDS
    return engines


async def answered(engines: EnginePoller) -> None:
    """Wait until the requests in flight have results."""
    under_way = [one.poll_task for one in engines._states.values() if one.poll_task is not None]
    done, _ = await asyncio.wait(under_way, timeout=IN_TIME_SECONDS)
    assert len(done) == len(under_way)


async def until(is_so: Callable[[], bool]) -> None:
    for _ in range(int(IN_TIME_SECONDS / 0.001)):
        if is_so():
            return
        await asyncio.sleep(0.001)
    pytest.fail("it did not come to that")


async def test_poll_failure_does_not_affect_other_engines(
    engine: ContractEngine, other_engine: ContractEngine, http: aiohttp.ClientSession
) -> None:
    other_engine.metrics = "nonsense"
    unplaced = EngineTarget("d", None, False)
    engines = engines_at(http)
    said = await engines.poll([a_target(engine, "a"), a_target(other_engine, "b"), unplaced], TOKEN)
    assert said["a"].sample is not None
    assert said["b"].sample is None
    assert said["d"].problem == "the pod has no address yet"


async def test_hung_engine_is_awaited_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the hung engine takes time, so the result does not depend on the machine's load."""
    asked: list[str] = []

    async def ask(target: EngineTarget, **_: object) -> EngineObservation:
        asked.append(target.group)
        if target.group == "hung":
            await asyncio.Event().wait()
        return EngineObservation(True, source=Source.PODS)

    monkeypatch.setattr(scrape, "observe_engine", ask)
    engines = EnginePoller(cast("aiohttp.ClientSession", None), timeout_seconds=0.05)
    targets = [EngineTarget(group, "127.0.0.1", True, group) for group in ("hung", "well")]
    for waited in (True, False):
        since = time.monotonic()
        said = await engines.poll(targets, TOKEN)
        assert (time.monotonic() - since >= 0.05) or not waited
        assert said["well"].problem is None
        assert said["hung"].problem == "no response within 0.05 s; still waiting"
    assert asked == ["hung", "well", "well"]
    engines.close()


async def test_unchanged_metrics_take_one_request(engine: ContractEngine, http: aiohttp.ClientSession) -> None:
    engines, target = engines_at(http), a_target(engine)
    page = (await engines.poll([target], TOKEN))["u"].page
    assert page is not None
    engine.calls.clear()
    assert await engines.are_metrics_unchanged([(target, page)])
    assert engine.calls == ["GET /metrics"]
    engine.metrics += "process_cpu_seconds_total 1.0\n"  # an unused series
    assert await engines.are_metrics_unchanged([(target, page)])
    engine.metrics = engine.metrics.replace("5000.0", "5001.0")
    assert not await engines.are_metrics_unchanged([(target, page)])


async def test_refreshed_observation_survives_late_engine(engine: ContractEngine, http: aiohttp.ClientSession) -> None:
    now = [1000.0]
    engines, target = EnginePoller(http, lambda: now[0], timeout_seconds=IN_TIME_SECONDS), a_target(engine)
    page = (await engines.poll([target], TOKEN))["u"].page
    assert page is not None
    now[0] += STALE_STATUS_SECONDS - 1
    assert await engines.are_metrics_unchanged([(target, page)])
    now[0] += STALE_STATUS_SECONDS - 1
    engine.hangs, engines.timeout_seconds = True, 0.0
    said = (await engines.poll([target], TOKEN))["u"]
    assert said.problem is None
    assert said.sample is not None
    assert said.sample.at == 1000.0 + STALE_STATUS_SECONDS - 1
    engines.close()


async def test_late_engine_metrics_are_not_unchanged(engine: ContractEngine, http: aiohttp.ClientSession) -> None:
    engines, target = engines_at(http, timeout_seconds=0.05), a_target(engine)
    engine.hangs = True
    assert not await engines.are_metrics_unchanged([(target, b"page")])
    nobody = EngineTarget("g", "127.0.0.1", True, "gone", api_port=1)
    assert not await engines.are_metrics_unchanged([(nobody, b"page")])


async def test_late_result_is_taken_by_next_poll(engine: ContractEngine, http: aiohttp.ClientSession) -> None:
    engine.hangs = True
    engines = engines_at(http, timeout_seconds=0.05)
    assert (await engines.poll([a_target(engine)], TOKEN))["u"].sample is None
    engine.released.set()
    await answered(engines)
    assert (await engines.poll([a_target(engine)], TOKEN))["u"].sample is not None
    engines.close()


async def test_finished_request_is_reported_once(engine: ContractEngine, http: aiohttp.ClientSession) -> None:
    engines = engines_at(http, timeout_seconds=0.0)
    told: list[int] = []
    for finished in (2, 5, 5, 9):
        engine.finished = finished
        engines.timeout_seconds = 0.0
        said = (await engines.poll([a_target(engine)], TOKEN))["u"]
        await answered(engines)
        for seen in (said, (await engines_in_time(engines).poll([a_target(engine)], TOKEN))["u"]):
            if seen.sample is not None and seen.sample.requests is not None:
                told += [row.prompt_tokens - 64 for row in seen.sample.requests.finished]
    assert told == list(range(9))
    engines.close()


async def test_late_result_from_before_readiness_is_dropped(
    engine: ContractEngine, http: aiohttp.ClientSession
) -> None:
    engine.hangs = True
    engines = engines_at(http, timeout_seconds=0.0)
    await engines.poll([a_target(engine, ready=False)], TOKEN)
    engine.released.set()
    await answered(engines)
    said = await engines.poll([a_target(engine)], TOKEN)
    assert said["u"].ready
    engines.close()


async def test_late_engine_keeps_last_observation(engine: ContractEngine, http: aiohttp.ClientSession) -> None:
    engines = engines_at(http)
    before = (await engines.poll([a_target(engine)], TOKEN))["u"]
    engine.hangs, engines.timeout_seconds = True, 0.0
    late = (await engines.poll([a_target(engine)], TOKEN))["u"]
    assert before.sample is not None
    assert late == replace(before, sample=replace(before.sample, requests=None))  # each request is reported once
    engines.close()


AT_REST = """\
vllm:num_requests_running{engine="0",model_name="m"} 0.0
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
"""


def at_rest(page: str) -> str:
    """Return a metrics page of an idle engine."""
    gauges = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
    return "\n".join(line for line in page.splitlines() if not line.startswith(gauges)) + "\n" + AT_REST


async def test_fresh_idle_engines_are_not_polled_when_stale_status_is_allowed(
    engine: ContractEngine, other_engine: ContractEngine, http: aiohttp.ClientSession
) -> None:
    now = [1000.0]
    engines = EnginePoller(http, clock=lambda: now[0], timeout_seconds=IN_TIME_SECONDS)
    known, other = a_target(engine, "a"), a_target(other_engine, "b")
    engine.metrics = at_rest(engine.metrics)
    before = (await engines.poll([known], TOKEN))["a"]
    engine.hangs = True  # a poll would wait
    now[0] += STALE_STATUS_SECONDS - 1.0
    said = await engines.poll([known, other], TOKEN, allow_stale_engine_status=True)
    assert before.sample is not None
    assert said["a"] == replace(before, sample=replace(before.sample, requests=None))
    assert said["b"].problem is None
    engine.hangs, engine.metrics = False, "nonsense"
    now[0] += 1.0
    said = await engines.poll([known, other], TOKEN, allow_stale_engine_status=True)
    assert said["a"].sample is None, "it was asked"
    engines.close()


async def test_busy_engine_is_polled_despite_allow_stale(engine: ContractEngine, http: aiohttp.ClientSession) -> None:
    engines, target = engines_at(http), a_target(engine)
    engine.metrics = at_rest(engine.metrics).replace(
        'waiting{engine="0",model_name="m"} 0.0', 'waiting{engine="0",model_name="m"} 1.0'
    )
    await engines.poll([target], TOKEN)
    engine.calls.clear()
    await engines.poll([target], TOKEN, allow_stale_engine_status=True)
    assert "GET /metrics" in engine.calls


async def test_source_change_drops_last_observation(engine: ContractEngine, http: aiohttp.ClientSession) -> None:
    engines, target = engines_at(http), a_target(engine)
    engine.metrics = at_rest(engine.metrics)
    assert (await engines.poll([target], TOKEN, MetricsSettings("Pods")))["u"].problem is None
    said = await engines.poll([target], TOKEN, MetricsSettings("Prometheus"), allow_stale_engine_status=True)
    assert said["u"].sample is None, "there is no Prometheus"


async def test_unresponsive_engine_is_reported_after_timeout(
    engine: ContractEngine, http: aiohttp.ClientSession
) -> None:
    now = [1000.0]
    engines = EnginePoller(http, clock=lambda: now[0], timeout_seconds=IN_TIME_SECONDS)
    await engines.poll([a_target(engine)], TOKEN)
    engine.hangs, engines.timeout_seconds = True, 0.0
    now[0] += STALE_STATUS_SECONDS - 1.0
    assert (await engines.poll([a_target(engine)], TOKEN))["u"].problem is None
    now[0] += 1.0
    silent = (await engines.poll([a_target(engine)], TOKEN))["u"]
    assert silent.problem == "no response within 0 s; still waiting"
    assert silent.config is None
    engines.close()


async def test_unready_observation_is_not_repeated(engine: ContractEngine, http: aiohttp.ClientSession) -> None:
    engines = engines_at(http)
    await engines.poll([a_target(engine, ready=False)], TOKEN)
    engine.hangs, engines.timeout_seconds = True, 0.0
    assert (await engines.poll([a_target(engine)], TOKEN))["u"].problem is not None
    engines.close()


async def test_observation_before_patch_is_not_repeated(engine: ContractEngine, http: aiohttp.ClientSession) -> None:
    heard, engines = PatchAnswers(), engines_at(http)
    await engines.poll([a_target(engine)], TOKEN)
    await engines.patch([Patch(a_target(engine), {Parameter.MAX_NUM_SEQS: 16}, 1)], TOKEN, heard.hear)
    engine.hangs, engines.timeout_seconds = True, 0.0
    assert (await engines.poll([a_target(engine)], TOKEN))["u"].config is None
    engines.close()


async def test_exception_in_poll_is_reported(
    engine: ContractEngine, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(scrape, "observe_engine", fails)
    said = await engines_at(http).poll([a_target(engine)], TOKEN)
    assert said["u"].problem == "the engine's response could not be processed: ZeroDivisionError"


class PatchAnswers(list[PatchAnswer]):
    """Recorded responses to patches."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = asyncio.Event()

    async def hear(self, _order: Patch, answer: PatchAnswer) -> None:
        self.append(answer)
        if len(self) == 2:
            self.twice.set()


async def test_patch_calls_on_answer(engine: ContractEngine, http: aiohttp.ClientSession) -> None:
    heard, engines = PatchAnswers(), engines_at(http)
    await engines.patch([Patch(a_target(engine), {Parameter.MAX_NUM_SEQS: 16}, 1)], TOKEN, heard.hear)
    await engines.patch([Patch(a_target(engine), {Parameter.MAX_NUM_SEQS: 99}, 2)], TOKEN, heard.hear)
    assert isinstance(heard[0], Patched)
    assert isinstance(heard[1], OutOfBounds)
    assert engine.values["max_num_seqs"] == 16


async def test_patch_is_not_sent_without_lease(engine: ContractEngine, http: aiohttp.ClientSession) -> None:
    heard, engines = PatchAnswers(), replace(engines_at(http), may_write=lambda: False)
    await engines.patch([Patch(a_target(engine), {Parameter.MAX_NUM_SEQS: 16}, 1)], TOKEN, heard.hear)
    assert engine.calls == []
    assert list(heard) == []


async def test_rejected_patch_is_not_repeated(engine: ContractEngine, http: aiohttp.ClientSession) -> None:
    now = [0.0]
    heard, engines = PatchAnswers(), EnginePoller(http, clock=lambda: now[0], timeout_seconds=IN_TIME_SECONDS)
    too_many = Patch(a_target(engine), {Parameter.MAX_NUM_SEQS: 99}, 1)
    for _ in range(3):
        await engines.patch([too_many], TOKEN, heard.hear)
    assert engine.calls == ["PATCH /admin/v1/config"]
    await engines.patch([Patch(a_target(engine), {Parameter.MAX_NUM_SEQS: 98}, 1)], TOKEN, heard.hear)
    now[0] += REJECTED_PATCH_RETRY_SECONDS  # what may be set can have changed: memory was freed
    await engines.patch([too_many], TOKEN, heard.hear)
    assert len(engine.calls) == len(heard) == 3


async def test_rejected_patch_uses_fallback(engine: ContractEngine, http: aiohttp.ClientSession) -> None:
    heard, engines = PatchAnswers(), engines_at(http)
    both = Patch(a_target(engine), {Parameter.MAX_NUM_SEQS: 99}, 1, fallback={Parameter.MAX_NUM_BATCHED_TOKENS: 256})
    for _ in range(2):
        await engines.patch([both], TOKEN, heard.hear)
    assert [type(answer) for answer in heard] == [OutOfBounds, Patched]
    assert engine.values["max_num_batched_tokens"] == 256
    later = replace(both, if_match=2, fallback=None)
    for _ in range(2):
        await engines.patch([later], TOKEN, heard.hear)
    assert [type(answer) for answer in heard] == [OutOfBounds, Patched, OutOfBounds]


async def test_rejected_patches_are_bounded(engine: ContractEngine, http: aiohttp.ClientSession) -> None:
    now = [1000.0]
    heard, engines = PatchAnswers(), EnginePoller(http, clock=lambda: now[0], timeout_seconds=IN_TIME_SECONDS)
    for more in range(6):
        await engines.patch([Patch(a_target(engine), {Parameter.MAX_NUM_SEQS: 99 + more}, 1)], TOKEN, heard.hear)
        now[0] += 200.0
    assert [type(answer) for answer in heard] == [OutOfBounds] * 6
    (conversation,) = engines._states.values()
    assert len(conversation.rejected) == 2  # of the last 300 s


async def test_rejected_patch_and_fallback_send_nothing(engine: ContractEngine, http: aiohttp.ClientSession) -> None:
    heard, engines = PatchAnswers(), engines_at(http)
    both = Patch(a_target(engine), {Parameter.MAX_NUM_SEQS: 99}, 1, fallback={Parameter.MAX_NUM_SEQS: 98})
    for _ in range(5):
        await engines.patch([both], TOKEN, heard.hear)
    assert len(engine.calls) == len(heard) == 2


async def test_hung_engine_gets_no_second_patch(
    engine: ContractEngine, other_engine: ContractEngine, http: aiohttp.ClientSession
) -> None:
    other_engine.hangs = True
    heard, engines = PatchAnswers(), engines_at(http, timeout_seconds=0.5)
    orders = [
        Patch(a_target(found, uid), {Parameter.MAX_NUM_SEQS: 16}, 1)
        for found, uid in ((other_engine, "b"), (engine, "a"))
    ]
    await engines.patch(orders, TOKEN, heard.hear)
    await until(lambda: engine.values["max_num_seqs"] == 16 and other_engine.calls != [])
    await engines.patch(orders[:1], TOKEN, heard.hear)
    assert other_engine.calls == ["PATCH /admin/v1/config"]
    other_engine.released.set()
    await asyncio.wait_for(heard.twice.wait(), timeout=IN_TIME_SECONDS)
    assert other_engine.values["max_num_seqs"] == 16


async def test_poll_in_flight_is_dropped_after_patch(engine: ContractEngine, http: aiohttp.ClientSession) -> None:
    engine.hangs = True
    heard, engines = PatchAnswers(), engines_at(http, timeout_seconds=0.0)
    await engines.poll([a_target(engine)], TOKEN)  # in flight, and will return 32 sequences
    await until(lambda: "GET /admin/v1/config" in engine.calls)
    engine.hangs = False
    engines.timeout_seconds = IN_TIME_SECONDS
    await engines.patch([Patch(a_target(engine), {Parameter.MAX_NUM_SEQS: 16}, 1)], TOKEN, heard.hear)
    engine.released.set()
    said = (await engines.poll([a_target(engine)], TOKEN))["u"]
    assert said.config is not None
    assert said.config.applied[Parameter.MAX_NUM_SEQS] == 16


async def test_deleted_engines_are_dropped(engine: ContractEngine, http: aiohttp.ClientSession) -> None:
    engine.hangs = True
    engines = engines_at(http, timeout_seconds=0.0)
    await engines.poll([a_target(engine)], TOKEN)
    before = len(asyncio.all_tasks())
    assert await engines.poll([], TOKEN) == {}
    await until(lambda: len(asyncio.all_tasks()) < before)

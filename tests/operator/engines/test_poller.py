"""Nobody waits for an engine: who answers in time is heard, who answers late is heard by the next look, and a hung one
holds up neither the others nor the loop.
"""

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
from trimtab_operator.engines.poller import REFUSED_SECONDS, REPEATED_SECONDS, Engines, PatchAnswer
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


def engines_at(http: aiohttp.ClientSession, patience_seconds: float = IN_TIME_SECONDS) -> Engines:
    return Engines(http, patience_seconds=patience_seconds)


def engines_in_time(engines: Engines) -> Engines:
    """The same engines, waited for until they answer."""
    engines.patience_seconds = IN_TIME_SECONDS
    return engines


async def answered(engines: Engines) -> None:
    """What is under way has come, and waits to be taken up by the next look."""
    under_way = [one.asking for one in engines._with.values() if one.asking is not None]
    done, _ = await asyncio.wait(under_way, timeout=IN_TIME_SECONDS)
    assert len(done) == len(under_way)


async def until(is_so: Callable[[], bool]) -> None:
    for _ in range(int(IN_TIME_SECONDS / 0.001)):
        if is_so():
            return
        await asyncio.sleep(0.001)
    pytest.fail("it did not come to that")


async def test_every_engine_is_heard_and_one_that_fails_spoils_nobody_elses_reading(
    engine: ContractEngine, other_engine: ContractEngine, http: aiohttp.ClientSession
) -> None:
    other_engine.metrics = "nonsense"
    unplaced = EngineTarget("d", None, False)
    engines = engines_at(http)
    said = await engines.look([a_target(engine, "a"), a_target(other_engine, "b"), unplaced], TOKEN)
    assert said["a"].sample is not None
    assert said["b"].sample is None
    assert said["d"].problem == "the pod has no address yet"


async def test_a_hung_engine_is_waited_for_once_and_hides_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here takes time but the hung engine: who is faster on a busy machine decides nothing."""
    asked: list[str] = []

    async def ask(target: EngineTarget, **_: object) -> EngineObservation:
        asked.append(target.group)
        if target.group == "hung":
            await asyncio.Event().wait()
        return EngineObservation(True, source=Source.PODS)

    monkeypatch.setattr(scrape, "ask", ask)
    engines = Engines(cast("aiohttp.ClientSession", None), patience_seconds=0.05)
    targets = [EngineTarget(group, "127.0.0.1", True, group) for group in ("hung", "well")]
    for waited in (True, False):
        since = time.monotonic()
        said = await engines.look(targets, TOKEN)
        assert (time.monotonic() - since >= 0.05) or not waited
        assert said["well"].problem is None
        assert said["hung"].problem == "no answer within 0.05 s; it is still waited for"
    assert asked == ["hung", "well", "well"]
    engines.close()


async def test_engines_that_say_the_same_are_known_by_one_request(
    engine: ContractEngine, http: aiohttp.ClientSession
) -> None:
    engines, target = engines_at(http), a_target(engine)
    page = (await engines.look([target], TOKEN))["u"].page
    assert page is not None
    engine.calls.clear()
    assert await engines.say_the_same([(target, page)])
    assert engine.calls == ["GET /metrics"]
    engine.metrics += "process_cpu_seconds_total 1.0\n"  # nobody reads that
    assert await engines.say_the_same([(target, page)])
    engine.metrics = engine.metrics.replace("5000.0", "5001.0")
    assert not await engines.say_the_same([(target, page)])


async def test_what_a_page_said_again_stands_when_the_engine_is_late_after_it(
    engine: ContractEngine, http: aiohttp.ClientSession
) -> None:
    now = [1000.0]
    engines, target = Engines(http, lambda: now[0], patience_seconds=IN_TIME_SECONDS), a_target(engine)
    page = (await engines.look([target], TOKEN))["u"].page
    assert page is not None
    now[0] += REPEATED_SECONDS - 1
    assert await engines.say_the_same([(target, page)])
    now[0] += REPEATED_SECONDS - 1
    engine.hangs, engines.patience_seconds = True, 0.0
    said = (await engines.look([target], TOKEN))["u"]
    assert said.problem is None
    assert said.sample is not None
    assert said.sample.at == 1000.0 + REPEATED_SECONDS - 1
    engines.close()


async def test_an_engine_that_is_late_or_gone_may_say_anything(
    engine: ContractEngine, http: aiohttp.ClientSession
) -> None:
    engines, target = engines_at(http, patience_seconds=0.05), a_target(engine)
    engine.hangs = True
    assert not await engines.say_the_same([(target, b"page")])
    nobody = EngineTarget("g", "127.0.0.1", True, "gone", api_port=1)
    assert not await engines.say_the_same([(nobody, b"page")])


async def test_an_answer_that_comes_late_is_taken_up_by_the_next_look(
    engine: ContractEngine, http: aiohttp.ClientSession
) -> None:
    engine.hangs = True
    engines = engines_at(http, patience_seconds=0.05)
    assert (await engines.look([a_target(engine)], TOKEN))["u"].sample is None
    engine.released.set()
    await answered(engines)
    assert (await engines.look([a_target(engine)], TOKEN))["u"].sample is not None
    engines.close()


async def test_each_finished_request_is_told_once_however_late_its_answer_comes(
    engine: ContractEngine, http: aiohttp.ClientSession
) -> None:
    engines = engines_at(http, patience_seconds=0.0)
    told: list[int] = []
    for finished in (2, 5, 5, 9):
        engine.finished = finished
        engines.patience_seconds = 0.0
        said = (await engines.look([a_target(engine)], TOKEN))["u"]
        await answered(engines)
        for seen in (said, (await engines_in_time(engines).look([a_target(engine)], TOKEN))["u"]):
            if seen.sample is not None and seen.sample.requests is not None:
                told += [row.prompt_tokens - 64 for row in seen.sample.requests.finished]
    assert told == list(range(9))
    engines.close()


async def test_a_late_answer_of_a_pod_that_is_ready_by_now_is_not_taken_for_its_metrics(
    engine: ContractEngine, http: aiohttp.ClientSession
) -> None:
    engine.hangs = True
    engines = engines_at(http, patience_seconds=0.0)
    await engines.look([a_target(engine, ready=False)], TOKEN)
    engine.released.set()
    await answered(engines)
    said = await engines.look([a_target(engine)], TOKEN)
    assert said["u"].ready
    engines.close()


async def test_an_engine_that_is_late_for_once_says_what_it_said_last(
    engine: ContractEngine, http: aiohttp.ClientSession
) -> None:
    engines = engines_at(http)
    before = (await engines.look([a_target(engine)], TOKEN))["u"]
    engine.hangs, engines.patience_seconds = True, 0.0
    late = (await engines.look([a_target(engine)], TOKEN))["u"]
    assert before.sample is not None
    assert late == replace(before, sample=replace(before.sample, requests=None))  # each request is told once
    engines.close()


AT_REST = """\
vllm:num_requests_running{engine="0",model_name="m"} 0.0
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
"""


def at_rest(page: str) -> str:
    """A page of metrics of an engine without a request."""
    gauges = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
    return "\n".join(line for line in page.splitlines() if not line.startswith(gauges)) + "\n" + AT_REST


async def test_who_believes_last_words_asks_nobody_whose_word_stands_and_who_was_at_rest(
    engine: ContractEngine, other_engine: ContractEngine, http: aiohttp.ClientSession
) -> None:
    now = [1000.0]
    engines = Engines(http, clock=lambda: now[0], patience_seconds=IN_TIME_SECONDS)
    known, other = a_target(engine, "a"), a_target(other_engine, "b")
    engine.metrics = at_rest(engine.metrics)
    before = (await engines.look([known], TOKEN))["a"]
    engine.hangs = True  # whoever asks it waits
    now[0] += REPEATED_SECONDS - 1.0
    said = await engines.look([known, other], TOKEN, believes_last_words=True)
    assert before.sample is not None
    assert said["a"] == replace(before, sample=replace(before.sample, requests=None))
    assert said["b"].problem is None
    engine.hangs, engine.metrics = False, "nonsense"
    now[0] += 1.0
    said = await engines.look([known, other], TOKEN, believes_last_words=True)
    assert said["a"].sample is None, "it was asked"
    engines.close()


async def test_an_engine_with_requests_is_asked_whoever_looks(
    engine: ContractEngine, http: aiohttp.ClientSession
) -> None:
    engines, target = engines_at(http), a_target(engine)
    engine.metrics = at_rest(engine.metrics).replace(
        'waiting{engine="0",model_name="m"} 0.0', 'waiting{engine="0",model_name="m"} 1.0'
    )
    await engines.look([target], TOKEN)
    engine.calls.clear()
    await engines.look([target], TOKEN, believes_last_words=True)
    assert "GET /metrics" in engine.calls


async def test_what_was_read_elsewhere_before_an_edit_does_not_stand(
    engine: ContractEngine, http: aiohttp.ClientSession
) -> None:
    engines, target = engines_at(http), a_target(engine)
    engine.metrics = at_rest(engine.metrics)
    assert (await engines.look([target], TOKEN, MetricsSettings("Pods")))["u"].problem is None
    said = await engines.look([target], TOKEN, MetricsSettings("Prometheus"), believes_last_words=True)
    assert said["u"].sample is None, "there is no Prometheus"


async def test_one_that_stays_silent_is_said_to_be_silent(engine: ContractEngine, http: aiohttp.ClientSession) -> None:
    now = [1000.0]
    engines = Engines(http, clock=lambda: now[0], patience_seconds=IN_TIME_SECONDS)
    await engines.look([a_target(engine)], TOKEN)
    engine.hangs, engines.patience_seconds = True, 0.0
    now[0] += REPEATED_SECONDS - 1.0
    assert (await engines.look([a_target(engine)], TOKEN))["u"].problem is None
    now[0] += 1.0
    silent = (await engines.look([a_target(engine)], TOKEN))["u"]
    assert silent.problem == "no answer within 0 s; it is still waited for"
    assert silent.config is None
    engines.close()


async def test_what_a_pod_said_while_it_was_not_ready_is_not_repeated_once_it_is(
    engine: ContractEngine, http: aiohttp.ClientSession
) -> None:
    engines = engines_at(http)
    await engines.look([a_target(engine, ready=False)], TOKEN)
    engine.hangs, engines.patience_seconds = True, 0.0
    assert (await engines.look([a_target(engine)], TOKEN))["u"].problem is not None
    engines.close()


async def test_what_an_engine_said_before_a_change_is_not_repeated_after_it(
    engine: ContractEngine, http: aiohttp.ClientSession
) -> None:
    heard, engines = Heard(), engines_at(http)
    await engines.look([a_target(engine)], TOKEN)
    await engines.patch([Patch(a_target(engine), {Parameter.MAX_NUM_SEQS: 16}, 1)], TOKEN, heard.hear)
    engine.hangs, engines.patience_seconds = True, 0.0
    assert (await engines.look([a_target(engine)], TOKEN))["u"].config is None
    engines.close()


async def test_a_bug_in_reading_an_answer_ends_nobodys_loop(
    engine: ContractEngine, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(scrape, "ask", fails)
    said = await engines_at(http).look([a_target(engine)], TOKEN)
    assert said["u"].problem == "its answer could not be dealt with: ZeroDivisionError"


class Heard(list[PatchAnswer]):
    """What engines said to changes."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = asyncio.Event()

    async def hear(self, _order: Patch, answer: PatchAnswer) -> None:
        self.append(answer)
        if len(self) == 2:
            self.twice.set()


async def test_a_change_is_made_and_its_answer_heard(engine: ContractEngine, http: aiohttp.ClientSession) -> None:
    heard, engines = Heard(), engines_at(http)
    await engines.patch([Patch(a_target(engine), {Parameter.MAX_NUM_SEQS: 16}, 1)], TOKEN, heard.hear)
    await engines.patch([Patch(a_target(engine), {Parameter.MAX_NUM_SEQS: 99}, 2)], TOKEN, heard.hear)
    assert isinstance(heard[0], Patched)
    assert isinstance(heard[1], OutOfBounds)
    assert engine.values["max_num_seqs"] == 16


async def test_no_change_is_sent_once_the_lease_has_ended(engine: ContractEngine, http: aiohttp.ClientSession) -> None:
    heard, engines = Heard(), replace(engines_at(http), may_write=lambda: False)
    await engines.patch([Patch(a_target(engine), {Parameter.MAX_NUM_SEQS: 16}, 1)], TOKEN, heard.hear)
    assert engine.calls == []
    assert list(heard) == []


async def test_a_change_that_was_refused_is_not_sent_again_while_nothing_is_different(
    engine: ContractEngine, http: aiohttp.ClientSession
) -> None:
    now = [0.0]
    heard, engines = Heard(), Engines(http, clock=lambda: now[0], patience_seconds=IN_TIME_SECONDS)
    too_many = Patch(a_target(engine), {Parameter.MAX_NUM_SEQS: 99}, 1)
    for _ in range(3):
        await engines.patch([too_many], TOKEN, heard.hear)
    assert engine.calls == ["PATCH /admin/v1/config"]
    await engines.patch([Patch(a_target(engine), {Parameter.MAX_NUM_SEQS: 98}, 1)], TOKEN, heard.hear)
    now[0] += REFUSED_SECONDS  # what may be set can have changed: memory was freed
    await engines.patch([too_many], TOKEN, heard.hear)
    assert len(engine.calls) == len(heard) == 3


async def test_where_a_change_was_refused_the_other_one_is_sent_and_it_again_when_that_was_taken(
    engine: ContractEngine, http: aiohttp.ClientSession
) -> None:
    heard, engines = Heard(), engines_at(http)
    both = Patch(a_target(engine), {Parameter.MAX_NUM_SEQS: 99}, 1, fallback={Parameter.MAX_NUM_BATCHED_TOKENS: 256})
    for _ in range(2):
        await engines.patch([both], TOKEN, heard.hear)
    assert [type(answer) for answer in heard] == [OutOfBounds, Patched]
    assert engine.values["max_num_batched_tokens"] == 256
    later = replace(both, if_match=2, fallback=None)
    for _ in range(2):
        await engines.patch([later], TOKEN, heard.hear)
    assert [type(answer) for answer in heard] == [OutOfBounds, Patched, OutOfBounds]


async def test_of_an_engine_that_refuses_all_it_is_asked_no_more_is_kept_than_counts(
    engine: ContractEngine, http: aiohttp.ClientSession
) -> None:
    now = [1000.0]
    heard, engines = Heard(), Engines(http, clock=lambda: now[0], patience_seconds=IN_TIME_SECONDS)
    for more in range(6):
        await engines.patch([Patch(a_target(engine), {Parameter.MAX_NUM_SEQS: 99 + more}, 1)], TOKEN, heard.hear)
        now[0] += 200.0
    assert [type(answer) for answer in heard] == [OutOfBounds] * 6
    (conversation,) = engines._with.values()
    assert len(conversation.refused) == 2  # of the last 300 s


async def test_where_both_changes_were_refused_none_is_sent(
    engine: ContractEngine, http: aiohttp.ClientSession
) -> None:
    heard, engines = Heard(), engines_at(http)
    both = Patch(a_target(engine), {Parameter.MAX_NUM_SEQS: 99}, 1, fallback={Parameter.MAX_NUM_SEQS: 98})
    for _ in range(5):
        await engines.patch([both], TOKEN, heard.hear)
    assert len(engine.calls) == len(heard) == 2


async def test_a_hung_engine_holds_up_no_change_of_another_and_gets_no_second_one_meanwhile(
    engine: ContractEngine, other_engine: ContractEngine, http: aiohttp.ClientSession
) -> None:
    other_engine.hangs = True
    heard, engines = Heard(), engines_at(http, patience_seconds=0.5)
    orders = [
        Patch(a_target(found, uid), {Parameter.MAX_NUM_SEQS: 16}, 1) for found, uid in ((other_engine, "b"), (engine, "a"))
    ]
    await engines.patch(orders, TOKEN, heard.hear)
    await until(lambda: engine.values["max_num_seqs"] == 16 and other_engine.calls != [])
    await engines.patch(orders[:1], TOKEN, heard.hear)
    assert other_engine.calls == ["PATCH /admin/v1/config"]
    other_engine.released.set()
    await asyncio.wait_for(heard.twice.wait(), timeout=IN_TIME_SECONDS)
    assert other_engine.values["max_num_seqs"] == 16


async def test_what_an_engine_said_before_a_change_is_not_taken_for_its_values_after(
    engine: ContractEngine, http: aiohttp.ClientSession
) -> None:
    engine.hangs = True
    heard, engines = Heard(), engines_at(http, patience_seconds=0.0)
    await engines.look([a_target(engine)], TOKEN)  # under way, and will say 32 seats
    await until(lambda: "GET /admin/v1/config" in engine.calls)
    engine.hangs = False
    engines.patience_seconds = IN_TIME_SECONDS
    await engines.patch([Patch(a_target(engine), {Parameter.MAX_NUM_SEQS: 16}, 1)], TOKEN, heard.hear)
    engine.released.set()
    said = (await engines.look([a_target(engine)], TOKEN))["u"]
    assert said.config is not None
    assert said.config.applied[Parameter.MAX_NUM_SEQS] == 16


async def test_engines_that_are_gone_are_let_go_of(engine: ContractEngine, http: aiohttp.ClientSession) -> None:
    engine.hangs = True
    engines = engines_at(http, patience_seconds=0.0)
    await engines.look([a_target(engine)], TOKEN)
    before = len(asyncio.all_tasks())
    assert await engines.look([], TOKEN) == {}
    await until(lambda: len(asyncio.all_tasks()) < before)

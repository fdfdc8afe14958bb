"""The API server's client of the core: no caller waits forever, whatever happens to the core."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.engine_client import launcher as launcher_module
from trimtab_engine.engine_client import started_core
from trimtab_engine.engine_client.client import CoreClient
from trimtab_engine.engine_client.launcher import CoreLauncher
from trimtab_engine.errors import EngineDead
from trimtab_engine.messages.admin import GetMemory, PatchConfig
from trimtab_engine.messages.requests import AddRequest, StepStats
from trimtab_engine.scheduling.sampling import Sampling

DEADLINE_SECONDS = 120.0  # for a process to start and answer: machines are slow when much is built on them
BEGIN = """
import json, os, sys, msgspec, zmq
from trimtab_engine.messages.admin import *
from trimtab_engine.messages.channel import *
from trimtab_engine.messages.lifecycle import *
from trimtab_engine.messages.requests import *
start = json.loads(sys.stdin.readline())
context = zmq.Context()
inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
mine = start["clients"][0]; inbox.connect(mine["to_core"]); outbox.connect(mine["from_core"])
send = lambda message: outbox.send(msgspec.msgpack.encode(message))
receive = lambda: msgspec.msgpack.decode(inbox.recv(), type=ToCore)
ready = lambda: send(CoreReady(64, 10, [1], 16, 4, {}))
stats = StepStats(1, 0.0, 0.0, "decode", 0, 0, 0, 4, 4)
"""

RunCore = Callable[..., Awaitable[CoreClient]]


@pytest.fixture
async def run_core(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Start a core that is a few lines of Python; it ends with the test."""
    started: list[tuple[CoreLauncher, CoreClient]] = []

    async def run(lines: str, on_step: Callable[[StepStats], None] = lambda stats: None) -> CoreClient:
        monkeypatch.setattr(started_core, "CORE_COMMAND", (sys.executable, "-c", BEGIN + lines))
        launcher = CoreLauncher(EngineConfig(model="m"))
        client = CoreClient(launcher.addresses[0], on_step=on_step)
        started.append((launcher, client))
        client.open()
        await launcher.start(client)
        return client

    yield run
    for launcher, client in started:
        await launcher.close(client)


async def tokens(client: CoreClient, request_id: str = "a") -> list[int]:
    outputs = client.generate(AddRequest(request_id, [1, 2], Sampling(), 0.0))
    return [token async for output in outputs for token in output.token_ids]


async def soon(work: Awaitable[Any]) -> Any:
    return await asyncio.wait_for(work, DEADLINE_SECONDS)


async def test_outputs_reach_their_request(run_core: RunCore) -> None:
    client = await run_core("""
ready(); ids = [receive().request_id, receive().request_id]
send(StepOutputs([SequenceOutput(ids[0], [7]), SequenceOutput(ids[1], [8], "length")], stats))
send(StepOutputs([SequenceOutput(ids[0], [9], "stop")], stats)); receive()
""")
    await soon(client.loaded.wait())
    answers = await soon(asyncio.gather(tokens(client, "a"), tokens(client, "b")))
    assert sorted(answers) == [[7, 9], [8]]
    assert client.num_requests == 0


async def test_plain_tokens_reach_last_named_requests(run_core: RunCore) -> None:
    client = await run_core("""
ready(); ids = [receive().request_id, receive().request_id]
plain = lambda *columns: send(StepOutputs([], stats, PlainTokens(*columns)))
plain([7, 8], ids); plain([9, 10], None); plain([11], ids[1:])
send(StepOutputs([SequenceOutput(request_id, [], "stop") for request_id in ids], stats)); receive()
""")
    await soon(client.loaded.wait())
    answers = await soon(asyncio.gather(tokens(client, "a"), tokens(client, "b")))
    assert sorted(answers) == [[7, 9], [8, 10, 11]]


async def test_leaving_early_aborts_in_the_core(run_core: RunCore) -> None:
    client = await run_core("""
ready(); request = receive(); send(StepOutputs([SequenceOutput(request.request_id, [7])], stats))
abort = receive(); call = receive(); send(AdminReply(call.call_id, 200, {"aborted": abort.request_ids})); receive()
""")
    await soon(client.loaded.wait())
    outputs = client.generate(AddRequest("a", [1], Sampling(), 0.0))
    await soon(anext(outputs))
    await outputs.aclose()
    assert (await soon(client.call(GetMemory()))).body == {"aborted": ["a"]}


async def test_a_core_that_ends_without_a_word_ends_every_wait(run_core: RunCore) -> None:
    client = await run_core("ready(); receive(); receive(); os._exit(7)")
    await soon(client.loaded.wait())
    waits = [asyncio.ensure_future(tokens(client)), asyncio.ensure_future(client.call(GetMemory()))]
    for wait in waits:
        with pytest.raises(EngineDead, match="exit code 7"):
            await soon(wait)
    assert not client.is_alive


async def test_a_request_sent_to_a_core_that_has_just_ended_does_not_wait_for_ever(run_core: RunCore) -> None:
    client = await run_core("ready(); outbox.close(linger=1000); os._exit(7)")
    await soon(client.loaded.wait())
    for work in (tokens(client), client.call(GetMemory())):
        with pytest.raises(EngineDead):
            await soon(work)


async def test_a_core_that_ends_before_it_reads_its_configuration_is_a_failure(run_core: RunCore) -> None:
    client = await run_core("")
    await soon(client.ended.wait())
    assert client.loaded.is_set()
    assert client.failure is not None
    assert client.failure.exit_code == 1


async def test_the_cores_own_words_are_the_failure(run_core: RunCore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher_module, "DEAD_GRACE_SECONDS", 30.0)  # however busy the machine is
    client = await run_core('send(CoreFailed("no room; lower max_model_len", 2)); outbox.close(linger=30000)')
    await soon(client.ended.wait())
    assert client.failure is not None
    assert (client.failure.message, client.failure.exit_code) == ("no room; lower max_model_len", 2)


async def test_a_message_that_cannot_be_read_ends_every_wait(run_core: RunCore) -> None:
    client = await run_core('ready(); receive(); outbox.send(b"\\xc1nonsense"); receive()')
    await soon(client.loaded.wait())
    with pytest.raises(EngineDead, match="failed to read"):
        await soon(tokens(client))


async def test_a_fault_in_the_statistics_ends_every_wait(run_core: RunCore) -> None:
    def faulty(stats: StepStats) -> None:
        raise RuntimeError("an internal error")

    client = await run_core("ready(); receive(); send(StepOutputs([], stats)); receive()", faulty)
    await soon(client.loaded.wait())
    with pytest.raises(EngineDead, match="an internal error"):
        await soon(tokens(client))


TWO_CORES = """
core = 0 if "/to-0-" in mine["to_core"] else 1
"""


async def two_cores(monkeypatch: pytest.MonkeyPatch, lines: str) -> tuple[CoreLauncher, CoreClient]:
    monkeypatch.setattr(started_core, "CORE_COMMAND", (sys.executable, "-c", BEGIN + TWO_CORES + lines))
    launcher = CoreLauncher(EngineConfig(model="m", data_parallel_size=2))
    client = CoreClient(launcher.addresses[0])
    client.open()
    await launcher.start(client)
    await soon(client.loaded.wait())
    return launcher, client


async def test_rejected_request_tries_next_core_then_queues(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launcher, client = await two_cores(
        monkeypatch,
        """
ready()
while True:
    request = receive()
    if isinstance(request, Shutdown): break
    if not isinstance(request, AddRequest): continue
    full = core == 0 or request.request_id == "b"
    refuses = full and not request.may_queue
    answer = SequenceOutput(request.request_id, [core], "length")
    if refuses: answer = SequenceOutput(request.request_id, [], REFUSED)
    send(ClientOutputs([answer]))
""",
    )
    assert await soon(tokens(client, "a")) == [1], "core 0 has refused"
    assert (await soon(tokens(client, "b")))[0] in (0, 1), "both have refused, one has to queue it"
    pinned = AddRequest("c", [1], Sampling(), 0.0, data_parallel_rank=0)
    assert [token async for output in client.generate(pinned) for token in output.token_ids] == [0]
    await launcher.close(client)


async def test_a_change_that_one_core_refuses_is_made_on_none(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher, client = await two_cores(
        monkeypatch,
        """
ready(); seen = []
while True:
    call = receive()
    if isinstance(call, Shutdown): break
    kind = type(call.call).__name__
    seen.append(kind)
    refuses = core == 1 and kind == "PreparePatch" and call.call.values == {"a": 1}
    send(AdminReply(call.call_id, 422 if refuses else 200, {"message": "no room", "seen": seen}))
""",
    )
    refused = await soon(client.call(PatchConfig({"a": 1})))
    assert (refused.status, refused.body["message"]) == (422, "data-parallel rank 1: no room")
    accepted = await soon(client.call(PatchConfig({"a": 2})))
    assert accepted.status == 200
    assert accepted.body["seen"] == ["PreparePatch", "AbandonPatch", "PreparePatch", "PatchConfig"]
    await launcher.close(client)


async def test_lost_core_fails_requests_of_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher, client = await two_cores(
        monkeypatch,
        """
ready()
while True:
    request = receive()
    if isinstance(request, Shutdown): break
    if core == 1: sys.exit(3)
""",
    )
    first = AddRequest("a", [1], Sampling(), 0.0, data_parallel_rank=0)
    second = AddRequest("b", [1], Sampling(), 0.0, data_parallel_rank=1)

    async def run(request: AddRequest) -> None:
        async for _ in client.generate(request):
            pass

    answers = await soon(asyncio.gather(run(first), run(second), return_exceptions=True))
    assert [type(answer) for answer in answers] == [EngineDead, EngineDead]
    await launcher.close(client)

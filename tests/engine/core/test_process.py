"""The core's process: replies to admin calls, and requests handed over within a step."""

import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import engine_builders
import pytest
from trimtab_engine.core.process import Inbox, Membership, changed_state, serve
from trimtab_engine.device.profiler import Profiler
from trimtab_engine.messages.admin import AdminCall, AdminReply, Call, EngineState, GetConfig, PatchConfig, Sleep
from trimtab_engine.messages.channel import FromCore, ToCore
from trimtab_engine.messages.lifecycle import CoreReady, Shutdown
from trimtab_engine.messages.requests import AbortRequests, AddRequest, StepOutputs
from trimtab_engine.scheduling.sampling import Sampling

if TYPE_CHECKING:
    from trimtab_engine.core.clients import Clients
    from trimtab_engine.core.engine import Engine


def test_changed_state_lists_changed_fields() -> None:
    before = {"max_num_seqs": 32, "gpu_memory_utilization": 0.9, "swap_space": 0}
    after = before | {"max_num_seqs": 9, "gpu_memory_utilization": 0.75}
    assert changed_state(before, after) == "max_num_seqs 32 → 9, gpu_memory_utilization 0.9 → 0.75"


def test_changed_state_without_change_is_empty() -> None:
    assert changed_state({"max_num_seqs": 32}, {"max_num_seqs": 32}) == "the same values"


class FakeEngine:
    """Records calls; has room for one request."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def has_room_for(self, message: AddRequest) -> bool:
        return not any(text.startswith("add") for text in self.told)

    def add(self, message: AddRequest) -> None:
        self.told.append(f"add {message.request_id}")

    def abort(self, request_ids: list[str]) -> None:
        self.told.append(f"abort {request_ids[0]}")


class FakeClients:
    """Delivers the given messages at once."""

    def __init__(self, messages: list[ToCore]) -> None:
        self.coming, self.refused = messages, list[str]()

    def receive(self, timeout_milliseconds: int) -> list[ToCore]:
        messages, self.coming = self.coming, []
        return messages

    def refuse(self, message: AddRequest) -> None:
        self.refused.append(message.request_id)


def a_request(request_id: str, *, may_queue: bool = True) -> AddRequest:
    return AddRequest(request_id, [1], Sampling(), arrival_time=0.0, may_queue=may_queue)


def an_inbox(messages: list[ToCore], *, is_retiring: bool = False) -> tuple[Inbox, FakeEngine, FakeClients]:
    engine, clients = FakeEngine(), FakeClients(messages)
    membership = SimpleNamespace(is_retiring=is_retiring)
    ticks = itertools.count(1.0)
    return (
        Inbox(cast("Engine", engine), cast("Clients", clients), cast("Membership", membership), lambda: next(ticks)),
        engine,
        clients,
    )


def test_inbox_hands_over_requests_until_first_call() -> None:
    call = AdminCall("c", GetConfig())
    inbox, engine, clients = an_inbox([a_request("a"), AbortRequests(["x"]), call, a_request("b")])
    inbox.hand_over_requests()
    assert engine.told == ["add a", "abort x"]
    assert inbox.read_at == 0.0  # not all of it is in any count yet
    clients.coming = [a_request("c")]
    inbox.hand_over_requests()  # another step: the call is still to be answered
    assert engine.told == ["add a", "abort x"]
    left = inbox.take(1000)
    assert left[0] is call
    assert [message.request_id for message in left if isinstance(message, AddRequest)] == ["b", "c"]
    assert inbox.read_at == 3.0
    assert inbox.take(0) == []


def test_inbox_rejects_requests_without_room_or_while_retiring() -> None:
    inbox, engine, clients = an_inbox([a_request("a", may_queue=False), a_request("b", may_queue=False)])
    inbox.hand_over_requests()
    assert (engine.told, clients.refused) == (["add a"], ["b"])
    inbox, engine, clients = an_inbox([a_request("a")], is_retiring=True)
    inbox.hand_over_requests()
    assert (engine.told, clients.refused) == ([], ["a"])


class RecordingClients:
    """One client that sends calls in sequence and records messages."""

    def __init__(self, asks: list[ToCore]) -> None:
        self.asks, self.told = asks, list[FromCore]()

    def receive(self, timeout_milliseconds: int) -> list[ToCore]:
        return [self.asks.pop(0)]

    def send(self, message: FromCore, client_index: int = 0) -> None:
        self.told.append(message)

    broadcast = send_step = send


@pytest.fixture
def model(model_of: Callable[..., Path]) -> Path:
    return model_of(vocab_size=128)


@pytest.mark.parametrize("work", ["idle", "at work"])
def test_config_change_is_visible_before_its_reply(model: Path, work: str) -> None:
    """State and metrics are sent before the reply, also while requests run."""
    engine = engine_builders.an_engine(model)
    least = engine.config()["fields"]["gpu_memory_utilization"]["min"]
    calls: list[Call] = [PatchConfig({"gpu_memory_utilization": least, "max_num_seqs": 3}), Sleep(1, "abort")]
    asks: list[ToCore] = [engine_builders.a_new_request("r", range(20), max_tokens=100)] if work == "at work" else []
    clients = RecordingClients([*asks, *(AdminCall(str(n), call) for n, call in enumerate(calls)), Shutdown()])
    before = engine.ledger().blocks_total
    membership = Membership(cast("Clients", clients), 1, cast("CoreReady", None))
    serve(engine, cast("Clients", clients), Profiler(None), itertools.count(1.0).__next__, membership)

    def told_before_the_answer(to: str) -> tuple[EngineState, StepOutputs]:
        answer = next(n for n, told in enumerate(clients.told) if isinstance(told, AdminReply) and told.call_id == to)
        told = clients.told[:answer]
        return (
            [message for message in told if isinstance(message, EngineState)][-1],
            [message for message in told if isinstance(message, StepOutputs)][-1],
        )

    state, step = told_before_the_answer("0")
    assert state.max_num_seqs == 3
    assert step.stats.config_generation == 2
    assert (step.stats.config_values or {})["max_num_seqs"] == 3
    assert 0 < step.stats.kv_blocks_total < before
    state, step = told_before_the_answer("1")
    assert (state.sleep_level, step.stats.kv_blocks_total) == (1, 0)

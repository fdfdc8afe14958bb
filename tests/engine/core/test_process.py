"""What the core's process says of an admin call, and what it hands its engine in the middle of a step."""

import itertools
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

from trimtab_engine.core.process import Inbox, what_changed
from trimtab_engine.messages import AbortRequests, AddRequest, AdminCall, GetConfig, ToCore
from trimtab_engine.scheduling.sampling import Sampling

if TYPE_CHECKING:
    from trimtab_engine.core.clients import Clients
    from trimtab_engine.core.engine import Engine
    from trimtab_engine.core.process import Membership


def test_a_change_is_told_by_what_has_another_value() -> None:
    before = {"max_num_seqs": 32, "gpu_memory_utilization": 0.9, "swap_space": 0}
    after = before | {"max_num_seqs": 9, "gpu_memory_utilization": 0.75}
    assert what_changed(before, after) == "max_num_seqs 32 → 9, gpu_memory_utilization 0.9 → 0.75"


def test_a_change_to_the_same_values_is_told_as_that() -> None:
    assert what_changed({"max_num_seqs": 32}, {"max_num_seqs": 32}) == "the same values"


class FakeEngine:
    """Notes what it is told; has room for one request."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def has_room_for(self, message: AddRequest) -> bool:
        return not any(text.startswith("add") for text in self.told)

    def add(self, message: AddRequest) -> None:
        self.told.append(f"add {message.request_id}")

    def abort(self, request_ids: list[str]) -> None:
        self.told.append(f"abort {request_ids[0]}")


class FakeClients:
    """Brings these messages, all of them at once."""

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


def test_in_the_middle_of_a_step_requests_come_and_go_up_to_the_first_call() -> None:
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


def test_who_finds_no_room_or_a_core_that_retires_is_refused_in_the_middle_of_a_step_too() -> None:
    inbox, engine, clients = an_inbox([a_request("a", may_queue=False), a_request("b", may_queue=False)])
    inbox.hand_over_requests()
    assert (engine.told, clients.refused) == (["add a"], ["b"])
    inbox, engine, clients = an_inbox([a_request("a")], is_retiring=True)
    inbox.hand_over_requests()
    assert (engine.told, clients.refused) == ([], ["a"])

"""The core's client connections: each client gets its own outputs, and only one gets the statistics."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from trimtab_engine.core.clients import Clients
from trimtab_engine.messages.channel import FromCore, ToCore
from trimtab_engine.messages.lifecycle import ClientAddresses, LoadProgress
from trimtab_engine.messages.requests import (
    AbortRequests,
    AddRequest,
    ClientOutputs,
    PlainTokens,
    SequenceOutput,
    StepOutputs,
    StepStats,
)
from trimtab_engine.multimodal.items import MultiModalItem, Patches, Span
from trimtab_engine.multimodal.sender_receiver_cache import Sender
from trimtab_engine.scheduling.sampling import Sampling

TIMEOUT_MILLISECONDS = 60_000
STATS = StepStats(1, 0.0, 0.0, "decode", 0, 0, 0, 4, 4)


class Client:
    """The other end of a link."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", addresses: ClientAddresses) -> None:
        self._outbox, self._inbox = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        self._outbox.bind(addresses.to_core)
        self._inbox.bind(addresses.from_core)
        self._decoder: msgspec.msgpack.Decoder[FromCore] = msgspec.msgpack.Decoder(FromCore)

    def send(self, message: ToCore) -> None:
        self._outbox.send(msgspec.msgpack.encode(message))

    def receive(self) -> FromCore:
        assert self._inbox.poll(TIMEOUT_MILLISECONDS)
        return self._decoder.decode(self._inbox.recv())

    def has_more(self) -> bool:
        return bool(self._inbox.poll(50))


Three = tuple[Clients, list[Client]]


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Three]:
    addresses = [ClientAddresses(f"ipc://{tmp_path}/t{i}", f"ipc://{tmp_path}/f{i}") for i in range(3)]
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    clients = [Client(context, each) for each in addresses]
    link = Clients(addresses)
    yield link, clients
    link.close()
    context.destroy(linger=0)


def an_add(link: Clients, client: Client, request_id: str, index: int) -> None:
    message = AddRequest(request_id, [1], Sampling(), 0.0, client_index=index)
    client.send(message)
    assert link.receive(TIMEOUT_MILLISECONDS) == [message]


def test_outputs_reach_requester_and_statistics_reach_client_0(three: Three) -> None:
    link, (first, second, third) = three
    an_add(link, second, "a", 1)
    an_add(link, third, "b", 2)
    link.send_step(StepOutputs([SequenceOutput("a", [7]), SequenceOutput("b", [8], "stop")], STATS))
    assert first.receive() == StepOutputs([], STATS)
    assert second.receive() == ClientOutputs([SequenceOutput("a", [7])], 1)
    assert third.receive() == ClientOutputs([SequenceOutput("b", [8], "stop")], 1)


def an_image() -> MultiModalItem:
    return MultiModalItem("image", b"digest", 3, (1, 2, 6), Patches(1, bytes(12), bytes(1024)))


def test_cached_images_are_restored_per_client(tmp_path: Path) -> None:
    addresses = [ClientAddresses(f"ipc://{tmp_path}/t{i}", f"ipc://{tmp_path}/f{i}") for i in range(2)]
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    first, second = (Client(context, each) for each in addresses)
    link, sender = Clients(addresses, media_cache_bytes=10_000), Sender(10_000)

    def sent(request_id: str) -> AddRequest:
        token_ids, spans = sender.shortened([5, 9, 9, 9, 6], [Span(1, an_image())])
        return AddRequest(request_id, token_ids, Sampling(), 0.0, spans=spans)

    for request_id in ("whole", "by name"):
        first.send(sent(request_id))
        (received,) = link.receive(TIMEOUT_MILLISECONDS)
        assert isinstance(received, AddRequest)
        assert (received.prompt_token_ids, received.spans) == ([5, 9, 9, 9, 6], (Span(1, an_image()),))
    stranger = sent("by another's name")
    stranger.client_index = 1
    second.send(stranger)
    first.send(AbortRequests(["x"]))
    heard: list[ToCore] = []
    while AbortRequests(["x"]) not in heard or not second.has_more():
        heard += link.receive(50)
    assert heard == [AbortRequests(["x"])]
    answer = second.receive()
    assert isinstance(answer, ClientOutputs)
    (output,) = answer.outputs
    assert (output.finish_reason, output.is_engines_fault) == ("error", True)
    assert "which this core lacks" in output.error
    link.close()
    context.destroy(linger=0)


def test_a_client_without_outputs_hears_nothing(three: Three) -> None:
    link, (first, second, third) = three
    an_add(link, second, "a", 1)
    link.send_step(StepOutputs([SequenceOutput("a", [7], "length")], STATS))
    assert isinstance(first.receive(), StepOutputs)
    assert isinstance(second.receive(), ClientOutputs)
    assert not third.has_more()


def test_plain_tokens_include_request_ids_only_when_changed(three: Three) -> None:
    link, (first, second, third) = three
    an_add(link, second, "a", 1)
    ids, rest = ["a", "b", "c"], ["b", "c"]
    link.send_step(StepOutputs([], STATS, PlainTokens([1, 2, 3], ids)))
    link.send_step(StepOutputs([], STATS, PlainTokens([4, 5, 6], ids)))
    link.send_step(StepOutputs([], STATS, PlainTokens([7, 8], rest)))
    assert [first.receive() for _ in range(3)] == [
        StepOutputs([], STATS, PlainTokens([2, 3], ["b", "c"])),
        StepOutputs([], STATS, PlainTokens([5, 6], None)),
        StepOutputs([], STATS, PlainTokens([7, 8], ["b", "c"])),
    ]
    assert [second.receive() for _ in range(2)] == [
        ClientOutputs([], 1, plain=PlainTokens([1], ["a"])),
        ClientOutputs([], 1, plain=PlainTokens([4], None)),
    ]
    assert not second.has_more()
    assert not third.has_more()


def test_requests_that_ended_are_forgotten(three: Three) -> None:
    link, (first, second, third) = three
    an_add(link, second, "a", 1)
    an_add(link, third, "b", 2)
    link.send_step(StepOutputs([SequenceOutput("a", [], "abort")], STATS))
    third.send(AbortRequests(["b", "unknown"]))
    link.receive(TIMEOUT_MILLISECONDS)
    assert not link._client_of
    link.send_step(StepOutputs([SequenceOutput("b", [7])], STATS))
    first.receive()
    assert first.receive() == StepOutputs([SequenceOutput("b", [7])], STATS)  # the client there knows it no more


def test_progress_reaches_every_client(three: Three) -> None:
    link, clients = three
    link.broadcast(LoadProgress("weights", 1.0))
    assert [client.receive() for client in clients] == [LoadProgress("weights", 1.0)] * 3

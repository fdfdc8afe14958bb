"""Nodes hear only those who know their secret, over real sockets on the loopback interface."""

import asyncio
from pathlib import Path

import msgspec
import pytest
import zmq
from trimtab_engine.errors import ConfigError
from trimtab_engine.ipc import shared_secret
from trimtab_engine.ipc.shared_secret import (
    NothingSaid,
    NotProven,
    Seals,
    SharedSecret,
    prove_as_caller,
    prove_as_listener,
)
from trimtab_engine.ipc.stream import StreamLink

OURS, THEIRS = SharedSecret(b"0123456789abcdef"), SharedSecret(b"another secret!!")
WAIT_MILLISECONDS = 10_000
DEAF_MILLISECONDS = 300
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Word(msgspec.Struct, tag="word"):
    text: str


async def connected() -> tuple[Streams, Streams, asyncio.Server]:
    """Both ends of one connection: the listener's and the caller's."""
    accepted: asyncio.Future[Streams] = asyncio.get_running_loop().create_future()
    server = await asyncio.start_server(lambda *streams: accepted.set_result(streams), "127.0.0.1", 0)
    caller = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
    return await accepted, caller, server


async def meet(listens: SharedSecret, calls: SharedSecret) -> tuple[Seals | BaseException, Seals | BaseException]:
    listener, caller, server = await connected()

    async def listen() -> Seals:
        try:
            return await prove_as_listener(listens, *listener)
        except NotProven:
            listener[1].close()
            raise

    outcome = await asyncio.gather(listen(), prove_as_caller(calls, *caller), return_exceptions=True)
    for _, writer in (listener, caller):
        writer.close()
    server.close()
    return outcome[0], outcome[1]


async def test_who_has_the_secret_is_believed() -> None:
    listens, calls = await meet(OURS, OURS)
    assert isinstance(listens, Seals)
    assert isinstance(calls, Seals)
    assert listens.incoming.open(calls.outgoing.close(b"there")) == b"there"
    assert calls.incoming.open(listens.outgoing.close(b"back")) == b"back"


async def test_another_secret_is_refused_on_both_sides() -> None:
    for listens, calls in ((OURS, THEIRS), (THEIRS, OURS)):
        assert all(isinstance(outcome, NotProven) for outcome in await meet(listens, calls))


@pytest.mark.parametrize("tamper", ["changed", "repeated", "reflected", "another connection's"])
async def test_a_message_that_was_tampered_with_is_refused(tamper: str) -> None:
    listens, calls = await meet(OURS, OURS)
    others, _ = await meet(OURS, OURS)
    assert isinstance(listens, Seals)
    assert isinstance(calls, Seals)
    assert isinstance(others, Seals)
    sealed = calls.outgoing.close(b"end")
    if tamper == "changed":
        sealed = sealed[:-1] + b"!"
    elif tamper == "repeated":
        assert listens.incoming.open(sealed) == b"end"
    elif tamper == "reflected":
        sealed = listens.outgoing.close(b"end")
    reader = others if tamper == "another connection's" else listens
    with pytest.raises(NotProven, match="code is wrong"):
        reader.incoming.open(sealed)


async def test_a_sealed_stream_carries_messages_and_takes_no_stranger_s() -> None:
    listener, caller, server = await connected()
    theirs, ours = await asyncio.gather(prove_as_listener(OURS, *listener), prove_as_caller(OURS, *caller))
    listens: StreamLink[Word] = StreamLink(*listener, Word, theirs)
    StreamLink(*caller, Word, ours).send(Word("hello"))
    assert await listens.receive() == Word("hello")
    StreamLink(*caller, Word).send(Word("slipped in"))
    with pytest.raises(msgspec.DecodeError):
        await listens.receive()
    listens.close()
    caller[1].close()
    server.close()


async def test_a_listener_tells_a_stranger_from_somebody_who_only_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_secret, "PROOF_SECONDS", 0.1)
    for sent, why in ((b"", NothingSaid), (b"GET / HTTP/1.1\r\n\r\n", NotProven)):
        listener, caller, server = await connected()
        caller[1].write(sent)
        caller[1].write_eof()
        with pytest.raises(why) as refused:
            await prove_as_listener(OURS, *listener)
        assert refused.type is why
        for _, writer in (listener, caller):
            writer.close()
        server.close()
    listener, caller, server = await connected()
    with pytest.raises(NotProven, match="did not prove within"):
        await prove_as_listener(OURS, *listener)
    for _, writer in (listener, caller):
        writer.close()
    server.close()


@pytest.mark.parametrize(("calls", "is_heard"), [(OURS, True), (THEIRS, False), (None, False)])
def test_a_guarded_zmq_socket_hears_those_with_the_secret_alone(calls: SharedSecret | None, is_heard: bool) -> None:
    context = zmq.Context()
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    try:
        OURS.guard_listener(inbox)
        port = inbox.bind_to_random_port("tcp://127.0.0.1")
        if calls is not None:
            calls.guard_caller(outbox)
        outbox.connect(f"tcp://127.0.0.1:{port}")
        outbox.send(b"word")
        assert bool(inbox.poll(WAIT_MILLISECONDS if is_heard else DEAF_MILLISECONDS)) == is_heard
    finally:
        for socket in (inbox, outbox):
            socket.close(linger=0)
        context.term()


def test_a_secret_is_read_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(b"0123456789abcdef\n")
    read = SharedSecret.read(str(file))
    assert read is not None
    assert read.key(b"a") == OURS.key(b"a") != OURS.key(b"b") != THEIRS.key(b"b")
    assert SharedSecret.read(None) is None


@pytest.mark.parametrize("content", [b"", b"short", b" " * 64, b"x" * 5000])
def test_a_file_without_a_secret_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "secret"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="must hold a secret of 16 to 4096 bytes"):
        SharedSecret.read(str(file))
    with pytest.raises(ConfigError, match="No such file"):
        SharedSecret.read(str(tmp_path / "none"))

"""Mutual authentication of nodes over real sockets on the loopback interface."""

import asyncio
from pathlib import Path

import msgspec
import pytest
import zmq
from trimtab_engine.errors import ConfigError
from trimtab_engine.ipc import shared_secret
from trimtab_engine.ipc.shared_secret import (
    AuthenticationFailed,
    ClosedBeforeHandshake,
    ConnectionAuthenticator,
    SharedSecret,
    authenticate_as_caller,
    authenticate_as_listener,
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


async def meet(
    listens: SharedSecret, calls: SharedSecret
) -> tuple[ConnectionAuthenticator | BaseException, ConnectionAuthenticator | BaseException]:
    listener, caller, server = await connected()

    async def listen() -> ConnectionAuthenticator:
        try:
            return await authenticate_as_listener(listens, *listener)
        except AuthenticationFailed:
            listener[1].close()
            raise

    outcome = await asyncio.gather(listen(), authenticate_as_caller(calls, *caller), return_exceptions=True)
    for _, writer in (listener, caller):
        writer.close()
    server.close()
    return outcome[0], outcome[1]


async def test_equal_secrets_authenticate() -> None:
    listens, calls = await meet(OURS, OURS)
    assert isinstance(listens, ConnectionAuthenticator)
    assert isinstance(calls, ConnectionAuthenticator)
    assert listens.incoming.open(calls.outgoing.close(b"there")) == b"there"
    assert calls.incoming.open(listens.outgoing.close(b"back")) == b"back"


async def test_different_secret_fails_on_both_sides() -> None:
    for listens, calls in ((OURS, THEIRS), (THEIRS, OURS)):
        assert all(isinstance(outcome, AuthenticationFailed) for outcome in await meet(listens, calls))


@pytest.mark.parametrize("tamper", ["changed", "repeated", "reflected", "another connection's"])
async def test_a_message_that_was_tampered_with_is_refused(tamper: str) -> None:
    listens, calls = await meet(OURS, OURS)
    others, _ = await meet(OURS, OURS)
    assert isinstance(listens, ConnectionAuthenticator)
    assert isinstance(calls, ConnectionAuthenticator)
    assert isinstance(others, ConnectionAuthenticator)
    sealed = calls.outgoing.close(b"end")
    if tamper == "changed":
        sealed = sealed[:-1] + b"!"
    elif tamper == "repeated":
        assert listens.incoming.open(sealed) == b"end"
    elif tamper == "reflected":
        sealed = listens.outgoing.close(b"end")
    reader = others if tamper == "another connection's" else listens
    with pytest.raises(AuthenticationFailed, match="wrong authentication code"):
        reader.incoming.open(sealed)


async def test_authenticated_stream_rejects_foreign_messages() -> None:
    listener, caller, server = await connected()
    theirs, ours = await asyncio.gather(
        authenticate_as_listener(OURS, *listener), authenticate_as_caller(OURS, *caller)
    )
    listens: StreamLink[Word] = StreamLink(*listener, Word, theirs)
    StreamLink(*caller, Word, ours).send(Word("hello"))
    assert await listens.receive() == Word("hello")
    StreamLink(*caller, Word).send(Word("slipped in"))
    with pytest.raises(msgspec.DecodeError):
        await listens.receive()
    listens.close()
    caller[1].close()
    server.close()


async def test_listener_distinguishes_port_check_from_wrong_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_secret, "PROOF_SECONDS", 0.1)
    for sent, why in ((b"", ClosedBeforeHandshake), (b"GET / HTTP/1.1\r\n\r\n", AuthenticationFailed)):
        listener, caller, server = await connected()
        caller[1].write(sent)
        caller[1].write_eof()
        with pytest.raises(why) as refused:
            await authenticate_as_listener(OURS, *listener)
        assert refused.type is why
        for _, writer in (listener, caller):
            writer.close()
        server.close()
    listener, caller, server = await connected()
    with pytest.raises(AuthenticationFailed, match="no proof of the secret within"):
        await authenticate_as_listener(OURS, *listener)
    for _, writer in (listener, caller):
        writer.close()
    server.close()


@pytest.mark.parametrize(("calls", "is_heard"), [(OURS, True), (THEIRS, False), (None, False)])
def test_curve_socket_accepts_only_shared_secret(calls: SharedSecret | None, is_heard: bool) -> None:
    context = zmq.Context()
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    try:
        OURS.set_curve_server(inbox)
        port = inbox.bind_to_random_port("tcp://127.0.0.1")
        if calls is not None:
            calls.set_curve_client(outbox)
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

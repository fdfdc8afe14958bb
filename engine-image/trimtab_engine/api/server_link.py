"""What the first process and its API servers say to each other, and the socket they say it on.

Each server has one stream socket to the first process, inherited at its start: msgpack with a length before each
message. Its end is noticed at once by the other side, however a process dies.
"""

import asyncio
import socket
from typing import Any, Generic, TypeVar

import msgspec

from trimtab_engine.api.observations import Observations
from trimtab_engine.api.state import ServerOptions
from trimtab_engine.config import EngineConfig
from trimtab_engine.messages import ClientAddresses, CoreFailed

LENGTH_BYTES = 4

# --- first process -> server --------------------------------------------------------------------------------------


class Start(msgspec.Struct, tag="start"):
    """The first message. `listen_fd` is the inherited listening socket, `client_index` the server's at the core."""

    client_index: int
    addresses: list[ClientAddresses]
    """Where it meets each engine core."""
    num_clients: int
    listen_fd: int
    config: EngineConfig
    options: ServerOptions


class Serve(msgspec.Struct, tag="serve"):
    """All servers have loaded: accept requests."""


class Drain(msgspec.Struct, tag="drain"):
    """Accept nothing new; what runs goes on."""


class AbortAll(msgspec.Struct, tag="abort_all"):
    """End what still runs."""


class Failed(msgspec.Struct, tag="engine_failed"):
    """The engine serves no more: everything that waits gets an error, and what comes gets 503."""

    failure: CoreFailed


class End(msgspec.Struct, tag="end"):
    """Close within `seconds` and end the process."""

    seconds: int


class Flush(msgspec.Struct, tag="flush"):
    """Somebody asks for the metrics: send what you have seen, then Flushed with the same id."""

    flush_id: int


class Answer(msgspec.Struct, tag="answer"):
    """The answer to an Ask."""

    ask_id: int
    body: bytes


ToServer = Start | Serve | Drain | AbortAll | Failed | End | Flush | Answer

# --- server -> first process --------------------------------------------------------------------------------------


class Loaded(msgspec.Struct, tag="loaded"):
    """The tokenizer is read and the core is ready."""


class LoadFailed(msgspec.Struct, tag="load_failed"):
    """This server cannot serve: the line to print."""

    message: str


class Flushed(msgspec.Struct, tag="flushed"):
    """All is sent. `steps`: up to which step of each core this server has had outputs."""

    flush_id: int
    steps: list[int]


class Ask(msgspec.Struct, tag="ask"):
    """A question that only the first process can answer: metrics, or load (requests being answered by all servers)."""

    ask_id: int
    what: str


FromServer = Loaded | LoadFailed | Observations | Flushed | Ask

# --- the socket ---------------------------------------------------------------------------------------------------

Received = TypeVar("Received")


class Link(Generic[Received]):
    """One end. `received` is the union of the messages that come to this end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, received: Any) -> None:
        self._reader, self._writer = reader, writer
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Received] = msgspec.msgpack.Decoder(received)

    @classmethod
    async def over(cls, end: socket.socket, received: Any) -> "Link[Received]":
        reader, writer = await asyncio.open_unix_connection(sock=end)
        return cls(reader, writer, received)

    def send(self, message: ToServer | FromServer) -> None:
        """Never waits; to a process that has ended it does nothing."""
        if self._writer.is_closing():
            return
        body = self._encoder.encode(message)
        self._writer.write(len(body).to_bytes(LENGTH_BYTES, "big") + body)

    async def receive(self) -> Received | None:
        """The next message; None when the other side has ended."""
        try:
            length = int.from_bytes(await self._reader.readexactly(LENGTH_BYTES), "big")
            return self._decoder.decode(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    def close(self) -> None:
        self._writer.close()

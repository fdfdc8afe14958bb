"""A stream socket between two processes of the engine: msgpack with a length before each message, never pickle.

The end of either side is noticed at once by the other, however a process dies.
"""

import asyncio
import socket
from typing import Any, Generic, TypeVar

import msgspec

from trimtab_engine.ipc.shared_secret import NotProven, Seals

LENGTH_BYTES = 4
MAX_MESSAGE_BYTES = 256 << 20  # far above any batch of observations; what claims to be longer is no message of ours

Received = TypeVar("Received")


class StreamLink(Generic[Received]):
    """One end. `received` is the union of the messages that come to this end; `seals` those of a proven connection."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        received: Any,
        seals: Seals | None = None,
    ) -> None:
        self._reader, self._writer, self._seals = reader, writer, seals
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Received] = msgspec.msgpack.Decoder(received)

    @classmethod
    async def over(cls, end: socket.socket, received: Any) -> "StreamLink[Received]":
        """Over one end of a socket pair."""
        reader, writer = await asyncio.open_unix_connection(sock=end)
        return cls(reader, writer, received)

    def send(self, message: msgspec.Struct) -> None:
        """Never waits; to a process that has ended it does nothing."""
        if self._writer.is_closing():
            return
        write_frame(self._writer, self._encoder.encode(message), self._seals)

    async def receive(self) -> Received | None:
        """The next message; None when the other side has ended. Raises msgspec.DecodeError for what is no message."""
        try:
            body = await read_frame(self._reader, self._seals)
        except NotProven as error:
            raise msgspec.DecodeError(str(error)) from None
        return None if body is None else self._decoder.decode(body)

    def close(self) -> None:
        self._writer.close()


def write_frame(writer: asyncio.StreamWriter, body: bytes, seals: Seals | None) -> None:
    if seals is not None:
        body = seals.outgoing.close(body)
    writer.write(len(body).to_bytes(LENGTH_BYTES, "big") + body)


async def read_frame(reader: asyncio.StreamReader, seals: Seals | None) -> bytes | None:
    """The next frame's body; None at the end. Raises DecodeError for one that is too long, NotProven for a stranger's
    on a sealed connection."""
    try:
        length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
        if length > MAX_MESSAGE_BYTES:
            raise msgspec.DecodeError(f"a message of {length} bytes")
        body = await reader.readexactly(length)
    except (asyncio.IncompleteReadError, OSError):
        return None
    return body if seals is None else seals.incoming.open(body)

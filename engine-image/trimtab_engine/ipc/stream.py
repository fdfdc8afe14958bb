"""Stream sockets between the engine's processes: length-prefixed msgpack messages, never pickle. Each side detects the
end of the other immediately, even after a crash.
"""

import asyncio
import socket
from typing import Any, Generic, TypeVar

import msgspec

from trimtab_engine.ipc.shared_secret import AuthenticationFailed, ConnectionAuthenticator

LENGTH_BYTES = 4
MAX_MESSAGE_BYTES = 256 << 20  # far above any batch of observations; anything longer is not a valid message

Received = TypeVar("Received")


class StreamLink(Generic[Received]):
    """One end of a stream. `received` is the union of message types received at this end; `seals` authenticates a
    proven connection.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        received: Any,
        seals: ConnectionAuthenticator | None = None,
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
        """Return the next message. None if the peer has closed the connection.

        Raises:
            msgspec.DecodeError: If the message is invalid.
        """
        try:
            body = await read_frame(self._reader, self._seals)
        except AuthenticationFailed as error:
            raise msgspec.DecodeError(str(error)) from None
        return None if body is None else self._decoder.decode(body)

    def close(self) -> None:
        self._writer.close()


def write_frame(writer: asyncio.StreamWriter, body: bytes, seals: ConnectionAuthenticator | None) -> None:
    if seals is not None:
        body = seals.outgoing.close(body)
    writer.write(len(body).to_bytes(LENGTH_BYTES, "big") + body)


async def read_frame(reader: asyncio.StreamReader, seals: ConnectionAuthenticator | None) -> bytes | None:
    """Return the next frame's body; None at the end. Raises DecodeError for one that is too long, AuthenticationFailed
    for a stranger's on a sealed connection.
    """
    try:
        length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
        if length > MAX_MESSAGE_BYTES:
            raise msgspec.DecodeError(f"a message of {length} bytes")
        body = await reader.readexactly(length)
    except (asyncio.IncompleteReadError, OSError):
        return None
    return body if seals is None else seals.incoming.open(body)

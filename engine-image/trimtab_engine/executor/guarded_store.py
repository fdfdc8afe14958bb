"""Authenticated access to torch's TCP store, which has no authentication itself. Only ranks that know the replica's
secret can reach it.

    rank ── its store client ── loopback ── caller's relay ══ network ══ listener's relay ── loopback ── the store
                                            (proof, then authenticated frames)

The store listens on the loopback interface of the node that serves it, and is reached through relays. They carry the
ranks' rendezvous data and little afterwards, in a separate thread with its own event loop.
"""

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Awaitable, Callable

import msgspec

from trimtab_engine.ipc.shared_secret import (
    AuthenticationFailed,
    ClosedBeforeHandshake,
    ConnectionAuthenticator,
    SharedSecret,
    authenticate_as_caller,
    authenticate_as_listener,
)
from trimtab_engine.ipc.stream import read_frame, write_frame

CHUNK_BYTES = 64 << 10
CONNECT_SECONDS = 3.0  # packets to the address of a lost node are dropped
LOOPBACK = "127.0.0.1"

logger = logging.getLogger("trimtab_engine.rendezvous")

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Relay:
    """Accepts on a socket and joins each connection to one that `connect` makes; a daemon thread, until close()."""

    def __init__(
        self,
        listener: socket.socket,
        join: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
    ) -> None:
        self.port = int(listener.getsockname()[1])
        self._listener, self._join = listener, join
        self._loop = asyncio.new_event_loop()
        self._connections: set[asyncio.Task[None]] = set()
        self._told = ""
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="store-relay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop accepting and close all connections."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join()

    def _run(self) -> None:
        with contextlib.closing(self._loop):
            self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._accept, sock=self._listener)
        await self._closing.wait()
        server.close()
        for connection in list(self._connections):
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            await self._join(reader, writer)
        except (OSError, TimeoutError):
            pass  # the other end is absent: the caller's connection closes
        except (AuthenticationFailed, msgspec.DecodeError) as error:
            if str(error) != self._told:  # a rejected rank retries
                self._told = str(error)
                logger.warning("a connection to the ranks' store was ended: %s", error)
        except asyncio.CancelledError:  # cancelled by close(); no task awaits this one
            pass
        finally:
            self._connections.discard(task)
            writer.close()


def guard_store(listener: socket.socket, store_port: int, secret: SharedSecret) -> Relay:
    """Relay connections to `listener` that prove knowledge of the secret to the store on the loopback interface."""

    async def join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            seals = await authenticate_as_listener(secret, reader, writer)
        except ClosedBeforeHandshake:
            return
        store = await asyncio.open_connection(LOOPBACK, store_port)
        await _pump_both(store, (reader, writer), seals)

    return Relay(listener, join)


def reach_store(host: str, port: int, secret: SharedSecret) -> Relay:
    """Listen on the loopback interface for this process's store client, and lead it to the guarded store.

    Raises AuthenticationFailed when there is another one, OSError when there is none. Looked at beforehand, as torch's
    client only knows that it has to try again.
    """

    async def connect() -> tuple[Streams, ConnectionAuthenticator]:
        far = await asyncio.wait_for(asyncio.open_connection(host, port), CONNECT_SECONDS)
        try:
            return far, await authenticate_as_caller(secret, *far)
        except BaseException:
            far[1].close()
            raise

    async def look() -> None:
        (_, writer), _ = await connect()
        writer.close()

    async def join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far, seals = await connect()
        try:
            await _pump_both((reader, writer), far, seals)
        finally:
            far[1].close()

    asyncio.run(look())
    return Relay(socket.create_server((LOOPBACK, 0)), join)


async def _pump_both(near: Streams, far: Streams, seals: ConnectionAuthenticator) -> None:
    """Carry bytes between the loopback side and the sealed side until either ends."""
    ways = {
        asyncio.create_task(_seal_all(near[0], far[1], seals)),
        asyncio.create_task(_open_all(far[0], near[1], seals)),
    }
    try:
        done, _ = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in done:
            way.result()
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        near[1].close()


async def _seal_all(near: asyncio.StreamReader, far: asyncio.StreamWriter, seals: ConnectionAuthenticator) -> None:
    while chunk := await near.read(CHUNK_BYTES):
        write_frame(far, chunk, seals)
        await far.drain()


async def _open_all(far: asyncio.StreamReader, near: asyncio.StreamWriter, seals: ConnectionAuthenticator) -> None:
    while (chunk := await read_frame(far, seals)) is not None:
        near.write(chunk)
        await near.drain()

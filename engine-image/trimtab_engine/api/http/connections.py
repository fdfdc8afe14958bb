"""Limits on connections of one HTTP server: how many may be open, for how long a client may be silent, and how many
bytes of unfinished request bodies are held. Connections that wait for their client cost it nothing, so they never keep
other clients or probes out: at a limit the one that has been silent longest is closed.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

HEAD_SECONDS = 10.0  # from the connection, or the first byte of a later request, to the end of the request's head
BODY_SILENCE_SECONDS = 30.0  # between two parts of a request's body
SWEEP_SECONDS = 1.0


class Connection(Protocol):
    """A connection that can be closed with a reason, and whether its server has stopped reading from it."""

    @property
    def is_reading_paused(self) -> bool: ...

    def time_out(self, message: str) -> None: ...


class ConnectionLimits:
    """The connections of one server. Its protocols report the data that they wait for."""

    def __init__(self, max_connections: int, max_unfinished_bytes: Callable[[], int]) -> None:
        self.max_connections, self.max_unfinished_bytes = max_connections, max_unfinished_bytes
        self._num_connections = 0
        self._heads: OrderedDict[Connection, float] = OrderedDict()
        """Connections without a complete request head, by the time since when, oldest first."""
        self._bodies: OrderedDict[Connection, float] = OrderedDict()
        """Connections with an unfinished request body, by the time of the last bytes, oldest first."""
        self._body_bytes: dict[Connection, int] = {}
        self._num_unfinished_bytes = 0

    def open(self, connection: Connection, now: float) -> bool:
        """Count a new connection. At the limit close the one that has been silent longest. Return False if there is
        none: the new one must be rejected.
        """
        if self._num_connections >= self.max_connections:
            waiting = self._heads or self._bodies
            if not waiting:
                return False
            next(iter(waiting)).time_out("closed to make room for other connections")
        self._num_connections += 1
        self._heads[connection] = now
        return True

    def close(self, connection: Connection) -> None:
        """Forget a connection that was counted."""
        self._num_connections -= 1
        self._heads.pop(connection, None)
        self._end_body(connection)

    def await_head(self, connection: Connection, now: float) -> None:
        """Note that the connection waits for a request, or received the first bytes of one."""
        self._heads[connection] = now
        self._heads.move_to_end(connection)

    def await_body(self, connection: Connection, now: float) -> None:
        """Note that the connection has a complete head."""
        self._heads.pop(connection, None)
        self._bodies[connection] = now
        self._bodies.move_to_end(connection)

    def receive_body(self, connection: Connection, num_bytes: int, now: float) -> None:
        """Count bytes of a body. Beyond the limit of all, close the connections that have been silent longest."""
        self._bodies[connection] = now
        self._bodies.move_to_end(connection)
        self._body_bytes[connection] = self._body_bytes.get(connection, 0) + num_bytes
        self._num_unfinished_bytes += num_bytes
        while self._num_unfinished_bytes > self.max_unfinished_bytes():
            slowest = next(iter(self._bodies))
            self._end_body(slowest)
            slowest.time_out("too many unfinished request bodies")

    def finish_body(self, connection: Connection) -> None:
        """Note that the request was received completely."""
        self._end_body(connection)

    def sweep(self, now: float) -> None:
        """Close connections whose client has been silent for too long."""
        while self._heads:
            connection, since = next(iter(self._heads.items()))
            if now - since < HEAD_SECONDS:
                break
            del self._heads[connection]
            connection.time_out(f"the request's head did not arrive within {HEAD_SECONDS:.0f} s")
        while self._bodies:
            connection, since = next(iter(self._bodies.items()))
            if now - since < BODY_SILENCE_SECONDS:
                break
            if connection.is_reading_paused:  # the server is the slow one
                self.await_body(connection, now)
                continue
            self._end_body(connection)
            connection.time_out(f"no part of the request's body arrived for {BODY_SILENCE_SECONDS:.0f} s")

    async def sweep_forever(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self.sweep(loop.time())

    def _end_body(self, connection: Connection) -> None:
        self._bodies.pop(connection, None)
        self._num_unfinished_bytes -= self._body_bytes.pop(connection, 0)

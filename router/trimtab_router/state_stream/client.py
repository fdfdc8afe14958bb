"""State streams of all replicas: one long HTTP connection each, opened again when it ends.

A stream that breaks, falls silent, loses a message or is not understood is closed and starts again with a snapshot.
Engines are not trusted: frames, rates and numbers are bounded, and an engine's errors affect its own replica only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable

import aiohttp
from yarl import URL

from trimtab_router.endpoints.endpoint import Endpoint
from trimtab_router.protocol.messages import BEAT_SECONDS, MAX_FRAME_BYTES, VERSION, FrameError, FrameReader, Hello
from trimtab_router.state_stream.registry import Receive, Registry
from trimtab_router.state_stream.replica import SequenceGap

PATH = "/admin/v1/state"
CONNECT_SECONDS = 2.0
SILENCE_SECONDS = 4 * BEAT_SECONDS
MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 0.1, 5.0
MAX_MESSAGES_PER_SECOND = 1000
"""Per core; an engine sends 50."""
MAX_BYTES_PER_SECOND = 1 << 20
"""130,000 keys."""
MAX_BURST_BYTES = 2 * MAX_FRAME_BYTES
HELLO_BYTES = 1 << 20
"""A Hello counts as this many bytes, because it makes the router look at all keys."""

logger = logging.getLogger("trimtab_router.state_stream")


class StreamRejected(Exception):
    """The engine answered with another status than 200."""


class StateStreams:
    """Starts a stream for each endpoint of a registry. Create it in the event loop, before the first endpoints."""

    def __init__(self, registry: Registry, clock: Callable[[], float] = time.monotonic) -> None:
        self._registry, self._clock = registry, clock
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=SILENCE_SECONDS),
            auto_decompress=False,
        )
        self._streams: set[StateStream] = set()
        registry.start_stream, registry.on_token = self._start, self._retry

    def _start(self, endpoint: Endpoint, receive: Receive) -> StateStream:
        stream = StateStream(self._session, endpoint, self._registry, receive, self._clock)
        self._streams.add(stream)
        stream.task.add_done_callback(lambda _: self._streams.discard(stream))
        return stream

    def _retry(self) -> None:
        for stream in self._streams:
            stream.retry()

    async def close(self) -> None:
        """End all streams and connections."""
        tasks = [stream.task for stream in self._streams]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._session.close()


class StateStream:
    """The stream of one replica."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        endpoint: Endpoint,
        registry: Registry,
        receive: Receive,
        clock: Callable[[], float],
    ) -> None:
        assert endpoint.admin_port is not None
        self._session, self._endpoint, self._registry = session, endpoint, registry
        self._receive, self._clock = receive, clock
        self._url = URL.build(scheme="http", host=endpoint.host, port=endpoint.admin_port, path=PATH)
        self._has_token = asyncio.Event()
        self._reason = ""
        self._is_live = False
        self._bytes = _ByteBudget(clock())
        self.task = asyncio.create_task(self._run(), name=f"state stream of {endpoint.name}")

    def stop(self) -> None:
        """End the connection; nothing is received afterwards."""
        self.task.cancel()

    def retry(self) -> None:
        """Connect again at once if not connected."""
        self._has_token.set()

    async def _run(self) -> None:
        delay = MIN_RETRY_SECONDS
        while True:
            self._is_live = False
            self._has_token.clear()
            try:
                await self._connect()
                self._note("it ended")
            except FrameError as error:
                self._note(str(error))
                self._is_live = False  # connect less and less often to an engine that sends nonsense
            except (aiohttp.ClientError, OSError, TimeoutError, SequenceGap, StreamRejected) as error:
                self._note(str(error) or type(error).__name__)
            except Exception:  # one replica's stream must not end the router
                logger.exception("state stream of %s: internal error", self._endpoint.name)
            delay = MIN_RETRY_SECONDS if self._is_live else min(2 * delay, MAX_RETRY_SECONDS)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._has_token.wait(), delay * random.uniform(0.5, 1.0))

    def _note(self, reason: str) -> None:
        """Log why the stream ended, once for each reason."""
        if reason != self._reason:
            self._reason = reason
            logger.warning("state stream of %s: %s; connecting again", self._endpoint.name, reason)

    async def _connect(self) -> None:
        """Follow one connection to its end. Each known token is tried."""
        tokens: tuple[str | None, ...] = self._registry.tokens or (None,)
        for token in tokens:
            headers = {} if token is None else {"Authorization": f"Bearer {token}"}
            query = {"router": self._registry.router_id}
            async with self._session.get(self._url, params=query, headers=headers, allow_redirects=False) as response:
                if response.status == 200:
                    await self._follow(response.content)
                    return
                status = response.status
            if status != 401:
                break
        raise StreamRejected(f"{self._url} answered {status}")

    async def _follow(self, content: aiohttp.StreamReader) -> None:
        """Receive messages until the connection ends.

        Raises:
            FrameError: The engine does not follow the protocol.
            SequenceGap: A message was lost.
        """
        reader, budget = FrameReader(), _MessageBudget()
        async for data in content.iter_any():
            now = self._clock()
            self._bytes.spend(len(data), now)
            for message in reader.feed(data):
                if isinstance(message, Hello):
                    self._bytes.spend(HELLO_BYTES, now)
                    if message.version != VERSION:
                        raise FrameError(f"the engine has version {message.version} of the stream, not {VERSION}")
                    budget.num_cores = max(1, len(message.cores))
                    self._is_live, self._reason = True, ""
                elif not self._is_live:
                    raise FrameError("the engine sent another message before Hello")
                budget.spend(now)
                self._receive(message, now)


class _ByteBudget:
    """Bound of the work that one replica's messages cause, over all its connections."""

    def __init__(self, now: float) -> None:
        self._left, self._since = float(MAX_BURST_BYTES), now

    def spend(self, num_bytes: int, now: float) -> None:
        """Count received bytes. Raises FrameError if there are too many."""
        self._left = min(self._left + (now - self._since) * MAX_BYTES_PER_SECOND, MAX_BURST_BYTES) - num_bytes
        self._since = now
        if self._left < 0:
            raise FrameError("the engine sends too many bytes")


class _MessageBudget:
    """Bound of the number of messages per second of one stream."""

    def __init__(self) -> None:
        self.num_cores = 1
        self._since = self._count = 0.0

    def spend(self, now: float) -> None:
        """Count a message. Raises FrameError if there are too many."""
        if now - self._since >= 1.0:
            self._since, self._count = now, 0
        self._count += 1
        if self._count > MAX_MESSAGES_PER_SECOND * min(self.num_cores, 64):
            raise FrameError("the engine sends too many messages")

"""A node other than node 0: starts the cores that node 0 assigns, serves no API, and ends with the replica."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.engine_client.nodes.messages import (
    HEARTBEAT_SECONDS,
    NODE_OWN_FIELDS,
    SILENCE_SECONDS,
    CoreEnded,
    EndNode,
    Heard,
    JoinNode,
    NodeAlive,
    NodeRefused,
    StartCores,
    Stopping,
    ToMember,
)
from trimtab_engine.engine_client.started_core import DEAD_GRACE_SECONDS, StartedCore
from trimtab_engine.errors import ConfigError, EngineDead
from trimtab_engine.ipc.heartbeat_timer import HeartbeatTimer
from trimtab_engine.ipc.shared_secret import AuthenticationFailed, SharedSecret, authenticate_as_caller
from trimtab_engine.ipc.stream import StreamLink

CONNECT_SECONDS = 3.0  # packets to a lost node are dropped: retry, the address may have moved
RETRY_SECONDS = 1.0
CLOCK_EXCHANGES = 8  # the shortest of them counts
OWN_SIGTERM_SECONDS = 5.0  # for SIGTERM to reach this node, too, when node 0 ends in order
STOP_MARGIN_SECONDS = 15.0  # beyond --shutdown-timeout, for node 0 to end before this node does without it

logger = logging.getLogger("trimtab_engine.nodes")


@dataclass(frozen=True, slots=True)
class _Ending:
    """Reason for the node's end. `in_order`: its cores stop within the shutdown timeout."""

    why: str
    exit_code: int
    in_order: bool = False


def run_member(config: EngineConfig, shutdown_timeout: float) -> int:
    """Run this node's cores until the replica ends. Return the exit code: 0 only after a stop request."""
    return asyncio.run(_Member(config, shutdown_timeout).run())


class _Member:
    def __init__(self, config: EngineConfig, shutdown_timeout: float) -> None:
        self._config, self._shutdown_timeout = config, shutdown_timeout
        self._reason = ""
        """The last logged reason for waiting."""
        self._cores: list[StartedCore] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._link: StreamLink[ToMember] | None = None
        self._exchanges: list[tuple[float, float, float]] = []
        self._heard = 0.0
        self._stopping = False
        self._told = asyncio.Event()
        self._ended = asyncio.Event()
        self._ending = _Ending("it was asked to stop", 0)

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        self._start(self._run_until_end())
        await self._ended.wait()
        ending = self._ending
        for core in self._cores:
            if not ending.in_order and core.process.returncode is None:
                core.process.kill()
        await asyncio.gather(*(core.end() for core in self._cores))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._link is not None:
            self._link.close()
        if ending.in_order:  # otherwise its container would restart and have to end again
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._told.wait(), OWN_SIGTERM_SECONDS)
        line = f"trimtab-engine: node {self._config.node_rank} ends: {' '.join(ending.why.split())}"
        print(line, file=sys.stderr, flush=True)
        return 0 if self._stopping else ending.exit_code

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(work))

    def _end(self, ending: _Ending) -> None:
        """Set the reason for the end; the first one is kept."""
        if not self._ended.is_set():
            self._ending = ending
            self._ended.set()

    def _on_signal(self) -> None:
        """Let the replica drain and end with it. End immediately at the second signal, or without a replica."""
        self._told.set()
        if self._stopping or not self._cores or self._link is None:
            self._stopping = True
            self._end(_Ending("it was asked to stop", 0))
            return
        self._stopping = True
        self._link.send(Stopping())
        patience = self._shutdown_timeout + STOP_MARGIN_SECONDS
        asyncio.get_running_loop().call_later(patience, self._end, _Ending("it was asked to stop", 0))

    async def _run_until_end(self) -> None:
        """Join, start the cores, and follow node 0. Retry without limit while node 0 is absent, wrong or lost before it
        has accepted this node.
        """
        while self._link is None:
            link = await self._connect()
            answer = await self._join(link)
            if isinstance(answer, StartCores):
                self._link = link
                self._heard = time.monotonic()
                self._start(self._exchange_heartbeats(link))
                await self._start_cores(link, answer)
                break
            link.close()
            if isinstance(answer, NodeRefused) and not answer.may_change:
                self._end(_Ending(answer.message, 2))
                return
            if isinstance(answer, NodeRefused):
                self._warn(answer.message)
            await asyncio.sleep(RETRY_SECONDS)
        while not self._ended.is_set():
            self._follow(await link.receive())

    async def _connect(self) -> StreamLink[ToMember]:
        """Wait for node 0. Resolves the name again each time: the address may move."""
        address, port = self._config.master_addr, self._config.master_port
        told = False
        while True:
            try:
                streams = await asyncio.wait_for(asyncio.open_connection(address, port), CONNECT_SECONDS)
            except (OSError, TimeoutError) as error:
                if not told:
                    logger.info("waiting for the engine core at %s:%d (%s)", address, port, error)
                    told = True
                await asyncio.sleep(RETRY_SECONDS)
                continue
            try:
                # restart the interval: the message may be late
                secret = SharedSecret.read(self._config.rendezvous_secret_file)
                seals = None if secret is None else await authenticate_as_caller(secret, *streams)
                return StreamLink(*streams, ToMember, seals)
            except (AuthenticationFailed, ConfigError) as error:
                streams[1].close()
                self._warn(f"{address}:{port} is not this node's replica: {error}")
                await asyncio.sleep(RETRY_SECONDS)

    def _warn(self, why: str) -> None:
        """Log the reason for waiting when it changes."""
        if why != self._reason:
            self._reason = why
            logger.warning("node %d waits: %s", self._config.node_rank, why)

    async def _join(self, link: StreamLink[ToMember]) -> ToMember | None:
        """Measure the offset to node 0's clock and request to join. None if node 0 is lost or silent."""
        self._exchanges = []
        try:
            async with asyncio.timeout(SILENCE_SECONDS):
                while len(self._exchanges) < CLOCK_EXCHANGES:
                    link.send(NodeAlive(time.monotonic()))
                    match await link.receive():
                        case Heard(sent, there):
                            self._exchanges.append((sent, there, time.monotonic()))
                        case None:
                            return None
                config = msgspec.to_builtins(self._config)
                link.send(JoinNode(self._config.node_rank, socket.gethostname(), os.getpid(), config))
                return await link.receive()
        except TimeoutError:
            return None
        except msgspec.DecodeError as error:
            self._warn(f"the peer at --master-addr is not node 0, or requires --rendezvous-secret-file: {error}")
            return None

    def _follow(self, message: ToMember | None) -> None:
        self._heard = time.monotonic()
        match message:
            case None:
                self._end(_Ending("node 0, which runs the engine, is lost", 1))
            case EndNode(None):
                self._end(_Ending("the engine has ended", 1, in_order=True))
            case EndNode(cause):
                self._end(_Ending(f"the engine has ended: {cause}", 1))

    async def _start_cores(self, link: StreamLink[ToMember], message: StartCores) -> None:
        offset = clock_offset(self._exchanges)
        logger.info("node %d starts %d engine cores", self._config.node_rank, len(message.cores))
        for index, start in enumerate(message.cores, message.first):
            start.clock_offset = offset
            start.config |= _own_fields(self._config)
            try:
                core = await StartedCore.start(index, start)
            except EngineDead as error:
                self._end(_Ending(str(error), 1))
                return
            self._cores.append(core)
            self._start(self._watch(link, core))

    async def _watch(self, link: StreamLink[ToMember], core: StartedCore) -> None:
        code = await core.process.wait()
        if code == 0 or self._ended.is_set():
            return  # as requested
        await asyncio.sleep(DEAD_GRACE_SECONDS)
        link.send(CoreEnded(core.index, core.process.pid, code))

    async def _exchange_heartbeats(self, link: StreamLink[ToMember]) -> None:
        """Send heartbeats and detect that node 0 does not answer."""
        timer = HeartbeatTimer(time.monotonic(), every_seconds=HEARTBEAT_SECONDS)
        while True:
            link.send(NodeAlive(time.monotonic()))
            await asyncio.sleep(HEARTBEAT_SECONDS)
            now = time.monotonic()
            if timer.is_on_time(now) and now - self._heard > SILENCE_SECONDS:
                self._end(_Ending(f"node 0, which has the engine, has been silent for {SILENCE_SECONDS:.0f} s", 1))
                return


def _own_fields(config: EngineConfig) -> dict[str, object]:
    """Return the configuration fields that are specific to this node."""
    return {name: getattr(config, name) for name in NODE_OWN_FIELDS}


def clock_offset(exchanges: Iterable[tuple[float, float, float]]) -> float:
    """Return the seconds to add to this node's clock to get node 0's.

    An exchange is (sent here, read there, answered here): the other clock was read in between, so the shortest exchange
    gives the best estimate, accurate to half its duration.
    """
    sent, there, answered = min(exchanges, key=lambda exchange: exchange[2] - exchange[0])
    return there - (sent + answered) / 2

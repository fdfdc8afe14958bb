"""Node 0's server for the other nodes: admits them, sends them their cores, detects lost nodes, and stops them.

It listens on --master-port, on this node's own address towards --master-addr. If one node is lost, the whole replica
ends.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.engine_client.nodes.messages import (
    HEARTBEAT_SECONDS,
    LOG_INTERVAL_SECONDS,
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
    ToHub,
)
from trimtab_engine.errors import ConfigError
from trimtab_engine.ipc.heartbeat_timer import HeartbeatTimer
from trimtab_engine.ipc.shared_secret import (
    AuthenticationFailed,
    ClosedBeforeHandshake,
    SharedSecret,
    authenticate_as_listener,
)
from trimtab_engine.ipc.stream import StreamLink
from trimtab_engine.messages.lifecycle import CoreFailed, CoreStart

END_SECONDS = 6.0  # for a node to end its cores; then it detects the loss of node 0 itself

logger = logging.getLogger("trimtab_engine.nodes")


@dataclass(slots=True)
class _Member:
    """A node that has joined."""

    link: StreamLink[ToHub]
    host: str
    pid: int
    heard: float


class Hub:
    """Connections to the other nodes of the replica.

    Args:
        cores_of: Returns a node's first core and the starts of all its cores.
        on_failure: Called for a lost node.
        on_core_end: Called with the host for an ended core.
        on_stop: Called when a node received a stop request.
    """

    def __init__(
        self,
        config: EngineConfig,
        address: str,
        cores_of: Callable[[int], tuple[int, Sequence[CoreStart]]],
        *,
        on_failure: Callable[[CoreFailed], None],
        on_core_end: Callable[[str, CoreEnded], None],
        on_stop: Callable[[], None],
    ) -> None:
        self._config, self._address, self._cores_of = config, address, cores_of
        self._secret = SharedSecret.read(config.rendezvous_secret_file)
        self._on_failure, self._on_core_end, self._on_stop = on_failure, on_core_end, on_stop
        self._members: dict[int, _Member] = {}
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._watch: asyncio.Task[None] | None = None
        self._closing = False

    async def open(self) -> None:
        """Let nodes join from now on. Raises ConfigError when the port cannot be had."""
        port = self._config.master_port
        try:
            self._server = await asyncio.start_server(self._serve, self._address, port)
        except OSError as error:
            raise ConfigError(f"--master-port {port} on {self._address} cannot be bound: {error.strerror}") from error
        logger.info("node 0 waits on %s port %d for %d other nodes", self._address, port, self._config.nnodes - 1)
        self._watch = asyncio.create_task(self._look())

    async def close(self, cause: str | None) -> None:
        """End the nodes. Returns when they have ended, or are not waited for any longer."""
        self._closing = True
        if self._watch is not None:
            self._watch.cancel()
        for member in self._members.values():
            member.link.send(EndNode(cause))
        if self._server is not None:
            self._server.close()
        if self._members and self._connections:
            await asyncio.wait(self._connections, timeout=END_SECONDS)
        for connection in list(self._connections):
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    # --- one node ---------------------------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            seals = None if self._secret is None else await authenticate_as_listener(self._secret, reader, writer)
            await self._listen(StreamLink(reader, writer, ToHub, seals))
        except ClosedBeforeHandshake:
            pass  # a port check
        except (msgspec.DecodeError, AuthenticationFailed) as error:
            logger.warning("something that is no node of this replica connected: %s", error)
        except asyncio.CancelledError:  # cancelled by close(); no task awaits this one
            pass
        finally:
            self._connections.discard(task)
            writer.close()

    async def _listen(self, link: StreamLink[ToHub]) -> None:
        rank: int | None = None
        while (message := await link.receive()) is not None:
            match message:
                case NodeAlive(sent):
                    link.send(Heard(sent, time.monotonic()))
                case JoinNode() if rank is None:
                    rank = self._join(link, message)
                case CoreEnded() if rank is not None:
                    self._on_core_end(self._members[rank].host, message)
                case Stopping() if rank is not None:
                    self._on_stop()
                case _:
                    raise msgspec.DecodeError(f"{type(message).__name__} {_out_of_turn(rank)}")
            if rank is not None:
                self._members[rank].heard = time.monotonic()
        if rank is not None and not self._closing:
            self._lose(rank, "its connection has ended")

    def _join(self, link: StreamLink[ToHub], node: JoinNode) -> int | None:
        refusal = self._refusal(node)
        if refusal is not None:
            logger.warning("node %d (%s, pid %d) is refused: %s", node.node_rank, node.host, node.pid, refusal.message)
            link.send(refusal)
            return None
        logger.info("node %d (%s, pid %d) has joined", node.node_rank, node.host, node.pid)
        self._members[node.node_rank] = _Member(link, node.host, node.pid, time.monotonic())
        first, cores = self._cores_of(node.node_rank)
        link.send(StartCores(first, list(cores)))
        return node.node_rank

    def _refusal(self, node: JoinNode) -> NodeRefused | None:
        revision = node.config.get("rendezvous_id")
        if revision != self._config.rendezvous_id:
            message = f"--rendezvous-id is {revision!r} there and {self._config.rendezvous_id!r} on node 0"
            return NodeRefused(message, may_change=True)
        difference = first_difference(msgspec.to_builtins(self._config), node.config)
        if difference is None:
            return self._taken(node)
        name, ours, theirs = difference  # --nnodes among them: so the rank is one that there is
        flag = "--" + name.replace("_", "-")
        message = (
            f"{flag} is {theirs} there and {ours} on node 0; start all nodes with the same flags except --node-rank"
        )
        return NodeRefused(message, may_change=False)

    def _taken(self, node: JoinNode) -> NodeRefused | None:
        present = self._members.get(node.node_rank)
        if present is not None:
            taken = f"--node-rank {node.node_rank} is taken by {present.host}, pid {present.pid}"
            return NodeRefused(taken, may_change=True)
        return None

    # --- lost nodes -------------------------------------------------------------------------------------------------

    async def _look(self) -> None:
        """Detect silent nodes."""
        said = time.monotonic()
        timer = HeartbeatTimer(said, every_seconds=HEARTBEAT_SECONDS)
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            now = time.monotonic()
            if not timer.is_on_time(now):
                continue
            missing = [str(rank) for rank in range(1, self._config.nnodes) if rank not in self._members]
            if missing and now - said > LOG_INTERVAL_SECONDS:
                said = now
                logger.info("node 0 still waits for node %s of %d", ", ".join(missing), self._config.nnodes)
            for rank, member in self._members.items():
                if now - member.heard > SILENCE_SECONDS:
                    self._lose(rank, f"it has been silent for {SILENCE_SECONDS:.0f} s")
                    return

    def _lose(self, rank: int, how: str) -> None:
        member = self._members[rank]
        self._on_failure(CoreFailed(f"node {rank} ({member.host}, pid {member.pid}) is lost: {how}", 1))


def _out_of_turn(rank: int | None) -> str:
    return "from a peer that has not joined" if rank is None else f"from node {rank}, which has joined"


def first_difference(ours: dict[str, Any], theirs: dict[str, Any]) -> tuple[str, object, object] | None:
    """Return the first field in which two nodes' command lines differ and must not: its name and both values."""
    for name in sorted((ours.keys() | theirs.keys()) - NODE_OWN_FIELDS):
        if ours.get(name) != theirs.get(name):
            return name, ours.get(name), theirs.get(name)
    return None

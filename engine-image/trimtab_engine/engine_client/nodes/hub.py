"""Node 0's side of the other nodes: lets them join, hands them their cores, notices when one is gone, ends them.

It listens on --master-port, on this node's own address towards --master-addr. One node lost, everything ends.
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
    NODE_OWN_FIELDS,
    SAY_SECONDS,
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
from trimtab_engine.ipc.looks import Looks
from trimtab_engine.ipc.shared_secret import NothingSaid, NotProven, SharedSecret, prove_as_listener
from trimtab_engine.ipc.stream import StreamLink
from trimtab_engine.messages import CoreFailed, CoreStart

END_SECONDS = 6.0  # for a node to end its cores, after which it is left to notice that node 0 is gone

logger = logging.getLogger("trimtab_engine.nodes")


@dataclass(slots=True)
class _Member:
    """A node that has joined."""

    link: StreamLink[ToHub]
    host: str
    pid: int
    heard: float


class Hub:
    """The other nodes of the replica.

    `cores_of` gives a node's first core and the starts of all its cores. `on_failure` is told of a node that is gone,
    `on_core_end` of a core on the host that is named first, `on_stop` is called when a node was told to end.
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
            seals = None if self._secret is None else await prove_as_listener(self._secret, reader, writer)
            await self._listen(StreamLink(reader, writer, ToHub, seals))
        except NothingSaid:
            pass  # somebody who looked whether anybody listens
        except (msgspec.DecodeError, NotProven) as error:
            logger.warning("something that is no node of this replica connected: %s", error)
        except asyncio.CancelledError:  # close() ends it: nobody waits for this task, so it just ends
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
        message = f"{flag} is {theirs} there and {ours} on node 0; start all nodes with the same flags but --node-rank"
        return NodeRefused(message, may_change=False)

    def _taken(self, node: JoinNode) -> NodeRefused | None:
        present = self._members.get(node.node_rank)
        if present is not None:
            taken = f"--node-rank {node.node_rank} is taken by {present.host}, pid {present.pid}"
            return NodeRefused(taken, may_change=True)
        return None

    # --- who is gone ------------------------------------------------------------------------------------------------

    async def _look(self) -> None:
        """Notice silence."""
        said = time.monotonic()
        looks = Looks(said, every_seconds=HEARTBEAT_SECONDS)
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            now = time.monotonic()
            if not looks.is_on_time(now):
                continue
            missing = [str(rank) for rank in range(1, self._config.nnodes) if rank not in self._members]
            if missing and now - said > SAY_SECONDS:
                said = now
                logger.info("node 0 still waits for node %s of %d", ", ".join(missing), self._config.nnodes)
            for rank, member in self._members.items():
                if now - member.heard > SILENCE_SECONDS:
                    self._lose(rank, f"it has been silent for {SILENCE_SECONDS:.0f} s")
                    return

    def _lose(self, rank: int, how: str) -> None:
        member = self._members[rank]
        self._on_failure(CoreFailed(f"node {rank} ({member.host}, pid {member.pid}) is gone: {how}", 1))


def _out_of_turn(rank: int | None) -> str:
    return "from somebody who has not joined" if rank is None else f"from node {rank}, which has joined"


def first_difference(ours: dict[str, Any], theirs: dict[str, Any]) -> tuple[str, object, object] | None:
    """The first field in which two nodes' command lines differ and must not: its name and both values."""
    for name in sorted((ours.keys() | theirs.keys()) - NODE_OWN_FIELDS):
        if ours.get(name) != theirs.get(name):
            return name, ours.get(name), theirs.get(name)
    return None

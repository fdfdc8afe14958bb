"""Admission of nodes by node 0, over real connections on the loopback interface."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest
from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.engine_client.nodes.hub import Hub, first_difference
from trimtab_engine.engine_client.nodes.messages import (
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
from trimtab_engine.errors import ConfigError
from trimtab_engine.ipc.network import ReservedPorts
from trimtab_engine.ipc.shared_secret import AuthenticationFailed, SharedSecret, authenticate_as_caller
from trimtab_engine.ipc.stream import StreamLink
from trimtab_engine.messages.lifecycle import CoreFailed, CoreStart

LOOPBACK = "127.0.0.1"


@pytest.fixture
def config() -> Iterator[EngineConfig]:
    with ReservedPorts(LOOPBACK) as ports:  # reserved while the test runs
        yield EngineConfig(model="m", data_parallel_size=4, nnodes=2, master_port=ports.take())


class WatchedHub(Hub):
    """A hub whose connections can be awaited."""

    async def settled(self) -> None:
        await asyncio.wait(self._connections, timeout=60)


def a_hub(config: EngineConfig, failures: list[CoreFailed]) -> WatchedHub:
    return WatchedHub(
        config,
        LOOPBACK,
        lambda node: (2 * node, [CoreStart({}, []), CoreStart({}, [])]),
        on_failure=failures.append,
        on_core_end=lambda host, end: None,
        on_stop=lambda: None,
    )


@pytest.fixture
async def hub(config: EngineConfig) -> AsyncIterator[tuple[WatchedHub, list[CoreFailed]]]:
    failures: list[CoreFailed] = []
    hub = a_hub(config, failures)
    await hub.open()
    yield hub, failures
    await hub.close(None)


async def connect(config: EngineConfig) -> StreamLink[ToMember]:
    return StreamLink(*await asyncio.open_connection(LOOPBACK, config.master_port), ToMember)


def join(config: EngineConfig, node_rank: int, **changes: object) -> JoinNode:
    return JoinNode(node_rank, "host", 7, msgspec.to_builtins(config) | {"node_rank": node_rank} | changes)


async def test_node_receives_cores_and_end(config: EngineConfig, hub: tuple[WatchedHub, list[CoreFailed]]) -> None:
    link = await connect(config)
    link.send(NodeAlive(3.0))
    heard = await link.receive()
    assert isinstance(heard, Heard)
    assert heard.sent == 3.0
    link.send(join(config, 1))
    start = await link.receive()
    assert isinstance(start, StartCores)
    assert (start.first, len(start.cores)) == (2, 2)
    closing = asyncio.create_task(hub[0].close("core 3 died"))
    assert await link.receive() == EndNode("core 3 died")
    link.close()
    await closing
    assert hub[1] == [], "a requested end is no failure"


async def test_foreign_node_is_rejected_with_reason(
    config: EngineConfig, hub: tuple[WatchedHub, list[CoreFailed]]
) -> None:
    first = await connect(config)
    first.send(join(config, 1))
    assert isinstance(await first.receive(), StartCores)
    for wrong, why, may_change in (
        (join(config, 1), "--node-rank 1 is taken by host, pid 7", True),
        (join(config, 1, rendezvous_id="r2"), "--rendezvous-id is 'r2' there and '' on node 0", True),
        (join(config, 2, nnodes=4), "--nnodes is 4 there and 2 on node 0; start all nodes with the same flags", False),
    ):
        link = await connect(config)
        link.send(wrong)
        refused = await link.receive()
        assert isinstance(refused, NodeRefused)
        assert why in refused.message
        assert refused.may_change == may_change
        link.close()
    assert hub[1] == []
    first.close()


async def test_a_connection_that_ends_is_a_lost_node(
    config: EngineConfig, hub: tuple[WatchedHub, list[CoreFailed]]
) -> None:
    link = await connect(config)
    link.send(join(config, 1))
    await link.receive()
    link.close()
    await hub[0].settled()
    assert hub[1] == [CoreFailed("node 1 (host, pid 7) is lost: its connection has ended", 1)]


async def test_a_stranger_on_the_port_disturbs_nothing(
    config: EngineConfig, hub: tuple[WatchedHub, list[CoreFailed]]
) -> None:
    reader, writer = await asyncio.open_connection(LOOPBACK, config.master_port)
    writer.write(b"GET / HTTP/1.1\r\n\r\n")
    assert await reader.read() == b""
    writer.close()
    assert hub[1] == []


@pytest.mark.parametrize("word", [Stopping(), CoreEnded(1, 7, 9)])
async def test_unjoined_node_does_not_end_replica(config: EngineConfig, word: Stopping | CoreEnded) -> None:
    obeyed: list[object] = []
    hub = Hub(
        config,
        LOOPBACK,
        lambda node: (node, [CoreStart({}, [])]),
        on_failure=obeyed.append,
        on_core_end=lambda host, end: obeyed.append(end),
        on_stop=lambda: obeyed.append("stop"),
    )
    await hub.open()
    stranger = await connect(config)
    stranger.send(word)
    assert await stranger.receive() is None, "its connection is ended"
    assert obeyed == []
    node = await connect(config)
    node.send(join(config, 1))
    assert isinstance(await node.receive(), StartCores)
    node.send(word)
    node.send(NodeAlive(1.0))
    assert isinstance(await node.receive(), Heard)
    assert len(obeyed) == 1, "a node that has joined is obeyed"
    for link in (stranger, node):
        link.close()
    await hub.close(None)


async def test_hub_with_secret_rejects_unauthenticated_peers(config: EngineConfig, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("the secret of this replica")
    guarded = msgspec.structs.replace(config, rendezvous_secret_file=str(tmp_path / "secret"))
    hub = a_hub(guarded, [])
    await hub.open()
    for secret in (None, SharedSecret(b"of another replica")):
        streams = await asyncio.open_connection(LOOPBACK, config.master_port)
        if secret is None:
            StreamLink(*streams, ToMember).send(join(guarded, 1))
            await streams[0].readexactly(40)  # the greeting, and nothing after it
            assert await streams[0].read() == b""
        else:
            with pytest.raises(AuthenticationFailed):
                await authenticate_as_caller(secret, *streams)
        streams[1].close()
    streams = await asyncio.open_connection(LOOPBACK, config.master_port)
    secret = SharedSecret.read(guarded.rendezvous_secret_file)
    assert secret is not None
    link: StreamLink[ToMember] = StreamLink(*streams, ToMember, await authenticate_as_caller(secret, *streams))
    link.send(join(guarded, 1, rendezvous_secret_file="/elsewhere"))
    assert isinstance(await link.receive(), StartCores)
    link.close()
    await hub.close(None)


async def test_a_port_that_is_taken_is_named(config: EngineConfig, hub: tuple[WatchedHub, list[CoreFailed]]) -> None:
    with pytest.raises(ConfigError, match=rf"--master-port {config.master_port} on 127.0.0.1 cannot be bound"):
        await a_hub(config, []).open()


def test_nodes_may_differ_in_where_things_lie_and_in_nothing_else() -> None:
    ours = {"model": "/a", "node_rank": 0, "max_num_seqs": 4, "block_size": 16}
    assert first_difference(ours, ours | {"model": "/b", "node_rank": 1}) is None
    assert first_difference(ours, ours | {"max_num_seqs": 5}) == ("max_num_seqs", 4, 5)
    assert first_difference(ours, ours | {"new": 1}) == ("new", None, 1), "another version of the engine"

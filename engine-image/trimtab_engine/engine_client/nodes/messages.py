"""What the nodes of one replica say to each other: msgspec structs on a stream from each node to node 0, never pickle.

Requests and outputs go another way, from the API servers to the cores directly (engine_client/client.py).
"""

from typing import Any

import msgspec

from trimtab_engine.messages import CoreStart

HEARTBEAT_SECONDS = 1.0
SILENCE_SECONDS = 5.0  # without a word the other side is taken for dead; the rest of 10 s is for the engine to end
SAY_SECONDS = 30.0  # between lines about nodes that have not come: they may have to be scheduled first
NODE_OWN_FIELDS = frozenset(
    {
        "model",
        "tokenizer",
        "profiler_dir",
        "rendezvous_secret_file",
        "node_rank",
        "master_addr",
        "device_memory_bytes",
        "cpu_threads",
    }
)
"""What may differ from node to node: where things lie, and how large the machine is."""

# --- node -> node 0 -------------------------------------------------------------------------------------------------


class JoinNode(msgspec.Struct, tag="join"):
    """The first message of a node that is ready to start its cores. `config`: as its command line has it."""

    node_rank: int
    host: str
    pid: int
    config: dict[str, Any]


class NodeAlive(msgspec.Struct, tag="alive"):
    """Sent every HEARTBEAT_SECONDS. `sent`: CLOCK_MONOTONIC of the sender."""

    sent: float


class CoreEnded(msgspec.Struct, tag="core_ended"):
    """A core of this node has ended without having been told to. `core` is its data-parallel rank."""

    core: int
    pid: int
    code: int


class Stopping(msgspec.Struct, tag="stopping"):
    """The node was told to end (SIGTERM): the replica drains as a whole."""


ToHub = JoinNode | NodeAlive | CoreEnded | Stopping

# --- node 0 -> node -------------------------------------------------------------------------------------------------


class Heard(msgspec.Struct, tag="heard"):
    """The answer to NodeAlive: its `sent`, and node 0's CLOCK_MONOTONIC."""

    sent: float
    time: float


class StartCores(msgspec.Struct, tag="start"):
    """The node is in: start these cores, in the order of their data-parallel ranks, from `first` on."""

    first: int
    cores: list[CoreStart]


class NodeRefused(msgspec.Struct, tag="refused"):
    """The node does not belong to this replica. `may_change`: it may, later or to another: ask again."""

    message: str
    may_change: bool


class EndNode(msgspec.Struct, tag="end"):
    """The replica ends: so does the node. `cause` is the failure; None: as it was told."""

    cause: str | None


ToMember = Heard | StartCores | NodeRefused | EndNode

"""Messages between the nodes of one replica: msgspec structs on a stream from each node to node 0, never pickle.

Requests and outputs are sent directly between API servers and cores (engine_client/client.py).
"""

from typing import Any

import msgspec

from trimtab_engine.messages.lifecycle import CoreStart

HEARTBEAT_SECONDS = 1.0
SILENCE_SECONDS = 5.0  # without a word the other side is taken for dead; the rest of 10 s is for the engine to end
LOG_INTERVAL_SECONDS = 30.0  # between log lines about missing nodes, which may have to be scheduled first
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
"""Fields that may differ between nodes: paths and machine sizes."""

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
    """A core of this node ended unexpectedly. `core` is its data-parallel rank."""

    core: int
    pid: int
    code: int


class Stopping(msgspec.Struct, tag="stopping"):
    """The node received SIGTERM: the replica drains as a whole."""


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
    """The node does not belong to this replica. `may_change`: True if retrying may help."""

    message: str
    may_change: bool


class EndNode(msgspec.Struct, tag="end"):
    """The replica ends, and so does the node. `cause` is the failure; None if requested."""

    cause: str | None


ToMember = Heard | StartCores | NodeRefused | EndNode

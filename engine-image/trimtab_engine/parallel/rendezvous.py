"""How the ranks of an engine find each other, and the process groups that they make of it.

One node: a file in a private folder, and gloo on the loopback interface, so that nothing listens on the network.
Several: torch's TCP store on --master-addr and --master-port, which the node of the engine core serves; ranks and
messages then use the nodes' own addresses. The network between the nodes is trusted (docs/parallelism.md).
"""

import socket
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from trimtab_engine.config import use_loopback_between_ranks
from trimtab_engine.parallel.groups import RankGroup, RankGroups, WireMeter
from trimtab_engine.parallel.ranks import Layout

JOIN_TIMEOUT = timedelta(minutes=10)  # for the other nodes' pods to be scheduled and pull their image
STEP_TIMEOUT = timedelta(minutes=10)  # a stage waits for the one before it: as long as its longest step
LOOPBACK = "127.0.0.1"


def open_store(rendezvous: str, *, serves: bool) -> Store:
    """The store of this engine's ranks. `serves`: this process holds it (the engine core)."""
    kind, _, address = rendezvous.partition(":")
    if kind == "file":
        return FileStore(address)
    host, _, port = address.rpartition(":")
    return TCPStore(LOOPBACK if serves else host, int(port), None, serves, timeout=JOIN_TIMEOUT, wait_for_workers=False)


def own_address(rendezvous: str) -> str:
    """The address under which other nodes reach this one: that of the route to the master (nothing is sent)."""
    host, _, port = rendezvous.removeprefix("tcp:").rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))
        return str(probe.getsockname()[0])


def join_groups(
    store: Store, layout: Layout, rank: int, *, uses_nccl: bool, on_one_node: bool
) -> tuple[RankGroups, WireMeter]:
    """Join the world and this rank's groups; returns when every rank has. All ranks make all groups in one order."""
    if on_one_node:
        use_loopback_between_ranks()
    dist.init_process_group(
        "nccl" if uses_nccl else "gloo",
        store=PrefixStore("torch", store),
        rank=rank,
        world_size=layout.world_size,
        timeout=STEP_TIMEOUT,
    )
    meter = WireMeter()

    def own_group(groups: tuple[tuple[int, ...], ...]) -> RankGroup | None:
        own = None
        for ranks in groups:
            if len(ranks) > 1:
                made = dist.new_group(list(ranks), timeout=STEP_TIMEOUT)
                if rank in ranks:
                    own = RankGroup(made, ranks, rank, meter)
        return own

    groups = RankGroups(
        tensor=own_group(layout.tensor_groups()),
        pipeline=own_group(layout.pipeline_groups()),
        data=own_group(layout.data_groups()),
    )
    return groups, meter


def leave_groups() -> None:
    """The end of this process's part."""
    if dist.is_initialized():
        dist.destroy_process_group()

"""Flags of the parallel layout of a model over several ranks, and their conversion to `EngineConfig` fields."""

import argparse
import re
import socket
from typing import Any

from trimtab_engine.errors import ConfigError, NotSupportedError
from trimtab_engine.flags import parser as types
from trimtab_engine.flags.experts import add_eplb_flags


def add_parallel_flags(group: Any) -> None:
    group.add_argument(
        "--tensor-parallel-size",
        "-tp",
        type=types.positive,
        default=1,
        metavar="N",
        help="number of tensor-parallel ranks; must divide the attention heads (default: 1)",
    )
    group.add_argument(
        "--pipeline-parallel-size",
        "-pp",
        type=types.positive,
        default=1,
        metavar="N",
        help="number of pipeline stages, each a tensor-parallel group (default: 1)",
    )
    group.add_argument(
        "--pipeline-layer-partition",
        type=layer_partition,
        metavar="A,B,...",
        help="number of layers per pipeline stage, such as 15,15 (default: divided evenly)",
    )
    group.add_argument(
        "--data-parallel-size",
        "-dp",
        type=types.positive,
        default=1,
        metavar="N",
        help="number of engine cores that share the requests of this API (default: 1)",
    )
    group.add_argument(
        "--data-parallel-size-cap",
        type=types.positive,
        metavar="N",
        help="upper bound for live changes, on one node and for dense models (default: the start value)",
    )
    group.add_argument(
        "--enable-expert-parallel",
        "-ep",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="place whole experts on each rank instead of a slice of every expert (default: off)",
    )
    group.add_argument(
        "--expert-placement-strategy",
        choices=("linear", "round_robin"),
        default="linear",
        help="placement of experts on ranks (default: linear)",
    )
    add_eplb_flags(group)
    group.add_argument(
        "--distributed-executor-backend",
        choices=("mp",),
        default="mp",
        help="executor of the ranks; mp: processes (default: mp)",
    )
    group.add_argument(
        "--nnodes",
        "-n",
        type=types.positive,
        metavar="N",
        help="number of nodes that share the ranks of one engine, or the engines of data parallelism (default: 1)",
    )
    group.add_argument(
        "--node-rank",
        "-r",
        type=node_rank,
        metavar="N",
        help="rank of this node; 0 serves the API, others only compute; auto: 1 + the number at the end of the "
        "host name, as in a StatefulSet pod (default: 0)",
    )
    group.add_argument(
        "--master-addr",
        "--data-parallel-address",
        "-dpa",
        default="127.0.0.1",
        metavar="HOST",
        help="address of node 0 (default: 127.0.0.1)",
    )
    group.add_argument(
        "--master-port",
        "--data-parallel-rpc-port",
        "-dpp",
        type=types.port,
        default=29501,
        help="rendezvous port on node 0 (default: 29501)",
    )
    group.add_argument(
        "--data-parallel-size-local",
        "-dpl",
        type=types.not_negative,
        metavar="N",
        help="number of engine cores on each node; alternative to --nnodes",
    )
    group.add_argument(
        "--data-parallel-start-rank",
        type=types.not_negative,
        metavar="N",
        help="rank of this node's first engine core; alternative to --node-rank",
    )
    group.add_argument(
        "--data-parallel-rank",
        "-dpr",
        "-dpn",
        type=types.not_negative,
        metavar="N",
        help="rank of the only engine core of this server, of --data-parallel-size; the other ranks have separate "
        "servers behind an external load balancer (dense models)",
    )
    group.add_argument(
        "--data-parallel-external-lb",
        "-dpe",
        action="store_true",
        help="external load balancing; implied by --data-parallel-rank and rejected without it (vLLM's flag)",
    )
    group.add_argument(
        "--data-parallel-hybrid-lb",
        "-dph",
        action="store_true",
        help="serve an API on every node for its local engine cores (dense models)",
    )
    group.add_argument(
        "--headless", action="store_true", help="serve no API on this node; required on every node but the first"
    )
    group.add_argument(
        "--rendezvous-id",
        default="",
        metavar="TEXT",
        help="group name, such as a revision; only nodes of the same group connect (default: none)",
    )
    group.add_argument(
        "--rendezvous-secret-file",
        metavar="PATH",
        help="file with a secret shared by all nodes; connections without proof of it are rejected "
        "(default: none, the network between nodes is trusted)",
    )


def parallel_fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the EngineConfig fields that these flags set.

    Raises:
        ConfigError: Flags contradict each other.
    """
    nnodes, node_rank = _nodes(arguments)
    external = _external_lb_fields(arguments, nnodes, node_rank)
    if external:
        nnodes, node_rank = 1, 0  # each server only knows its own engine core
    return (
        {
            "nnodes": nnodes,
            "node_rank": node_rank,
        }
        | {
            name: getattr(arguments, name)
            for name in (
                "tensor_parallel_size",
                "pipeline_parallel_size",
                "pipeline_layer_partition",
                "data_parallel_size",
                "data_parallel_size_cap",
                "enable_expert_parallel",
                "expert_placement_strategy",
                "master_addr",
                "master_port",
                "rendezvous_id",
                "rendezvous_secret_file",
            )
        }
        | external
    )


def _nodes(arguments: argparse.Namespace) -> tuple[int, int]:
    """Return the number of nodes and this node's rank, from Trimtab's flags or from vLLM's."""
    nnodes, node_rank = _nodes_from_core_flags(arguments)
    for flag, given, meant in (("--nnodes", arguments.nnodes, nnodes), ("--node-rank", arguments.node_rank, node_rank)):
        if None not in (given, meant) and given != meant:
            raise ConfigError(
                f"{flag} {given} conflicts with {meant} from --data-parallel-size-local and "
                "--data-parallel-start-rank; set only one of them"
            )
    nnodes, node_rank = arguments.nnodes or nnodes or 1, arguments.node_rank or node_rank or 0
    if arguments.headless and node_rank == 0 and not arguments.data_parallel_hybrid_lb:
        raise ConfigError(
            "--headless: not allowed on the first node, which serves the API; set --data-parallel-start-rank or "
            "--node-rank, or remove it"
        )
    return nnodes, node_rank


def _external_lb_fields(arguments: argparse.Namespace, nnodes: int, node_rank: int) -> dict[str, Any]:
    """Return the fields that external load balancing changes; an empty dict if it is not enabled."""
    size, rank = arguments.data_parallel_size, arguments.data_parallel_rank
    if rank is None and not arguments.data_parallel_hybrid_lb:
        if arguments.data_parallel_external_lb:
            raise ConfigError(
                "--data-parallel-external-lb requires --data-parallel-rank; set the rank that this server serves"
            )
        return {}
    if arguments.headless:
        raise ConfigError(
            "--headless conflicts with --data-parallel-rank, which needs an API on every server; set only one"
        )
    if rank is not None and (arguments.data_parallel_hybrid_lb or nnodes > 1):
        raise ConfigError(
            "--data-parallel-rank: serves one engine core per API; remove --data-parallel-hybrid-lb, --nnodes "
            "and --data-parallel-size-local"
        )
    local = 1 if rank is not None else size // nnodes
    if rank is None and size % nnodes:
        raise NotSupportedError(f"--data-parallel-size {size} over {nnodes} nodes: not divisible; set a multiple")
    return {
        "data_parallel_size": local,
        "data_parallel_first_rank": node_rank * local if rank is None else rank,
        "data_parallel_world_size": size,
    }


def _nodes_from_core_flags(arguments: argparse.Namespace) -> tuple[int | None, int | None]:
    """Return (--nnodes, --node-rank) derived from vLLM's flags; None for each that they do not determine."""
    size, local, first = arguments.data_parallel_size, arguments.data_parallel_size_local, None
    if arguments.data_parallel_start_rank is not None:
        first = arguments.data_parallel_start_rank
        local = local or size // (arguments.nnodes or 1)
    if local == 0:
        raise NotSupportedError(
            "--data-parallel-size-local 0, an API server without an engine core, is not supported; set 1"
        )
    if local is None:
        return None, None
    if size % local:
        raise NotSupportedError(
            f"--data-parallel-size-local {local} of --data-parallel-size {size} is not supported: every node holds as "
            f"many engine cores; set a divisor of {size}"
        )
    if first is not None and (first % local or first >= size):
        raise NotSupportedError(
            f"--data-parallel-start-rank {first} is not supported: with --data-parallel-size-local {local} of {size} "
            f"cores a node begins at a multiple of {local} below {size}"
        )
    if first and not arguments.headless and not arguments.data_parallel_hybrid_lb:
        raise ConfigError("--data-parallel-start-rank above 0 without --headless: only the first node serves; add it")
    return size // local, None if first is None else first // local


def layer_partition(text: str) -> tuple[int, ...]:
    """Parse layer counts separated by commas."""
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        counts = ()
    if not counts or min(counts) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of layer counts such as 15,15")
    return counts


def node_rank(text: str) -> int:
    """Parse a number or auto: worker pod NAME-w-0 of a StatefulSet is node 1; the leader's pod is node 0."""
    if text != "auto":
        return types.not_negative(text)
    host = socket.gethostname().partition(".")[0]
    found = re.search(r"-(\d+)$", host)
    if found is None:
        raise argparse.ArgumentTypeError(
            f"auto: the host name {host} does not end in a number such as NAME-0; set the node's rank"
        )
    return 1 + int(found[1])

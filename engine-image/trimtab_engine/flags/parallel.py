"""The flags that lay one model out over several ranks, and what they become."""

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
        help="ranks that split every layer; divides the heads (default: 1)",
    )
    group.add_argument(
        "--pipeline-parallel-size",
        "-pp",
        type=types.positive,
        default=1,
        metavar="N",
        help="stages of layers, each a tensor-parallel group (default: 1)",
    )
    group.add_argument(
        "--pipeline-layer-partition",
        type=layer_partition,
        metavar="A,B,...",
        help="layers of each stage (default: divided evenly)",
    )
    group.add_argument(
        "--data-parallel-size",
        "-dp",
        type=types.positive,
        default=1,
        metavar="N",
        help="engine cores that serve different requests behind this API (default: 1)",
    )
    group.add_argument(
        "--data-parallel-size-cap",
        type=types.positive,
        metavar="N",
        help="how far it may be raised live, on one node and for dense models (default: the start value)",
    )
    group.add_argument(
        "--enable-expert-parallel",
        "-ep",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="whole experts on each rank instead of a slice of every expert (default: off)",
    )
    group.add_argument(
        "--expert-placement-strategy",
        choices=("linear", "round_robin"),
        default="linear",
        help="which rank holds which experts (default: linear)",
    )
    add_eplb_flags(group)
    group.add_argument(
        "--distributed-executor-backend", choices=("mp",), default="mp", help="ranks are processes (default: mp)"
    )
    group.add_argument(
        "--nnodes",
        type=types.positive,
        metavar="N",
        help="nodes that share the ranks: those of the only engine, or whole engines of data parallel (default: 1)",
    )
    group.add_argument(
        "--node-rank",
        type=node_rank,
        metavar="N",
        help="this node's number; 0 serves the API, the others only compute; auto: 1 + the number at the end of the "
        "host's name, as of a StatefulSet's pod (default: 0)",
    )
    group.add_argument(
        "--master-addr",
        "--data-parallel-address",
        "-dpa",
        default="127.0.0.1",
        metavar="HOST",
        help="where node 0 is reached (default: 127.0.0.1)",
    )
    group.add_argument(
        "--master-port",
        "--data-parallel-rpc-port",
        "-dpp",
        type=types.port,
        default=29501,
        help="port on which the nodes meet (default: 29501)",
    )
    group.add_argument(
        "--data-parallel-size-local",
        "-dpl",
        type=types.not_negative,
        metavar="N",
        help="another way to say --nnodes: the engine cores on each node",
    )
    group.add_argument(
        "--data-parallel-start-rank",
        type=types.not_negative,
        metavar="N",
        help="another way to say --node-rank: the first engine core of this node",
    )
    group.add_argument(
        "--data-parallel-rank",
        "-dpr",
        type=types.not_negative,
        metavar="N",
        help="serve this one of --data-parallel-size engine cores; the others have servers of their own, before which "
        "another balancer stands (dense models)",
    )
    group.add_argument(
        "--data-parallel-external-lb",
        "-dpe",
        action="store_true",
        help="implied by --data-parallel-rank, and refused without it; taken because vLLM has it",
    )
    group.add_argument(
        "--data-parallel-hybrid-lb",
        "-dph",
        action="store_true",
        help="every node serves an API for its own engine cores (dense models)",
    )
    group.add_argument(
        "--headless", action="store_true", help="this node serves no API; give it on every node but the first"
    )
    group.add_argument(
        "--rendezvous-id",
        default="",
        metavar="TEXT",
        help="nodes meet only those with the same one, such as a revision (default: none)",
    )
    group.add_argument(
        "--rendezvous-secret-file",
        metavar="PATH",
        help="a file with a secret that all nodes were given: they hear and believe nobody who does not prove it "
        "(default: none, the network between the nodes is trusted)",
    )


def parallel_fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """The fields of EngineConfig that these flags set. Raises ConfigError where they contradict each other."""
    nnodes, node_rank = _nodes(arguments)
    external = _external(arguments, nnodes, node_rank)
    if external:
        nnodes, node_rank = 1, 0  # servers that know nothing of each other
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
    """Their number and this one's, in Trimtab's words or in vLLM's."""
    nnodes, node_rank = _said_as_cores(arguments)
    for flag, given, meant in (("--nnodes", arguments.nnodes, nnodes), ("--node-rank", arguments.node_rank, node_rank)):
        if None not in (given, meant) and given != meant:
            raise ConfigError(
                f"{flag} is {given}, but --data-parallel-size-local and --data-parallel-start-rank say {meant}; "
                f"leave one of them out"
            )
    nnodes, node_rank = arguments.nnodes or nnodes or 1, arguments.node_rank or node_rank or 0
    if arguments.headless and node_rank == 0 and not arguments.data_parallel_hybrid_lb:
        raise ConfigError(
            "--headless is for the nodes beside the first, which serves the API; give --data-parallel-start-rank or "
            "--node-rank, or leave it out"
        )
    return nnodes, node_rank


def _external(arguments: argparse.Namespace, nnodes: int, node_rank: int) -> dict[str, Any]:
    """What changes where each server has only its own of the data-parallel ranks: nothing, unless that is asked for."""
    size, rank = arguments.data_parallel_size, arguments.data_parallel_rank
    if rank is None and not arguments.data_parallel_hybrid_lb:
        if arguments.data_parallel_external_lb:
            raise ConfigError(
                "--data-parallel-external-lb needs --data-parallel-rank: which of the ranks is served here"
            )
        return {}
    if arguments.headless:
        raise ConfigError("--headless, without an API, contradicts a balancer before every server; leave one out")
    if rank is not None and (arguments.data_parallel_hybrid_lb or nnodes > 1):
        raise ConfigError(
            "--data-parallel-rank is one engine core behind its own API: leave out --data-parallel-hybrid-lb, --nnodes "
            "and --data-parallel-size-local"
        )
    local = 1 if rank is not None else size // nnodes
    if rank is None and size % nnodes:
        raise NotSupportedError(
            f"--data-parallel-size {size} over {nnodes} nodes: each has as many engine cores; set a multiple"
        )
    return {
        "data_parallel_size": local,
        "data_parallel_first_rank": node_rank * local if rank is None else rank,
        "data_parallel_world_size": size,
    }


def _said_as_cores(arguments: argparse.Namespace) -> tuple[int | None, int | None]:
    """--nnodes and --node-rank as vLLM's flags say them; None: they do not."""
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
            f"--data-parallel-size-local {local} of --data-parallel-size {size} is not supported: every node holds "
            f"as many "
            f"engine cores; set a divisor of {size}"
        )
    if first is not None and (first % local or first >= size):
        raise NotSupportedError(
            f"--data-parallel-start-rank {first} is not supported: with --data-parallel-size-local {local} of {size} "
            f"cores "
            f"a node begins at a multiple of {local} below {size}"
        )
    if first and not arguments.headless and not arguments.data_parallel_hybrid_lb:
        raise ConfigError("--data-parallel-start-rank above 0 without --headless: only the first node serves; add it")
    return size // local, None if first is None else first // local


def layer_partition(text: str) -> tuple[int, ...]:
    """Numbers of layers, separated by commas."""
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        counts = ()
    if not counts or min(counts) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of layer counts such as 15,15")
    return counts


def node_rank(text: str) -> int:
    """A number, or auto: pod NAME-w-0 of a StatefulSet of workers is node 1; node 0 is the leader's, elsewhere."""
    if text != "auto":
        return types.not_negative(text)
    host = socket.gethostname().partition(".")[0]
    found = re.search(r"-(\d+)$", host)
    if found is None:
        raise argparse.ArgumentTypeError(
            f"auto: the host's name {host} does not end in a number, as NAME-0 does; give the node's number"
        )
    return 1 + int(found[1])

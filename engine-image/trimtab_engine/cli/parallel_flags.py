"""The flags that lay one model out over several ranks, and what they become."""

import argparse
import re
import socket
from typing import Any

from trimtab_engine.cli import parser as types


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
    group.add_argument(
        "--distributed-executor-backend", choices=("mp",), default="mp", help="ranks are processes (default: mp)"
    )
    group.add_argument(
        "--nnodes", type=types.positive, default=1, metavar="N", help="nodes that share the ranks (default: 1)"
    )
    group.add_argument(
        "--node-rank",
        type=node_rank,
        default=0,
        metavar="N",
        help="this node's number; 0 serves the API, the others only compute; auto: 1 + the number at the end of the "
        "host's name, as of a StatefulSet's pod (default: 0)",
    )
    group.add_argument("--master-addr", default="127.0.0.1", metavar="HOST", help="where node 0 is reached")
    group.add_argument(
        "--master-port", type=types.port, default=29501, help="port on which the nodes meet (default: 29501)"
    )
    group.add_argument(
        "--rendezvous-id",
        default="",
        metavar="TEXT",
        help="nodes meet only those with the same one, such as a revision (default: none)",
    )


def parallel_fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """The fields of EngineConfig that these flags set."""
    return {
        name: getattr(arguments, name)
        for name in (
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "pipeline_layer_partition",
            "data_parallel_size",
            "enable_expert_parallel",
            "expert_placement_strategy",
            "nnodes",
            "node_rank",
            "master_addr",
            "master_port",
            "rendezvous_id",
        )
    }


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

"""Layout flags, in Trimtab's and in vLLM's names."""

import argparse
from typing import Any

import pytest
from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.errors import ConfigError
from trimtab_engine.flags.parallel import add_parallel_flags, parallel_fields


def fields(command: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    add_parallel_flags(parser)
    return parallel_fields(parser.parse_args(command.split()))


@pytest.mark.parametrize(
    ("command", "nnodes", "node_rank"),
    [
        ("-dp 4", 1, 0),
        ("-dp 4 --nnodes 2 --node-rank 1", 2, 1),
        ("-dp 4 -dpl 2", 2, 0),
        ("-dp 4 -dpl 2 --data-parallel-start-rank 2 --headless", 2, 1),
        ("-dp 6 -dpl 2 --data-parallel-start-rank 4 --headless --nnodes 3", 3, 2),
    ],
)
def test_vllm_node_flags_match_nnodes_and_node_rank(command: str, nnodes: int, node_rank: int) -> None:
    result = fields(command)
    assert (result["nnodes"], result["node_rank"]) == (nnodes, node_rank)


def test_vllm_address_flags_are_accepted() -> None:
    result = fields("-dp 2 --data-parallel-address 10.0.0.1 --data-parallel-rpc-port 29550")
    assert (result["master_addr"], result["master_port"]) == ("10.0.0.1", 29550)


@pytest.mark.parametrize(
    ("command", "first", "local"),
    [
        ("-dp 4 --data-parallel-rank 3", 3, 1),
        ("-dp 4 -dpr 0 --data-parallel-external-lb", 0, 1),
        ("-dp 4 -dpl 2 --data-parallel-hybrid-lb", 0, 2),
        ("-dp 4 -dpl 2 --data-parallel-start-rank 2 --data-parallel-hybrid-lb", 2, 2),
        ("-dp 4 --nnodes 2 --node-rank 1 --data-parallel-hybrid-lb", 2, 2),
    ],
)
def test_external_load_balancing_limits_ranks_of_server(command: str, first: int, local: int) -> None:
    config = EngineConfig(model="m", **fields(command))
    assert (config.data_parallel_first_rank, config.data_parallel_size) == (first, local)
    assert (config.data_parallel_world_size, config.nnodes, config.node_rank) == (4, 1, 0)


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("-dp 4 -dpl 3", "every node holds as many engine cores; set a divisor of 4"),
        ("-dp 4 -dpl 0", "an API server without an engine core, is not supported"),
        ("-dp 4 -dpl 2 --data-parallel-start-rank 1 --headless", "begins at a multiple of 2 below 4"),
        ("-dp 4 -dpl 2 --data-parallel-start-rank 2", "without --headless: only the first node serves"),
        ("-dp 4 -dpl 2 --nnodes 4", "--nnodes 4 conflicts with 2 from --data-parallel-size-local"),
        ("-dp 4 --headless", "--headless: not allowed on the first node"),
        ("-dp 4 --data-parallel-external-lb", "requires --data-parallel-rank"),
        ("-dp 4 --data-parallel-rank 4", "data-parallel ranks 4 to 4 of --data-parallel-size 4 are not there"),
        ("-dp 4 -dpr 1 --nnodes 2", "serves one engine core per API"),
        ("-dp 4 --data-parallel-hybrid-lb --headless", "conflicts with --data-parallel-rank"),
        ("-dp 2 -dpr 1 --data-parallel-size-cap 2", "go neither with --nnodes nor with --data-parallel-size-cap"),
        ("-dp 2 --nnodes 4", "each node holds as many whole engines as the others"),
        ("-dp 2 --nnodes 2 --data-parallel-size-cap 4", "engine cores join and retire on one node only"),
        ("-dp 3 --data-parallel-size-cap 2", "--data-parallel-size is 3, above --data-parallel-size-cap 2"),
    ],
)
def test_conflicting_layout_flags_are_rejected(command: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        EngineConfig(model="m", **fields(command))

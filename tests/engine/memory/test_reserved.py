"""Memory reserved for the engine's processes: a rule, so that equal flags give equal KV caches."""

from typing import Any

import pytest
from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.memory.reserved import (
    API_SERVER_BYTES,
    FIRST_PROCESS_BYTES,
    MEDIA_WORKERS_BYTES,
    MIB,
    RANK_BYTES,
    ROW_SIZE_BYTES,
    Processes,
    cpu_activation_bytes,
    reserved_bytes,
)
from trimtab_engine.memory.sizing import reserved_for_processes

VOCABULARY = 48 * 1024
SERVER = API_SERVER_BYTES + 48 * MIB


@pytest.mark.parametrize(
    ("ranks", "servers", "has_first", "expected"),
    [
        (1, 0, False, RANK_BYTES),  # used from Python
        (1, 1, False, RANK_BYTES + SERVER),
        (1, 2, True, RANK_BYTES + 2 * SERVER + FIRST_PROCESS_BYTES),
        (4, 2, True, RANK_BYTES + (2 * SERVER + FIRST_PROCESS_BYTES) // 4),  # common memory is divided
        (2, 0, True, RANK_BYTES + FIRST_PROCESS_BYTES // 2),  # a node that only computes
    ],
)
def test_rank_reserves_own_process_and_common_share(ranks: int, servers: int, has_first: bool, expected: int) -> None:
    processes = Processes(num_ranks=ranks, num_api_servers=servers, has_first_process=has_first)
    assert reserved_bytes(processes, VOCABULARY) == expected


def test_a_part_is_rounded_up() -> None:
    processes = Processes(num_ranks=3, num_api_servers=1, has_first_process=False)
    assert 3 * (reserved_bytes(processes, 1) - RANK_BYTES) >= API_SERVER_BYTES + 1024


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, RANK_BYTES),
        ({"api_server_count": 1}, RANK_BYTES + SERVER),
        ({"api_server_count": 4}, RANK_BYTES + 4 * SERVER + FIRST_PROCESS_BYTES),
        ({"api_server_count": 4, "data_parallel_size": 2}, RANK_BYTES + (4 * SERVER + FIRST_PROCESS_BYTES) // 2),
        # Servers are on the first node; the others have a process that looks after their ranks.
        (
            {"api_server_count": 1, "tensor_parallel_size": 2, "nnodes": 2, "node_rank": 1},
            RANK_BYTES + FIRST_PROCESS_BYTES,
        ),
    ],
)
def test_processes_follow_configuration(changes: dict[str, Any], expected: int) -> None:
    assert reserved_for_processes(EngineConfig(model="m", **changes), VOCABULARY) == expected


def test_activations_include_margin_and_onednn_code() -> None:
    assert cpu_activation_bytes(100, 0) == 125
    assert cpu_activation_bytes(101, 2) == 127 + 2 * ROW_SIZE_BYTES


GIB = 1024 * MIB
SEES: dict[str, Any] = {"api_server_count": 1, "limit_mm_per_prompt": {"image": 4}, "device_memory_bytes": 8 * GIB}


@pytest.mark.parametrize(
    ("changes", "each", "count"),
    [
        ({}, 512 * MIB, 2),  # an eighth of 8 GiB, in the API server and the core
        ({"device_memory_bytes": GIB}, 64 * MIB, 2),
        ({"device_memory_bytes": 256 * GIB}, 4 * GIB, 2),  # never above the guide's value
        ({"api_server_count": 3}, 256 * MIB, 4),
        ({"data_parallel_size": 3}, 768 * MIB, 4),  # of 24 GiB: the device is a rank's
        ({"tensor_parallel_size": 2}, GIB, 2),  # two ranks, one core
        ({"mm_processor_cache_bytes": 4 * GIB}, 4 * GIB, 2),  # explicit values are used and counted
        ({"mm_processor_cache_bytes": 0}, 0, 2),
        ({"api_server_count": 0}, GIB, 0),  # used from Python: nothing is sent anywhere
        ({"api_server_count": 1, "tensor_parallel_size": 2, "nnodes": 2, "node_rank": 1}, GIB, 0),
    ],
)
def test_image_caches_are_reserved_as_share_of_memory(changes: dict[str, Any], each: int, count: int) -> None:
    config = EngineConfig(model="m", **SEES | changes)
    assert (config.processor_cache_bytes, config.num_local_media_caches) == (each, count)
    blind = EngineConfig(model="m", **SEES | changes | {"limit_mm_per_prompt": {}})
    more = count * each + config.num_local_api_servers * MEDIA_WORKERS_BYTES
    assert blind.processor_cache_bytes == blind.num_local_media_caches == 0
    aside = reserved_for_processes(config, VOCABULARY) - reserved_for_processes(blind, VOCABULARY)
    assert more <= aside * config.num_local_ranks < more + config.num_local_ranks


def test_on_cuda_host_memory_is_not_the_device_s() -> None:
    config = EngineConfig(model="m", **SEES | {"device": "cuda", "device_memory_bytes": None})
    assert config.processor_cache_bytes == 4 * GIB

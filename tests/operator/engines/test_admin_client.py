"""Typed client of the admin API, against a real server that implements the contract."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from trimtab_operator.engines.admin_client import (
    ConfigReport,
    EngineClient,
    Layout,
    Loading,
    MemoryLedger,
    OutOfBounds,
    Patched,
    Rejected,
    Stale,
    Unauthorized,
)
from trimtab_operator.engines.http import RequestTimeout, TooLarge, Unreachable, fetch, pod_url
from trimtab_operator.observed.actions import LiveValues
from trimtab_operator.observed.engines import ReportedScheduling
from trimtab_operator.tuner.parameters import FieldRange, Parameter

if TYPE_CHECKING:
    from tests.operator.conftest import ContractEngine


@pytest.fixture
def client(engine: ContractEngine, http: aiohttp.ClientSession) -> EngineClient:
    return EngineClient(http, engine.url, "right")


async def test_the_configuration_is_read_with_what_may_be_changed(client: EngineClient) -> None:
    config = await client.config()
    assert isinstance(config, ConfigReport)
    seen = config.for_tuner()
    assert seen.generation == 1
    assert seen.applied == {
        Parameter.MAX_NUM_SEQS: 32,
        Parameter.MAX_NUM_BATCHED_TOKENS: 512,
        Parameter.GPU_MEMORY_UTILIZATION: 0.74,
        Parameter.WATERMARK: 0.0,
    }
    assert seen.fields[Parameter.MAX_NUM_SEQS] == FieldRange(True, 1, 64)
    assert seen.max_model_len == 1024


async def test_the_order_of_the_queue_is_read_and_told(client: EngineClient, engine: ContractEngine) -> None:
    config = await client.config()
    assert isinstance(config, ConfigReport)
    times = {"ttft_target": 0.0, "ttft_target_per_prompt_token": 0.0}
    assert config.queue() == ReportedScheduling("fcfs", ("fcfs", "priority", "deadline"), times)
    assert "scheduling_policy" not in config.applied
    told: LiveValues = {"scheduling_policy": "deadline", "ttft_target": 2.0, "ttft_target_per_prompt_token": 0.000125}
    assert isinstance(await client.patch(told, if_match=1), Patched)
    assert engine.queue == told


@pytest.mark.parametrize(
    ("applied", "field"),
    [
        ({}, None),
        ({"scheduling_policy": 7}, {"class": "live", "values": "fcfs"}),
        ({"scheduling_policy": True}, {"class": "restart", "values": [1, None, {}]}),
    ],
)
def test_an_engine_that_says_nothing_of_its_queue_is_read_all_the_same(applied: Any, field: Any) -> None:
    fields = {} if field is None else {"scheduling_policy": field}
    body = {"generation": 1, "envelope": {}, "desired": {}, "applied": {"watermark": 0.1, **applied}, "fields": fields}
    assert ConfigReport.model_validate_json(json.dumps(body)).queue() == ReportedScheduling()


async def test_the_ledger_and_the_layout_are_read(client: EngineClient) -> None:
    ledger = await client.memory()
    assert isinstance(ledger, MemoryLedger)
    assert (ledger.kv.blocks_total, ledger.device_bytes) == (151, 1_572_864_000)
    layout = await client.layout()
    assert isinstance(layout, Layout)
    assert layout.world_size == 1


async def test_a_patch_changes_the_engine_and_says_at_which_step(client: EngineClient, engine: ContractEngine) -> None:
    done = await client.patch({Parameter.MAX_NUM_SEQS: 16, Parameter.GPU_MEMORY_UTILIZATION: 0.86}, if_match=1)
    assert isinstance(done, Patched)
    assert (done.id, done.generation, done.applied_at_step) == ("c1", 2, 812)
    assert engine.values["max_num_seqs"] == 16
    assert engine.values["gpu_memory_utilization"] == 0.86


async def test_a_dry_run_changes_nothing(client: EngineClient, engine: ContractEngine) -> None:
    would = await client.patch({Parameter.MAX_NUM_SEQS: 16}, dry_run=True)
    assert isinstance(would, Patched)
    assert (would.id, would.desired["max_num_seqs"]) == (None, 16)
    assert engine.values["max_num_seqs"] == 32


async def test_a_stale_generation_is_named_with_the_present_one(client: EngineClient, engine: ContractEngine) -> None:
    engine.generation = 5
    assert await client.patch({Parameter.MAX_NUM_SEQS: 16}, if_match=4) == Stale(5, "stale")


async def test_out_of_bounds_value_returns_nearest(client: EngineClient) -> None:
    refused = await client.patch({Parameter.GPU_MEMORY_UTILIZATION: 0.99})
    assert refused == OutOfBounds(
        "gpu_memory_utilization", 0.99, 0.7, 0.95, 0.95, "gpu_memory_utilization is 0.99: the cap is 0.95"
    )


async def test_another_token_is_unauthorized(engine: ContractEngine, http: aiohttp.ClientSession) -> None:
    refused = await EngineClient(http, engine.url, "wrong").config()
    assert isinstance(refused, Unauthorized)
    assert "--admin-token-sha256" in refused.message


async def test_a_loading_engine_is_no_failure_of_its_own(client: EngineClient, engine: ContractEngine) -> None:
    engine.loading = True
    assert await client.config() == Loading("the engine is loading")


@pytest.mark.parametrize(
    "body", [b"", b"nonsense", b"[]", b'{"generation": "one"}', b'{"generation": NaN}', b"\xff\xfe"]
)
async def test_an_answer_that_is_not_the_contracts_is_unreachable(
    client: EngineClient, engine: ContractEngine, body: bytes
) -> None:
    engine.broken_body = body
    answer = await client.config()
    assert isinstance(answer, Unreachable)
    assert "docs/reference/contract.md" in answer.message


async def test_a_path_that_the_engine_does_not_know_is_rejected(
    engine: ContractEngine, http: aiohttp.ClientSession
) -> None:
    answer = await EngineClient(http, f"{engine.url}/elsewhere", "right").config()
    assert isinstance(answer, Rejected)
    assert answer.status == 404


async def test_draining_reports_what_is_left(client: EngineClient) -> None:
    progress = await client.drain(30)
    assert not isinstance(progress, Unauthorized | Loading | Unreachable | Rejected)
    assert (progress.remaining_requests, progress.eta_seconds) == (8, 4.5)


async def test_closed_port_is_unreachable(engine: ContractEngine, http: aiohttp.ClientSession) -> None:
    answer = await EngineClient(http, "http://127.0.0.1:1", "right").memory()
    assert isinstance(answer, Unreachable)
    assert answer.message.startswith("http://127.0.0.1:1/admin/v1/memory: no connection: ")


async def test_hung_engine_times_out(engine: ContractEngine, http: aiohttp.ClientSession) -> None:
    engine.hangs = True
    answer = await fetch(http, "GET", f"{engine.url}/metrics", deadline_seconds=0.05)
    assert answer == RequestTimeout(f"{engine.url}/metrics: no response within 0.05 s")


async def test_an_endless_answer_is_cut_off(engine: ContractEngine, http: aiohttp.ClientSession) -> None:
    engine.metrics = "x" * 100_000
    answer = await fetch(http, "GET", f"{engine.url}/metrics", max_bytes=50_000)
    assert answer == TooLarge(f"{engine.url}/metrics: the response is larger than 50,000 bytes")


@pytest.mark.parametrize(
    ("address", "url"), [("10.1.2.3", "http://10.1.2.3:8001"), ("fd00::7", "http://[fd00::7]:8001")]
)
def test_pod_addresses_of_both_families_become_urls(address: str, url: str) -> None:
    assert pod_url(address, 8001) == url

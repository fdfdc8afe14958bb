"""A real HTTP server on loopback that speaks the engine's side of docs/reference/contract.md, for tests of the
operator's I/O.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import aiohttp
import pytest
from aiohttp import web
from trimtab_operator.engines.http import new_client

METRICS = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 8.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 3.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.98
# TYPE vllm:num_preemptions counter
vllm:num_preemptions_total{engine="0",model_name="m"} 40.0
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total{engine="0",model_name="m"} 5000.0
# TYPE trimtab_preempted_requests counter
trimtab_preempted_requests_total{mode="recompute",reason="capacity"} 37.0
trimtab_preempted_requests_total{mode="recompute",reason="resize"} 3.0
# TYPE trimtab_config_generation gauge
trimtab_config_generation 1.0
"""

TOKEN = "right"  # of the engine in these tests
FIELDS: dict[str, tuple[float, float]] = {
    "max_num_seqs": (1, 64),
    "max_num_batched_tokens": (32, 1024),
    "gpu_memory_utilization": (0.7, 0.95),
}


OTHERS: dict[str, object] = {"enable_prefix_caching": True, "watermark": 0.0}
"""Live fields that nothing changes here."""
ORDERS = ["fcfs", "priority", "deadline"]


@dataclass
class ContractEngine:
    """The engine as the contract describes it, with knobs to make it misbehave."""

    values: dict[str, float] = field(
        default_factory=lambda: {"max_num_seqs": 32, "max_num_batched_tokens": 512, "gpu_memory_utilization": 0.74}
    )
    queue: dict[str, object] = field(
        default_factory=lambda: {
            "scheduling_policy": "fcfs",
            "ttft_target": 0.0,
            "ttft_target_per_prompt_token": 0.0,
        }
    )
    """The order of its queue."""
    generation: int = 1
    metrics: str = METRICS
    loading: bool = False
    hangs: bool = False
    lists_requests: bool = True
    finished: int = 2
    """Requests that have ended so far; the n-th had a prompt of 64 + n tokens."""
    broken_body: bytes | None = None
    status: int = 200  # of /metrics
    calls: list[str] = field(default_factory=list)
    port: int = 0
    released: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self.guard])
        app.add_routes(
            [
                web.get("/metrics", self.get_metrics),
                web.get("/startupz", self.get_startupz),
                web.get("/admin/v1/config", self.get_config),
                web.patch("/admin/v1/config", self.patch_config),
                web.get("/admin/v1/memory", self.get_memory),
                web.get("/admin/v1/layout", self.get_layout),
                web.get("/admin/v1/requests", self.get_requests),
                web.post("/admin/v1/drain", self.post_drain),
            ]
        )
        return app

    @web.middleware
    async def guard(self, request: web.Request, handler: object) -> web.StreamResponse:
        assert callable(handler)
        self.calls.append(f"{request.method} {request.path_qs}")
        if self.hangs:
            await self.released.wait()
        if self.broken_body is not None:
            return web.Response(body=self.broken_body)
        if request.path.startswith("/admin"):
            if request.headers.get("Authorization") != f"Bearer {TOKEN}":
                return answer(401, message="the bearer token is not the one that --admin-token-sha256 names")
            if self.loading:
                return answer(503, message="the engine is loading")
        response = await handler(request)
        assert isinstance(response, web.StreamResponse)
        return response

    async def get_metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=self.metrics, status=self.status)

    async def get_startupz(self, request: web.Request) -> web.Response:
        if self.loading:
            return answer(
                503, stage="weights", percent=40, message="Downloaded 9 MB in 1 s", downloaded_bytes=9 * 10**6
            )
        return answer(200, stage="ready", percent=100)

    async def get_config(self, request: web.Request) -> web.Response:
        fields: dict[str, object] = {
            name: {"class": "live", "min": low, "max": high} for name, (low, high) in FIELDS.items()
        }
        fields["scheduling_policy"] = {"class": "live", "min": None, "max": None, "values": ORDERS}
        fields["enable_prefix_caching"] = {"class": "live", "min": None, "max": None, "values": [False, True]}
        fields["block_size"] = {"class": "restart", "min": None, "max": None}
        return answer(
            200,
            generation=self.generation,
            envelope={"max_num_seqs_cap": 64, "max_model_len": 1024, "kv_fixed_by": None},
            desired=self.values | self.queue | OTHERS,
            applied=self.values | self.queue | OTHERS,
            fields=fields,
        )

    async def patch_config(self, request: web.Request) -> web.Response:
        wanted = await request.json()
        if (expected := request.headers.get("If-Match")) is not None and int(expected) != self.generation:
            return answer(412, message="stale", generation=self.generation)
        told = {name: wanted.pop(name) for name in self.queue if name in wanted}
        for name, value in wanted.items():
            low, high = FIELDS[name]
            if not low <= value <= high:
                nearest = min(max(value, low), high)
                refusal = {"field": name, "value": value, "min": low, "max": high, "nearest": nearest}
                return answer(422, **refusal, message=f"{name} is {value}: the cap is {high}")
        if "dry_run" in request.query:
            merged = {**self.values, **wanted}
            return answer(200, id=None, generation=self.generation, desired=merged, applied_at_step=None)
        self.values.update(wanted)
        self.queue.update(told)
        self.generation += 1
        desired = self.values | self.queue | OTHERS
        return answer(200, id="c1", generation=self.generation, desired=desired, applied_at_step=812)

    async def get_memory(self, request: web.Request) -> web.Response:
        kv = {
            "block_size": 16,
            "bytes_per_block": 737_280,
            "blocks_total": 151,
            "blocks_used": 148,
            "blocks_free": 3,
            "blocks_cap": 599,
        }
        return answer(
            200,
            device_bytes=1_572_864_000,
            driver_used_bytes=1_100_000_000,
            kinds={"weights": 538_090_752, "free": 408_944_640},
            unattributed_bytes=-5,
            kv=kv,
        )

    async def get_layout(self, request: web.Request) -> web.Response:
        ranks = [{"rank": 0, "host": "pod", "device": "cpu", "layers": [0, 29], "heads": 9, "kv_heads": 3}]
        return answer(
            200,
            world_size=1,
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            data_parallel_size=1,
            expert_parallel=False,
            ranks=ranks,
        )

    async def get_requests(self, request: web.Request) -> web.Response:
        if not self.lists_requests:
            return answer(404, message="there is no such path")
        names = ["age_seconds", "e2e_seconds", "prompt_tokens", "cached_tokens", "output_tokens"]
        names += ["ttft_seconds", "decode_seconds", "preemptions", "reason"]
        unfinished = ("age_seconds", "prompt_tokens", "cached_tokens", "output_tokens")
        told = range(int(request.query.get("after", 0)), self.finished)
        rows = [[9.0, 4.0, 64 + number, 0, 20, 1.0, 3.0, 0, "stop"] for number in told]
        columns = {"finished": names, "unfinished": unfinished}
        return answer(200, columns=columns, next=self.finished, missed=0, finished=rows, unfinished=[])

    async def post_drain(self, request: web.Request) -> web.Response:
        assert (await request.json())["deadline_seconds"] > 0
        return answer(200, remaining_requests=8, remaining_tokens=900, eta_seconds=4.5)


def answer(status: int, **body: object) -> web.Response:
    return web.Response(status=status, text=json.dumps(body), content_type="application/json")


@pytest.fixture
async def engine() -> AsyncIterator[ContractEngine]:
    engine = ContractEngine()
    async for served in serve(engine):
        yield served


@pytest.fixture
async def other_engine() -> AsyncIterator[ContractEngine]:
    engine = ContractEngine()
    async for served in serve(engine):
        yield served


async def serve(engine: ContractEngine) -> AsyncIterator[ContractEngine]:
    runner = web.AppRunner(engine.application(), shutdown_timeout=1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert runner.addresses
    engine.port = runner.addresses[0][1]
    try:
        yield engine
    finally:
        engine.released.set()
        await runner.cleanup()


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with new_client() as client:
        yield client

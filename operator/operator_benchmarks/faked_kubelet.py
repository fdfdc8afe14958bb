"""Scripted kubelet: pods of StatefulSets and Jobs become Ready, and engines answer the operator.

Run as a separate process next to the measured operator:

    python -m operator_benchmarks.faked_kubelet URL TOKEN NAMESPACE

All pods have the address of one server that answers like an idle engine; pods of resources whose name begins with
`hung` have the address of one that accepts connections and never answers.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from operator_benchmarks.api_server import Client

ENGINE, HUNG = "127.0.0.77", "127.0.0.78"
API_PORT, ADMIN_PORT = 8000, 8001
MAX_AT_ONCE = 16
OURS = "app.kubernetes.io/managed-by=trimtab-operator"
FACTS = (Path(__file__).parents[2] / "tests/golden/model_facts_smollm2.json").read_text()
LAYOUT = {
    "world_size": 1,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "data_parallel_size": 1,
    "expert_parallel": False,
}
PARAMETERS: dict[str, float] = {"max_num_seqs": 256, "max_num_batched_tokens": 2048, "gpu_memory_utilization": 0.6}
LIMITS = {"max_num_seqs": (1, 256), "max_num_batched_tokens": (32, 2048), "gpu_memory_utilization": (0.1, 0.9)}
CONFIG = {
    "generation": 1,
    "envelope": {"max_model_len": 1024},
    "desired": PARAMETERS,
    "applied": PARAMETERS,
    "fields": {name: {"class": "live", "min": low, "max": high} for name, (low, high) in LIMITS.items()},
}
MEMORY = {
    "device_bytes": 1_572_864_000,
    "driver_used_bytes": 900_000_000,
    "kinds": {"weights": 270_000_000, "other": 100_000_000},
    "unattributed_bytes": 0,
    "kv": {
        "block_size": 16,
        "bytes_per_block": 737_280,
        "blocks_total": 512,
        "blocks_used": 0,
        "blocks_free": 512,
        "blocks_cap": 512,
    },
}
METRICS = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 0.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.0
# TYPE vllm:num_preemptions counter
vllm:num_preemptions_total{engine="0",model_name="m"} 0.0
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total{engine="0",model_name="m"} 5000.0
# TYPE trimtab_config_generation gauge
trimtab_config_generation 1.0
"""


class FakeKubelet:
    """Kubelets, the StatefulSet controller and the Job controller of one namespace, as far as the operator observes
    them.
    """

    def __init__(self, client: Client, namespace: str) -> None:
        self.client = client
        self.namespace = namespace
        self.wanted: dict[str, dict[str, Any]] = {}
        """StatefulSet or Job by the pod's name."""
        self._gate = asyncio.Semaphore(MAX_AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        sets = self._follow("/apis/apps/v1", "statefulsets", self.workload)
        jobs = self._follow("/apis/batch/v1", "jobs", self.workload)
        await asyncio.gather(sets, jobs, self._follow("/api/v1", "pods", self.pod))

    async def _follow(self, api: str, plural: str, handler: Any) -> None:
        while True:
            with suppress(aiohttp.ClientError, OSError, KeyError):  # the API server may be unavailable for a while
                async for kind, found, _ in self.client.watch(self.path(plural, api=api), selector=OURS):
                    handler(kind, found)
            await asyncio.sleep(0.5)

    def path(self, plural: str, name: str = "", *, api: str = "/api/v1") -> str:
        return f"{api}/namespaces/{self.namespace}/{plural}" + (f"/{name}" if name else "")

    def workload(self, kind: str, owner: dict[str, Any]) -> None:
        is_set, name = "serviceName" in owner["spec"], owner["metadata"]["name"]
        count = owner["spec"]["replicas"] if is_set else 1
        names = {f"{name}-{number}" for number in range(count)} if kind != "DELETED" else set()
        uid = owner["metadata"]["uid"]
        for pod in [pod for pod, of in self.wanted.items() if of["metadata"]["uid"] == uid and pod not in names]:
            del self.wanted[pod]
            self._begin("DELETE", self.path("pods", pod), {"gracePeriodSeconds": 0})
        for pod in names:
            if pod not in self.wanted:
                self._spawn(self.make(pod, owner))
            self.wanted[pod] = owner
        status = owner.get("status") or {}
        if is_set and kind != "DELETED" and status.get("observedGeneration") != owner["metadata"]["generation"]:
            new_status = {
                "observedGeneration": owner["metadata"]["generation"],
                "replicas": count,
                "readyReplicas": count,
            }
            self._begin(
                "PATCH", self.path("statefulsets", f"{name}/status", api="/apis/apps/v1"), {"status": new_status}
            )

    def pod(self, kind: str, pod: dict[str, Any]) -> None:
        name = pod["metadata"]["name"]
        if kind == "DELETED":
            owner = self.wanted.get(name)
            if owner is not None:
                self._spawn(self.make(name, owner))
        elif "deletionTimestamp" in pod["metadata"]:
            self._begin("DELETE", self.path("pods", name), {"gracePeriodSeconds": 0})

    async def make(self, name: str, owner: dict[str, Any]) -> None:
        template = owner["spec"]["template"]
        is_set = "serviceName" in owner["spec"]
        reference = {
            "apiVersion": "apps/v1" if is_set else "batch/v1",
            "kind": "StatefulSet" if is_set else "Job",
            "name": owner["metadata"]["name"],
            "uid": owner["metadata"]["uid"],
            "controller": True,
        }
        metadata = {**template["metadata"], "name": name, "ownerReferences": [reference]}
        spec = {**template["spec"], "nodeName": "faked"}
        status, _ = await self._call("POST", self.path("pods"), {"metadata": metadata, "spec": spec})
        if status == 409:
            return
        await self._call("PATCH", self.path("pods", f"{name}/status"), {"status": _pod_status(name, is_set)})

    def _begin(self, method: str, path: str, body: Any) -> None:
        async def call() -> None:
            await self._call(method, path, body)

        self._spawn(call())

    async def _call(self, method: str, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        async with self._gate:
            while True:
                try:
                    return await self.client.call(method, path, body)
                except (aiohttp.ClientError, OSError):
                    await asyncio.sleep(0.5)

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _pod_status(name: str, is_set: bool) -> dict[str, Any]:
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    conditions = [
        {"type": kind, "status": "True", "lastTransitionTime": now}
        for kind in ("PodScheduled", "Initialized", "ContainersReady", "Ready")
    ]
    main: dict[str, Any] = {"name": "main", "image": "engine:1", "imageID": "", "ready": True, "restartCount": 0}
    if is_set:
        main |= {"started": True, "state": {"running": {"startedAt": now}}}
        address = HUNG if name.startswith("hung") else ENGINE
        return {"phase": "Running", "conditions": conditions, "podIP": address, "containerStatuses": [main]}
    main |= {"ready": False, "state": {"terminated": {"exitCode": 0, "message": FACTS[:4096]}}}
    return {"phase": "Succeeded", "containerStatuses": [main]}


def _engine() -> web.Application:
    def handler(body: Any) -> Any:
        text = body if isinstance(body, str) else json.dumps(body)
        kind = "text/plain" if isinstance(body, str) else "application/json"

        async def answer(_: web.Request) -> web.Response:
            return web.Response(text=text, content_type=kind)

        return answer

    async def patched(request: web.Request) -> web.Response:
        body = {"id": "c", "generation": 1, "desired": PARAMETERS | await request.json(), "applied_at_step": 1}
        return web.json_response(body)

    application = web.Application()
    application.add_routes(
        [
            web.get("/metrics", handler(METRICS)),
            web.get("/startupz", handler({"stage": "ready", "percent": 100})),
            web.get("/admin/v1/layout", handler(LAYOUT)),
            web.get("/admin/v1/config", handler(CONFIG)),
            web.get("/admin/v1/memory", handler(MEMORY)),
            web.patch("/admin/v1/config", patched),
        ]
    )
    return application


async def _hang(_: asyncio.StreamReader, __: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


async def main(url: str, token: str, namespace: str) -> None:
    """Serve until killed."""
    runner = web.AppRunner(_engine(), access_log=None)
    await runner.setup()
    for port in (API_PORT, ADMIN_PORT):
        await web.TCPSite(runner, ENGINE, port).start()
        await asyncio.start_server(_hang, HUNG, port)
    async with Client(url, token) as client:
        await FakeKubelet(client, namespace).run()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4]))

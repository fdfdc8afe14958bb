"""The installed command: start, several processes, graceful end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from router_process import DEADLINE_SECONDS, ROUTER, Router


def in_threads(number: int, call: Callable[[], int]) -> tuple[list[threading.Thread], list[int]]:
    statuses: list[int] = []
    threads = [threading.Thread(target=lambda: statuses.append(call())) for _ in range(number)]
    for thread in threads:
        thread.start()
    return threads, statuses


@pytest.mark.parametrize("processes", [1, 3])
def test_sigterm_finishes_requests_and_accepts_new_ones(
    start: Callable[..., Router], engine: int, processes: int
) -> None:
    router = start(f"--endpoint=http://127.0.0.1:{engine}", f"--processes={processes}")
    threads, statuses = in_threads(8, lambda: router.post(seconds=2.0))
    time.sleep(0.5)
    router.process.send_signal(signal.SIGTERM)
    router.wait_for(lambda: router.call("GET", "/readyz")[0] == 503)
    assert router.post() == 200  # its address may still be in use
    for thread in threads:
        thread.join()
    assert statuses == [200] * 8
    assert router.process.wait(DEADLINE_SECONDS) == 0
    assert "Traceback" not in router.log.read_text()


def test_drain_by_the_admin_api_ends_the_router(start: Callable[..., Router], engine: int) -> None:
    router = start(f"--endpoint=http://127.0.0.1:{engine}", "--drain-timeout=1s")
    assert router.call("POST", "/admin/v1/drain")[0] == 202
    assert router.process.wait(DEADLINE_SECONDS) == 0


def test_workers_are_summed_and_share_the_token(start: Callable[..., Router], engine: int) -> None:
    router = start(f"--endpoint=http://127.0.0.1:{engine}", "--processes=3")
    assert len(router.workers()) == 2
    for _ in range(60):
        assert router.post() == 200

    def all_arrived() -> bool:
        arrived: int = json.loads(router.call("GET", "/admin/v1/demand")[1])["arrived"]
        return arrived == 60

    router.wait_for(all_arrived)
    text = router.call("GET", "/metrics")[1]
    assert 'trimtab_router_requests_total{code="200",route="generate"} 60.0' in text
    assert router.call("PUT", "/admin/v1/state-token", '{"token": "abc"}')[0] == 204


def test_held_request_of_any_worker_ends_the_long_poll(start: Callable[..., Router]) -> None:
    router = start("--endpoint=http://127.0.0.1:9", "--processes=3")
    for number in range(3):
        before = json.loads(router.call("GET", "/admin/v1/demand")[1])["sequence"]
        threads, _ = in_threads(1, router.post)
        demand = json.loads(router.call("GET", f"/admin/v1/demand?since={before}&wait=20")[1])
        assert demand["sequence"] > before, number
        for thread in threads:
            thread.join()


def test_killed_worker_ends_the_router_gracefully(start: Callable[..., Router], engine: int) -> None:
    router = start(f"--endpoint=http://127.0.0.1:{engine}", "--processes=2")
    os.kill(router.workers()[0], signal.SIGKILL)
    router.wait_for(lambda: router.call("GET", "/readyz")[0] == 503)
    assert router.post() == 200
    assert router.process.wait(DEADLINE_SECONDS) == 1
    assert "worker 1 ended unexpectedly" in router.log.read_text()


def test_endpoint_picker_listens_on_its_port(start: Callable[..., Router], engine: int) -> None:
    router = start(f"--endpoint=http://127.0.0.1:{engine}", "--endpoint-picker-port=0")
    port = router.wait_for(lambda: re.search(r"endpoint picker listens on port (\d+)", router.log.read_text()))[1]
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        health = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service="readiness")
        answer = health.Check(request, timeout=DEADLINE_SECONDS, wait_for_ready=True)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    router.process.send_signal(signal.SIGTERM)
    assert router.process.wait(DEADLINE_SECONDS) == 0


def test_access_log_has_one_json_object_per_request(start: Callable[..., Router], engine: int) -> None:
    router = start(f"--endpoint=http://127.0.0.1:{engine}", "--access-log")
    router.post()
    line = router.wait_for(lambda: re.search(r"^\{.*\}$", router.log.read_text(), re.MULTILINE))[0]
    record = json.loads(line)
    assert (record["method"], record["path"], record["status"]) == ("POST", "/v1/completions", 200)
    assert record["replica"] == f"127.0.0.1:{engine}"


@pytest.mark.parametrize("flags", [[], ["--service=a/b"], ["--endpoint=ftp://h"]])
def test_wrong_command_line_ends_with_one_line(flags: list[str]) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("KUBERNETES_")}
    ended = subprocess.run(
        [sys.executable, "-m", "trimtab_router", "--port=0", "--admin-port=0", *flags],
        env=environment | {"PYTHONPATH": str(ROUTER)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    assert ended.stderr.startswith("trimtab-router: ")


def test_used_port_is_named(start: Callable[..., Router], engine: int) -> None:
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "trimtab_router",
            "--host=127.0.0.1",
            f"--port={engine}",
            "--endpoint=http://127.0.0.1:1",
        ],
        env=os.environ | {"PYTHONPATH": str(ROUTER)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    assert ended.returncode == 1
    assert f"port {engine}" in ended.stderr

"""Operator process: work with a deadline is done in time, however busy the loops are."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import ssl
import threading
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import virtual_time
from aiohttp import web
from kubernetes.aio.config import kube_config
from one_lease import OneLease
from small_api_server import SmallApiServer, make_kubeconfig
from trimtab_operator.board.server import serve_board
from trimtab_operator.kube import leader_election, watches
from trimtab_operator.kube.client import Cluster
from trimtab_operator.kube.leader_election import LeaderLease
from trimtab_operator.kube.webhook import Webhook
from trimtab_operator.reconcile import health
from trimtab_operator.reconcile import process as runner
from trimtab_operator.reconcile.health import Heartbeats, OperatorMetrics, serve_health, serve_metrics
from trimtab_operator.reconcile.loop_thread import LoopThread
from trimtab_operator.reconcile.process import Leadership, Options, run_operator
from trimtab_operator.resource.installation import Installation

DISCOVERED = "/apis/trimtab.dev/v1alpha1"  # by Kopf, which is the last to begin
PODS = "/api/v1/pods"
SECRET = "/api/v1/namespaces/trimtab-system/secrets/trimtab-operator"
LEASE = "/apis/coordination.k8s.io/v1/namespaces/trimtab-system/leases/trimtab-operator"
TEST_TIMEOUT_SECONDS = 300.0  # of a machine that is busy with other things
RENEWALS = 3
OPTIONS = Options(
    namespaces=(),
    operator_namespace="trimtab-system",
    identity="a",
    tick_seconds=5.0,
    default_image=None,
    lease_name="trimtab-operator",
    secret_name="trimtab-operator",
    webhook_port=1,  # the test has its own choose a free one
    webhook_config_name=None,
    webhook_secret_name="trimtab-operator-webhook",
    service_name="trimtab-operator",
    liveness_port=0,
    metrics_port=0,
    board_port=1,  # as the webhook's
    installation=Installation(),
)


@pytest.fixture
def ports(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Return free ports for probes, metrics and webhook."""
    found: dict[str, int] = {}
    start, withdraw = Webhook.start, Webhook.withdraw

    async def serving(port: int, heartbeats: Heartbeats, **options: Any) -> web.AppRunner:
        made = await serve_health(port, heartbeats, **options)
        found["health"] = port_of(made)
        return made

    async def telling(port: int, metrics: OperatorMetrics) -> web.AppRunner:
        made = await serve_metrics(port, metrics)
        found["metrics"] = port_of(made)
        return made

    async def shown(_port: int, *arguments: Any) -> web.AppRunner | None:
        made = await serve_board(0, *arguments)
        assert made is not None
        found["board"] = port_of(made)
        return made

    async def started(webhook: Webhook, _port: int) -> web.AppRunner:
        made = await start(webhook, 0)
        found["webhook"] = port_of(made)
        return made

    monkeypatch.setattr(runner, "serve_health", serving)
    monkeypatch.setattr(runner, "serve_metrics", telling)
    monkeypatch.setattr(runner, "serve_board", shown)
    monkeypatch.setattr(Webhook, "start", started)
    monkeypatch.setattr(Webhook, "withdraw", lambda webhook: withdraw(webhook, after_seconds=0.0))
    return found


def port_of(made: web.AppRunner) -> int:
    """Return the IPv4 port, which differs from the IPv6 port."""
    return next(int(address[1]) for address in made.addresses if len(address) == 2)


def asked(url: str, body: Any = None) -> str:
    """Return the response, read without the caller's event loop."""
    trusting = ssl._create_unverified_context()
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=TEST_TIMEOUT_SECONDS, context=trusting) as answer:
        return str(answer.read().decode())


@asynccontextmanager
async def running(
    server: SmallApiServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[asyncio.Task[int]]:
    """Run an operator at this API server with a Lease that tolerates pauses of a busy machine."""
    monkeypatch.setattr(leader_election, "RENEW_SECONDS", TEST_TIMEOUT_SECONDS)
    monkeypatch.setattr(leader_election, "ATTEMPT_TIMEOUT_SECONDS", TEST_TIMEOUT_SECONDS)
    async with LoopThread("api-server") as elsewhere:
        await elsewhere.enter(server.served())
        monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
        monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(make_kubeconfig(folder, server.port)))
        monkeypatch.setenv("KUBECONFIG", str(folder / "kubeconfig"))
        async with asyncio.timeout(TEST_TIMEOUT_SECONDS):
            yield asyncio.create_task(run_operator(OPTIONS))


async def until_read(server: SmallApiServer, path: str, operator: asyncio.Task[int]) -> None:
    while not server.reads[path]:
        assert not operator.done(), operator.result()
        await asyncio.sleep(0.05)


async def test_busy_loop_does_not_delay_lease_webhook_or_probes(
    ports: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The main loop is blocked until all responses arrived. The initial list is delayed, and the Lease is renewed
    meanwhile.
    """
    monkeypatch.setattr(leader_election, "RETRY_SECONDS", 0.05)
    monkeypatch.setattr(health, "MAX_LAG_SECONDS", 2 * TEST_TIMEOUT_SECONDS)
    monkeypatch.setattr(runner, "MAX_BLOCKED_SECONDS", 2 * TEST_TIMEOUT_SECONDS)
    server = SmallApiServer()
    server.slow[SECRET] = lambda: server.writes[LEASE] > RENEWALS
    async with running(server, tmp_path, monkeypatch) as operator:
        await until_read(server, DISCOVERED, operator)
        before, deadline = server.writes[LEASE], time.monotonic() + TEST_TIMEOUT_SECONDS
        while server.writes[LEASE] < before + RENEWALS and time.monotonic() < deadline:
            pass
        renewed = server.writes[LEASE] - before
        probed = asked(f"http://127.0.0.1:{ports['health']}/healthz")
        told = asked(f"http://127.0.0.1:{ports['metrics']}/metrics")
        board = json.loads(asked(f"http://127.0.0.1:{ports['board']}/api/deployments"))
        review = {"request": {"uid": "u", "operation": "DELETE", "object": None}}
        verdict = json.loads(asked(f"https://127.0.0.1:{ports['webhook']}/validate", review))

        os.kill(os.getpid(), signal.SIGTERM)
        assert await operator == 0
    assert renewed >= RENEWALS
    assert probed == "ok"
    assert board["deployments"] == []
    assert "trimtab_operator_leader 1.0" in told
    assert verdict["response"]["allowed"]
    assert server.objects[LEASE]["spec"]["holderIdentity"] == "", "it was given back"


async def test_stop_signal_ends_leading_operator(
    ports: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Kopf replaces the signal handlers when it starts. If only Kopf handled the signals, waiters of its stop flag
    would hang until the process is killed.
    """
    server = SmallApiServer()
    async with running(server, tmp_path, monkeypatch) as operator:
        await until_read(server, DISCOVERED, operator)
        with caplog.at_level(logging.INFO):
            os.kill(os.getpid(), signal.SIGTERM)
            assert await operator == 0
    ours = [record for record in caplog.records if record.name.startswith("trimtab_operator")]
    assert [record.message for record in ours if record.levelno >= logging.ERROR] == []
    assert server.objects[LEASE]["spec"]["holderIdentity"] == ""


async def test_stop_signal_before_first_sync_ends_operator(
    ports: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watches, "FIRST_SYNC_TIMEOUT_SECONDS", 10 * TEST_TIMEOUT_SECONDS)
    server = SmallApiServer()
    server.slow[PODS] = lambda: False
    async with running(server, tmp_path, monkeypatch) as operator:
        while not server.asked[PODS]:
            assert not operator.done(), operator.result()
            await asyncio.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)
        assert await operator == 0
    assert not server.reads[DISCOVERED], "Kopf did not begin"
    assert server.objects[LEASE]["spec"]["holderIdentity"] == ""


class LateWord(OneLease):
    """API client that blocks the thread at the first Lease write until `may_go`."""

    def __init__(self) -> None:
        super().__init__()
        self.is_asked, self.may_go = threading.Event(), threading.Event()

    async def create(self, manifest: dict[str, Any]) -> dict[str, Any]:
        self.is_asked.set()
        self.may_go.wait(TEST_TIMEOUT_SECONDS)
        return await super().create(manifest)


async def test_lease_acquired_during_stop_is_released() -> None:
    server, stop = LateWord(), asyncio.Event()
    async with asyncio.timeout(TEST_TIMEOUT_SECONDS), LoopThread("beside") as beside:
        ours = LeaderLease(cast("Cluster", server), namespace="n", name="l", identity="a")
        acquiring = asyncio.create_task(Leadership(beside, ours).acquire(stop))
        while not server.is_asked.is_set():  # noqa: ASYNC110 - it is set in the other thread
            await asyncio.sleep(0.01)
        stop.set()
        for _ in range(10):  # until the waiter is cancelled
            await asyncio.sleep(0)
        server.may_go.set()
        assert not await acquiring
        assert not ours.is_held
    assert server.lease is not None
    assert server.lease["spec"]["holderIdentity"] == ""


def test_blocked_process_loses_lease_before_liveness_fails() -> None:
    """The thread that renews the Lease is not blocked. A shorter block does not lose the Lease."""

    async def blocked() -> tuple[float, float]:
        now = asyncio.get_running_loop().time
        heartbeats = Heartbeats(max_age_seconds=300.0, clock=now)
        ours = runner._lease(cast("Cluster", OneLease()), OPTIONS, heartbeats)
        heartbeats.mark_loop_ran()
        await ours.acquire()
        keeping = asyncio.create_task(ours.renew_until_lost())
        began = now()
        for _ in range(10):
            heartbeats.mark_loop_ran()
            await asyncio.sleep(runner.MAX_BLOCKED_SECONDS)
        assert ours.is_held
        heartbeats.mark_loop_ran()
        since = now()
        await keeping
        assert not ours.is_held
        return since - began, now() - since

    led, led_on = virtual_time.run(blocked())
    assert led >= 10 * runner.MAX_BLOCKED_SECONDS
    assert runner.MAX_BLOCKED_SECONDS <= led_on < health.MAX_LAG_SECONDS


async def test_loop_thread_cancels_its_coroutines() -> None:
    told: list[str] = []

    async def waits(name: str) -> None:
        assert threading.current_thread() is not threading.main_thread()
        told.append(f"{name} began")
        try:
            await asyncio.Event().wait()
        finally:
            told.append(f"{name} ended")

    async def begun(count: int) -> None:
        while len(told) < count:  # noqa: ASYNC110 - the other thread appends to it
            await asyncio.sleep(0.01)

    async with asyncio.timeout(TEST_TIMEOUT_SECONDS), LoopThread("beside") as beside:
        first = asyncio.create_task(beside.run(waits, "first"))
        await begun(1)
        first.cancel()
        await begun(2)
        second = asyncio.create_task(beside.run(waits, "second"))
        await begun(3)
    assert told == ["first began", "first ended", "second began", "second ended"]
    assert (await asyncio.gather(second, return_exceptions=True))[0].__class__ is asyncio.CancelledError

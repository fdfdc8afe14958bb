"""Webhook certificates: all operator pods serve the same ones, whatever is changed externally."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import virtual_time
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from guarded_cluster import Grant, GuardedDoor
from operator_cluster import FakeCluster
from trimtab_operator.kube import certificates
from trimtab_operator.kube import webhook as webhook_module
from trimtab_operator.kube.certificates import CA_LIFETIME, Certificates
from trimtab_operator.kube.client import RESOURCES
from trimtab_operator.kube.nodes import Nodes
from trimtab_operator.kube.webhook import DEREGISTRATION_SECONDS, MAX_BUFFERED_BYTES, REFRESH_SECONDS, Webhook
from trimtab_operator.resource.spec import KIND as KIND_OF_RESOURCE

NAMES = certificates.service_names("trimtab-webhook", "trimtab-system")
CONFIGURATION = "trimtab"
KIND = "ValidatingWebhookConfiguration"


class Door(GuardedDoor):
    """API client with concurrent changes between any two calls, and an outage."""

    def __init__(self) -> None:
        kinds = ((RESOURCES[kind][0], RESOURCES[kind][2]) for kind in ("Secret", KIND))
        verbs = ("get", "create", "patch")
        super().__init__(FakeCluster(), [Grant(*kind, verb) for kind in kinds for verb in verbs])
        self.failures: list[Exception] = []
        hooks = [{"name": "w", "clientConfig": {}}]
        self.others[self._path(KIND, None, CONFIGURATION)] = {
            "metadata": {"name": CONFIGURATION},
            "webhooks": hooks,
        }

    async def _call(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        await asyncio.sleep(0)
        if self.failures:
            raise self.failures.pop(0)
        return await super()._call(method, path, **options)

    async def stored(self) -> Certificates:
        found = Certificates.from_secret(await self.get_or_create_secret("trimtab-system", "trimtab-webhook", {}))
        assert found is not None
        return found

    @property
    def trusted(self) -> bytes:
        """Return the certificates that the API server trusts."""
        (hook,) = self.others[self._path(KIND, None, CONFIGURATION)]["webhooks"]
        return base64.b64decode(hook["clientConfig"].get("caBundle", ""))

    def reset(self) -> None:
        """Reset the configuration to the chart's."""
        self.others[self._path(KIND, None, CONFIGURATION)]["webhooks"][0]["clientConfig"] = {}


def a_webhook(door: Door) -> Webhook:
    return Webhook(
        door,
        Nodes(door),
        namespace="trimtab-system",
        service="trimtab-webhook",
        secret="trimtab-webhook",
        state_secret="trimtab",
        configuration=CONFIGURATION,
        default_image=None,
    )


def aged(days: float) -> Certificates:
    """Return certificates of this age."""
    return certificates.issue(NAMES, now=datetime.now(UTC) - timedelta(days=days))


async def kept_by(door: Door, made: Certificates) -> None:
    await door.get_or_create_secret("trimtab-system", "trimtab-webhook", made.as_secret())


async def test_concurrent_starts_serve_same_certificate() -> None:
    door = Door()
    first, second = a_webhook(door), a_webhook(door)
    await asyncio.gather(first.refresh(), second.refresh())
    stored = await door.stored()
    assert first._loaded == second._loaded == stored
    assert door.trusted == stored.bundle


async def test_concurrent_ca_renewals_stay_trusted() -> None:
    door = Door()
    old = aged(days=CA_LIFETIME.days - 1)
    await kept_by(door, old)
    first, second = a_webhook(door), a_webhook(door)
    await asyncio.gather(first.refresh(), second.refresh())
    stored = await door.stored()
    assert stored.ca != old.ca
    assert first._loaded == second._loaded == stored
    assert door.trusted == stored.bundle
    assert old.ca in door.trusted, "connections to a pod that has not renewed yet"


@pytest.mark.parametrize("written", [{}, {"ca.crt": b"somebody else's"}, {"ca.key": b"", "tls.key": b"x"}])
async def test_invalid_secret_is_replaced(written: dict[str, bytes]) -> None:
    door = Door()
    await door.get_or_create_secret("trimtab-system", "trimtab-webhook", written)
    webhook = a_webhook(door)
    await webhook.refresh()
    assert webhook._loaded == await door.stored()


def test_reset_ca_bundle_is_restored() -> None:
    """An API server outage and an unexpected response do not stop the refresh."""

    async def minutes() -> bool:
        door = Door()
        webhook = a_webhook(door)
        await webhook.refresh()
        keeping = asyncio.create_task(webhook.maintain())
        door.reset()
        door.failures = [ConnectionResetError(), KeyError("metadata")]
        await asyncio.sleep(3.5 * REFRESH_SECONDS)
        is_alive = not keeping.done()
        keeping.cancel()
        return is_alive and door.trusted == (await door.stored()).bundle

    assert virtual_time.run(minutes())


def test_withdrawn_webhook_keeps_serving() -> None:
    async def leaving() -> tuple[bool, float]:
        webhook = a_webhook(Door())
        webhook.is_serving = True
        going = asyncio.create_task(webhook.withdraw())
        await asyncio.sleep(0.1)
        is_found = webhook.is_serving
        await going
        return is_found, asyncio.get_running_loop().time()

    assert virtual_time.run(leaving()) == (False, DEREGISTRATION_SECONDS)


def a_review(spec: dict[str, Any]) -> bytes:
    """Return the AdmissionReview of a creation."""
    made = {
        "kind": KIND_OF_RESOURCE,
        "metadata": {"namespace": "default", "name": "m", "uid": "u"},
        "spec": {"model": {"uri": "file:///models/x"}, **spec},
    }
    request = {"uid": "r", "operation": "CREATE", "object": made}
    return json.dumps({"request": request}).encode()


WORST_BODIES = {
    "unknown fields": a_review({f"unknownField{number}": 1 for number in range(120_000)}),
    "unknown template fields": a_review({"template": {"spec": {f"field{number}": 1 for number in range(150_000)}}}),
    "one long value": a_review({"model": {"uri": "x" * (2 << 20)}}),
    "one long name": a_review({"x" * (2 << 20): 1}),
    "nested": b'{"request":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001,
    "nested lists": b"[" * (2 << 20),
    "long integer": b'{"request":' + b"1" * 100_000 + b"}",
    "too large": b" " * (5 << 20),
    "not JSON": b"\xff",
}


@asynccontextmanager
async def serving(webhook: Webhook) -> AsyncIterator[TestClient[Any, Any]]:
    application = web.Application(client_max_size=webhook_module.MAX_REVIEW_BYTES)
    application.router.add_post("/validate", webhook._validate)
    async with TestClient(TestServer(application)) as client:
        yield client


@pytest.mark.parametrize("kind", WORST_BODIES)
async def test_worst_bodies_do_not_block_event_loop(kind: str) -> None:
    """The bodies need no authentication. Neither the event loop nor the response grows with them."""
    gaps: list[float] = []

    async def beat() -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.01)
            gaps.append(time.monotonic() - began)

    async with serving(a_webhook(Door())) as client:
        beating = asyncio.create_task(beat())
        answer = await client.post("/validate", data=io.BytesIO(WORST_BODIES[kind]))
        text = await answer.text()
        await asyncio.sleep(0.1)
        beating.cancel()
    assert max(gaps) < 2.0  # half of the deadline; the client of this test runs in the same loop
    assert len(text) < 64_000
    if answer.status == 200:
        assert not json.loads(text)["response"]["allowed"]


async def test_concurrent_bodies_share_one_buffer() -> None:
    webhook = a_webhook(Door())
    peak = 0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal peak
        for _ in range(40):
            yield b" " * (64 << 10)
            peak = max(peak, webhook._buffered)
            await asyncio.sleep(0.001)

    async with serving(webhook) as client:
        answers = await asyncio.gather(*(client.post("/validate", data=chunks()) for _ in range(30)))
        good = await client.post("/validate", data=a_review({"runtime": {"image": "x"}}))
        assert (await good.json())["response"]["allowed"]
    assert {answer.status for answer in answers} <= {400, 503}
    assert 503 in {answer.status for answer in answers}
    assert 0 < peak <= MAX_BUFFERED_BYTES
    assert webhook._buffered == 0


async def test_slow_body_is_ended_at_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook_module, "REVIEW_TIMEOUT_SECONDS", 0.05)

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b" "
            await asyncio.sleep(0.02)

    async with serving(a_webhook(Door())) as client:
        assert (await client.post("/validate", data=chunks())).status == 503

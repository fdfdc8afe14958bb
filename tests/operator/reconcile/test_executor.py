"""Executor: actions are applied in order, errors are raised, and some actions have a fallback."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any, cast

import kubernetes.aio.client
import pytest
from kubernetes.aio.client.exceptions import ApiException
from operator_builders import a_deployment
from operator_cluster import FakeCluster, a_loop, a_reconciler
from small_api_server import SmallApiServer
from trimtab_operator.errors import NotLeading
from trimtab_operator.kube.client import Cluster
from trimtab_operator.observed.actions import Apply, Delete, Event
from trimtab_operator.reconcile.executor import Executor
from trimtab_operator.reconcile.health import OperatorMetrics
from trimtab_operator.resource.spec import InferenceDeployment

TEST_TIMEOUT_SECONDS = 300.0  # of a machine that is busy with other things
METADATA = {"name": "m-g0", "namespace": "n"}
ANYWHERE = {"kind": "Service", "metadata": METADATA, "spec": {}}
SAME = {**ANYWHERE, "spec": {"clusterIP": "10.0.0.7"}}


class RefusingCluster:
    """API server that rejects ClusterIPs with `status`."""

    def __init__(self, status: int) -> None:
        self.status, self.applied = status, list[Mapping[str, Any]]()

    async def apply(self, manifest: Mapping[str, Any], _owner: InferenceDeployment, *, is_new: bool) -> None:
        if "clusterIP" in manifest["spec"]:
            raise ApiException(status=self.status)
        self.applied.append(manifest)


def make_executor(cluster: RefusingCluster) -> Executor:
    return Executor(cast("Cluster", cluster), OperatorMetrics(), lambda: 0.0)


async def test_executor_writes_nothing_without_lease(caplog: pytest.LogCaptureFixture) -> None:
    cluster = FakeCluster()
    reconciler, loop = a_reconciler(cluster), a_loop(cluster)
    leading = [True] * 3 + [False] * 99
    reconciler = replace(reconciler, executor=replace(reconciler.executor, is_leading=lambda: leading.pop(0)))
    with pytest.raises(NotLeading):
        await reconciler.tick(loop)
    assert cluster.writes == 3
    delay = await reconciler.guarded_tick(loop)
    assert delay > 0
    assert cluster.writes == 3
    assert {record.levelname for record in caplog.records} == {"WARNING"}, "the process says why it ends, once"


WRITES: dict[str, Callable[[Executor, InferenceDeployment], Any]] = {
    "a new child, which is looked for first": lambda executor, deployment: executor.execute(
        deployment, (Apply(ANYWHERE, True, "missing"),)
    ),
    "a child": lambda executor, deployment: executor.execute(deployment, (Apply(ANYWHERE, False, "differs"),)),
    "a deletion": lambda executor, deployment: executor.execute(deployment, (Delete("Service", "m-g0", "u", "gone"),)),
    "an Event": lambda executor, deployment: executor.emit_event(deployment, Event("Normal", "R", "m", "k")),
    "a status": lambda executor, deployment: executor.write_error_status(deployment, ("R", "m")),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
async def test_request_is_not_sent_after_lease_expiry(
    write: Callable[[Executor, InferenceDeployment], Any],
) -> None:
    """The Lease expires while credentials are renewed for the first request. A read request is still sent."""
    server, is_leading = SmallApiServer(), [True]
    client: Any = kubernetes.aio.client
    async with asyncio.timeout(TEST_TIMEOUT_SECONDS), server.served(), AsyncExitStack() as stack:
        configuration = client.Configuration(host=f"http://127.0.0.1:{server.port}")

        async def renew(_: Any) -> None:
            is_leading[0] = False

        configuration.api_key["BearerToken"] = "t"
        configuration.refresh_api_key_hook = renew
        cluster = Cluster()
        stack.push_async_exit(cluster.__aexit__)
        await cluster.connect(configuration)
        cluster.may_write = lambda: is_leading[0]
        executor = Executor(cluster, OperatorMetrics(), lambda: 0.0, cluster.may_write)
        with pytest.raises(NotLeading):
            await write(executor, a_deployment())
    assert server.methods <= {"GET"}


async def test_invalid_cluster_ip_uses_fallback() -> None:
    cluster = RefusingCluster(422)
    await make_executor(cluster).execute(a_deployment(), (Apply(SAME, True, "missing", ANYWHERE),))
    assert cluster.applied == [ANYWHERE]


@pytest.mark.parametrize(("status", "fallback"), [(500, ANYWHERE), (403, ANYWHERE), (422, None)])
async def test_rejected_object_stops_no_other(status: int, fallback: Mapping[str, Any] | None) -> None:
    cluster = RefusingCluster(status)
    actions = Apply(SAME, True, "missing", fallback), Apply(ANYWHERE, True, "missing")
    result = await make_executor(cluster).execute(a_deployment(), actions)
    assert cluster.applied == [ANYWHERE]
    assert result.done == actions[1:]
    assert [(one.action, getattr(one.error, "status", None)) for one in result.rejections] == [(actions[0], status)]


@pytest.mark.parametrize("status", [401, 429, 503])
async def test_unavailable_api_server_is_raised(status: int) -> None:
    cluster = RefusingCluster(status)
    with pytest.raises(ApiException):
        await make_executor(cluster).execute(a_deployment(), (Apply(SAME, True, "missing", ANYWHERE),))
    assert cluster.applied == []

"""What a turn asks for is carried out in its order, or the error is the loop's; some things have a second choice."""

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
from trimtab_operator.reconcile.executor import Hands
from trimtab_operator.reconcile.health import OperatorMetrics
from trimtab_operator.resource.spec import InferenceDeployment

PATIENCE_SECONDS = 300.0  # of a machine that is busy with other things
METADATA = {"name": "m-g0", "namespace": "n"}
ANYWHERE = {"kind": "Service", "metadata": METADATA, "spec": {}}
SAME = {**ANYWHERE, "spec": {"clusterIP": "10.0.0.7"}}


class RefusingCluster:
    """An API server at which ClusterIPs cannot be had, with `status`."""

    def __init__(self, status: int) -> None:
        self.status, self.applied = status, list[Mapping[str, Any]]()

    async def apply(self, manifest: Mapping[str, Any], _owner: InferenceDeployment, *, is_new: bool) -> None:
        if "clusterIP" in manifest["spec"]:
            raise ApiException(status=self.status)
        self.applied.append(manifest)


def hands_at(cluster: RefusingCluster) -> Hands:
    return Hands(cast("Cluster", cluster), OperatorMetrics(), lambda: 0.0)


async def test_nothing_is_written_once_the_lease_has_ended(caplog: pytest.LogCaptureFixture) -> None:
    cluster = FakeCluster()
    reconciler, loop = a_reconciler(cluster), a_loop(cluster)
    leading = [True] * 3 + [False] * 99
    reconciler = replace(reconciler, hands=replace(reconciler.hands, is_leading=lambda: leading.pop(0)))
    with pytest.raises(NotLeading):
        await reconciler.tick(loop)
    assert cluster.writes == 3
    delay = await reconciler.guarded_tick(loop)
    assert delay > 0
    assert cluster.writes == 3
    assert {record.levelname for record in caplog.records} == {"WARNING"}, "the process says why it ends, once"


WRITES: dict[str, Callable[[Hands, InferenceDeployment], Any]] = {
    "a new child, which is looked for first": lambda hands, deployment: hands.execute(
        deployment, (Apply(ANYWHERE, True, "missing"),)
    ),
    "a child": lambda hands, deployment: hands.execute(deployment, (Apply(ANYWHERE, False, "differs"),)),
    "a deletion": lambda hands, deployment: hands.execute(deployment, (Delete("Service", "m-g0", "u", "gone"),)),
    "an Event": lambda hands, deployment: hands.tell(deployment, Event("Normal", "R", "m", "k")),
    "a status": lambda hands, deployment: hands.write_in_the_dark(deployment, ("R", "m")),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
async def test_nothing_is_sent_once_the_lease_has_ended_however_far_it_has_come(
    write: Callable[[Hands, InferenceDeployment], Any],
) -> None:
    """The Lease ends as credentials are renewed for the first request. Where that one only reads, it is sent."""
    server, is_leading = SmallApiServer(), [True]
    client: Any = kubernetes.aio.client
    async with asyncio.timeout(PATIENCE_SECONDS), server.served(), AsyncExitStack() as stack:
        configuration = client.Configuration(host=f"http://127.0.0.1:{server.port}")

        async def renew(_: Any) -> None:
            is_leading[0] = False

        configuration.api_key["BearerToken"] = "t"
        configuration.refresh_api_key_hook = renew
        cluster = Cluster()
        stack.push_async_exit(cluster.__aexit__)
        await cluster.connect(configuration)
        cluster.may_write = lambda: is_leading[0]
        hands = Hands(cluster, OperatorMetrics(), lambda: 0.0, cluster.may_write)
        with pytest.raises(NotLeading):
            await write(hands, a_deployment())
    assert server.methods <= {"GET"}


async def test_an_address_that_cannot_be_had_is_done_without() -> None:
    cluster = RefusingCluster(422)
    await hands_at(cluster).execute(a_deployment(), (Apply(SAME, True, "missing", ANYWHERE),))
    assert cluster.applied == [ANYWHERE]


@pytest.mark.parametrize(("status", "fallback"), [(500, ANYWHERE), (403, ANYWHERE), (422, None)])
async def test_other_errors_are_the_loops(status: int, fallback: Mapping[str, Any] | None) -> None:
    cluster = RefusingCluster(status)
    with pytest.raises(ApiException):
        await hands_at(cluster).execute(a_deployment(), (Apply(SAME, True, "missing", fallback),))
    assert cluster.applied == []

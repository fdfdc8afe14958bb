"""What the door to the API server takes for its own, for gone, and for somebody else's."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.dynamic.exceptions import NotFoundError, api_exception
from operator_builders import a_deployment
from trimtab_operator.builders.labels import common_labels
from trimtab_operator.errors import NameTaken, NotYet
from trimtab_operator.kube.client import (
    API_ERRORS,
    MAX_CALLS_AT_ONCE,
    Cluster,
    is_of_a_former_namesake,
    is_of_workload,
)


@pytest.mark.parametrize(
    ("owner", "is_ours"),
    [
        ({"kind": "StatefulSet", "name": "m-g0", "controller": True, "uid": "u-g0"}, True),
        ({"kind": "StatefulSet", "name": "m-g0", "controller": True, "uid": "made up"}, False),
        ({"kind": "StatefulSet", "name": "m-g0", "controller": True}, False),
        ({"kind": "StatefulSet", "name": "m-g12-w", "controller": True, "uid": "gone"}, True),  # its pod still drains
        ({"kind": "Job", "name": "m-facts", "controller": True, "uid": "u-facts"}, True),
        ({"kind": "Job", "name": "m-facts", "controller": True, "uid": "made up"}, False),
        ({"kind": "StatefulSet", "name": "m-g0", "controller": False, "uid": "u-g0"}, False),
        ({"kind": "StatefulSet", "name": "other-g0", "controller": True}, False),
        ({"kind": "ReplicaSet", "name": "m-g0", "controller": True}, False),
        (None, False),  # anybody may give a pod our labels
    ],
)
def test_a_pod_is_known_by_its_controllers_uid_and_not_by_its_labels(
    owner: dict[str, Any] | None, is_ours: bool
) -> None:
    pod = {"metadata": {"name": "m-g0-0", "ownerReferences": [owner] if owner else []}}
    assert is_of_workload(pod, "m", {"m-g0": "u-g0", "m-facts": "u-facts"}) is is_ours


class Answers(Cluster):
    """A door behind which the API server gives one answer to everything."""

    def __init__(self, answer: dict[str, Any] | Exception) -> None:
        super().__init__()
        self.answer = answer

    def _path(self, kind: str, namespace: str | None, name: str | None) -> str:
        return f"/{kind}/{namespace}/{name}"

    async def _call(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def not_found(body: str | None) -> NotFoundError:
    made: type[Any] = NotFoundError  # the client library has no annotations
    error = ApiException(status=404, reason="Not Found")
    error.body = body
    found = made(error)
    assert isinstance(found, NotFoundError)
    return found


def a_status(name: str) -> str:
    return json.dumps({"kind": "Status", "reason": "NotFound", "details": {"name": name, "kind": "x"}, "code": 404})


async def test_each_object_of_a_list_says_its_kind_and_is_confirmed_by_it() -> None:
    pod = {"metadata": {"namespace": "n", "name": "m-g0-0", "resourceVersion": "7"}}  # as in an answer to a list
    door = Answers({"kind": "PodList", "items": [pod]})
    known = await door.list("Pod", "n")
    assert known == [{"kind": "Pod", **pod}]
    assert await door.are_current(known)
    pod["metadata"]["resourceVersion"] = "8"
    door.answer = {"kind": "PodList", "items": [{"metadata": {**pod["metadata"], "resourceVersion": "9"}}]}
    assert not await door.are_current(known)


async def test_what_the_api_server_says_is_not_there_is_none() -> None:
    assert await Answers(not_found(a_status("m"))).get("Pod", "n", "m") is None


@pytest.mark.parametrize("body", ["404 page not found\n", None, "", "{}", "[]", '{"reason": "NotFound", "details": 1}'])
async def test_a_404_of_an_api_server_that_does_not_serve_the_kind_yet_says_nothing_of_the_object(
    body: str | None,
) -> None:
    with pytest.raises(NotFoundError):
        await Answers(not_found(body)).get("InferenceDeployment", "n", "m")


def refused(status: int, reason: str = "", message: str = "", **details: Any) -> Exception:
    error = ApiException(status=status, reason=reason)
    error.body = json.dumps(
        {"kind": "Status", "reason": reason, "details": details, "message": message, "code": status}
    )
    translated: Any = api_exception
    found = translated(error)
    assert isinstance(found, Exception)
    return found


class Keeps(Cluster):
    """A door behind which the API server has one object, or none, and notes what it is asked. Where `makes_versioned`
    is not so, it makes no object whose version is given."""

    def __init__(self, present: dict[str, Any] | None, *, makes_versioned: bool = True) -> None:
        super().__init__()
        self.present, self.makes_versioned = present, makes_versioned
        self.asked: list[str] = []

    def _path(self, kind: str, namespace: str | None, name: str | None) -> str:
        return f"/{kind}/{namespace}/{name}"

    async def _call(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        self.asked.append(method)
        if method == "get":
            if self.present is None:
                raise not_found(a_status("m-g0"))
            return self.present
        version = options["body"]["metadata"].get("resourceVersion")
        if (
            version is not None
            and self.present is not None
            and version != self.present["metadata"].get("resourceVersion")
        ):
            raise refused(409, "Conflict")
        if version is not None and not self.makes_versioned:
            raise refused(500, message="resourceVersion should not be set on objects to be created")
        self.present = {**options["body"], "metadata": {**options["body"]["metadata"], "resourceVersion": "7"}}
        return self.present


SET = {"kind": "StatefulSet", "metadata": {"namespace": "n", "name": "m-g0"}}


async def test_a_child_is_made_in_one_call_which_makes_nothing_where_something_is() -> None:
    door = Keeps(None)
    await door.apply(SET, a_deployment(), is_new=True)
    assert door.asked == ["patch"]
    assert door.present is not None
    door.asked.clear()
    made = {**door.present}
    with pytest.raises(NameTaken):  # by a resource of another uid
        await door.apply({**SET, "spec": {}}, a_deployment(name="other"), is_new=True)
    assert (door.present, door.asked) == (made, ["patch", "get"])


async def test_what_comes_between_a_look_and_a_write_is_not_written_over() -> None:
    class Busy(Keeps):
        """Whenever somebody has looked, it is another object."""

        async def get(self, kind: str, namespace: str | None, name: str) -> dict[str, Any] | None:
            seen, self.present = self.present, owned_by(uid="u-other")
            return seen

    door = Busy(owned_by())
    assert door.present is not None
    door.present["metadata"]["resourceVersion"] = "3"
    with pytest.raises(NotYet):
        await door.apply(SET, a_deployment(), is_new=True)
    assert door.present == owned_by(uid="u-other")


async def test_an_api_server_that_makes_nothing_with_a_version_is_asked_without() -> None:
    door = Keeps(None, makes_versioned=False)
    await door.apply(SET, a_deployment(), is_new=True)
    assert door.asked == ["patch", "get", "patch"]
    assert door.present is not None
    door.asked, door.present = [], None
    await door.apply(SET, a_deployment(), is_new=True)
    assert door.asked == ["get", "patch"], "it is known by now"


async def test_another_refusal_is_told_as_it_is() -> None:
    door = Answers(refused(422, "Invalid", 'StatefulSet.apps "m-g0" is invalid: spec.template: Invalid value'))
    with pytest.raises(API_ERRORS, match="Invalid value"):
        await door.apply(SET, a_deployment(), is_new=True)


def owned_by(**owner: Any) -> dict[str, Any]:
    reference = {"kind": "InferenceDeployment", "name": "m", "uid": "u-m", "controller": True, **owner}
    return {"metadata": {"name": "m-g0", "ownerReferences": [reference]}}


@pytest.mark.parametrize(
    ("present", "error"),
    [
        (owned_by(uid="u-before"), NotYet),  # goes with the resource that was deleted
        (owned_by(name="another", uid="u-another"), NameTaken),
        (owned_by(kind="StatefulSet", uid="u-set"), NameTaken),
        ({"metadata": {"name": "m-g0"}}, NameTaken),
    ],
)
async def test_a_child_that_is_there_already_is_waited_for_if_it_is_about_to_go(
    present: dict[str, Any], error: type[Exception]
) -> None:
    manifest = {"kind": "StatefulSet", "metadata": {"namespace": "n", "name": "m-g0"}}
    with pytest.raises(error):
        await Keeps(present).apply(manifest, a_deployment(), is_new=True)


async def test_a_replica_that_is_there_already_is_looked_at_before_it_is_written_over() -> None:
    """Watches are about to tell of it; without its labels they never would."""
    manifest = {"kind": "StatefulSet", "metadata": {"namespace": "n", "name": "m-g0"}}
    present = owned_by()
    await Keeps(present).apply(manifest, a_deployment(), is_new=True)
    present["metadata"]["labels"] = common_labels(a_deployment())
    with pytest.raises(NotYet):
        await Keeps(present).apply(manifest, a_deployment(), is_new=True)


def test_its_own_child_is_of_no_former_namesake() -> None:
    assert not is_of_a_former_namesake(owned_by(), a_deployment())


@pytest.mark.parametrize(
    ("answer", "budgets"),
    [
        ({"resources": [{"name": "poddisruptionbudgets"}], "items": []}, ()),
        ({"resources": [{"name": "podsecuritypolicies"}]}, None),
        (not_found("404 page not found"), None),  # Kubernetes before 1.21
    ],
)
async def test_budgets_are_looked_for_where_the_cluster_serves_them(
    answer: dict[str, Any] | Exception, budgets: tuple[()] | None
) -> None:
    found = await Answers(answer)._optional_children(a_deployment())
    assert found.get("PodDisruptionBudget") == budgets


async def test_what_only_guards_and_watches_engines_is_read_once_a_minute_and_after_each_write() -> None:
    door = Answers({"resources": [{"name": "poddisruptionbudgets"}], "items": []})
    first = await door._optional_children(a_deployment())
    assert await door._optional_children(a_deployment()) is first
    manifest = {"kind": "PodDisruptionBudget", "metadata": {"namespace": "n", "name": "m"}}
    await door.apply(manifest, a_deployment(), is_new=False)
    assert await door._optional_children(a_deployment()) is not first


class Slow(Cluster):
    """A door behind which nothing is answered but what concerns the Lease."""

    def __init__(self) -> None:
        super().__init__()
        self.under_way = 0

    def _path(self, kind: str, namespace: str | None, name: str | None) -> str:
        group = "apis/coordination.k8s.io/v1/" if kind == "Lease" else "api/v1/"
        return f"/{group}{kind}/{namespace}/{name}"

    async def _answer(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        if "Lease" not in path:
            self.under_way += 1
            await asyncio.Event().wait()
        return {"kind": "Lease"}


async def test_the_lease_waits_for_no_burst_of_other_calls_which_is_bounded() -> None:
    cluster = Slow()
    burst = [asyncio.create_task(cluster.get("Pod", "n", f"m-{number}")) for number in range(1000)]
    await asyncio.sleep(0)
    assert await cluster.get("Lease", "n", "trimtab") == {"kind": "Lease"}
    assert cluster.under_way == MAX_CALLS_AT_ONCE
    for task in burst:
        task.cancel()
    await asyncio.gather(*burst, return_exceptions=True)


class Evicts(Answers):
    """A door behind which evictions get one answer, and deletions are noted."""

    def __init__(self, answer: dict[str, Any] | Exception) -> None:
        super().__init__(answer)
        self.called: list[tuple[str, str]] = []

    async def _call(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        self.called.append((method, path))
        if method == "delete":
            assert options["body"]["preconditions"] == {"uid": "u"}
            return {}
        assert options["body"]["deleteOptions"] == {"preconditions": {"uid": "u"}}
        return await super()._call(method, path, **options)


def forbidding(budget: str) -> dict[str, Any]:
    """As Kubernetes words it."""
    message = f"The disruption budget {budget} needs 2 healthy pods and has 2 currently"
    return {"causes": [{"reason": "DisruptionBudget", "message": message}]}


@pytest.mark.parametrize(
    ("answer", "goes", "is_deleted"),
    [
        ({"kind": "Status", "status": "Success"}, True, False),
        (refused(429, "TooManyRequests", **forbidding("m")), False, False),
        (refused(429, "TooManyRequests", retryAfterSeconds=1), False, False),  # the API server is busy
        (refused(429, "TooManyRequests", **forbidding("m-2")), True, True),  # somebody else's, which stops no change
        (refused(500, "InternalError"), True, True),  # two budgets for one pod
        (refused(403, "Forbidden"), True, True),
        (refused(404, "NotFound"), True, True),  # Kubernetes before 1.22, or the pod is gone
        (refused(409, "Conflict"), True, False),  # another pod by now
    ],
)
async def test_a_pod_goes_unless_its_own_budget_keeps_it(
    answer: dict[str, Any] | Exception, goes: bool, is_deleted: bool
) -> None:
    door = Evicts(answer)
    assert await door.evict("n", "m-g0-0", uid="u", budget="m") is goes
    assert door.called[0] == ("post", "/Pod/n/m-g0-0/eviction")
    assert door.called[1:] == ([("delete", "/Pod/n/m-g0-0")] if is_deleted else [])

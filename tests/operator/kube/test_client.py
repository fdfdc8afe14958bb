"""API client: ownership, missing objects and objects of other owners."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.dynamic.exceptions import NotFoundError, api_exception
from operator_builders import a_deployment
from trimtab_operator.builders.labels import GROUP_LABEL, LEADER, ROLE_LABEL, WORKER, common_labels
from trimtab_operator.builders.rendezvous_secret import rendezvous_secret
from trimtab_operator.errors import NameTaken, NotYet
from trimtab_operator.kube.client import (
    API_ERRORS,
    MAX_CONCURRENT_CALLS,
    Cluster,
    belongs_to_deleted_owner,
    is_of_workload,
)


@pytest.mark.parametrize(
    ("name", "labels", "owner", "is_ours"),
    [
        ("m-g0-0", ("0", LEADER), ("StatefulSet", "m-g0", "u-g0"), True),
        ("m-g0-0", ("0", LEADER), ("StatefulSet", "m-g0", "made up"), False),
        ("m-g0-0", ("0", LEADER), ("StatefulSet", "m-g0", None), False),
        ("m-g0-w-3", ("0", WORKER), ("StatefulSet", "m-g0-w", "u-w"), True),
        ("m-g12-w-0", ("12", WORKER), ("StatefulSet", "m-g12-w", "gone"), True),  # its pod still drains
        ("m-facts-x", None, ("Job", "m-facts", "u-facts"), True),
        ("m-facts-x", None, ("Job", "m-facts", "made up"), False),
        ("m-g0-0", ("0", LEADER), ("StatefulSet", "other-g0", "u"), False),
        ("m-g0-0", ("0", LEADER), ("ReplicaSet", "m-g0", "u-g0"), False),
        ("m-g0-0", ("0", LEADER), None, False),  # anyone can set the operator's labels on a pod
        ("aaa-evil", ("0", LEADER), ("StatefulSet", "m-g0", "u-g0"), False),  # owner references can be copied, too
        ("m-g0-1", ("0", LEADER), ("StatefulSet", "m-g0", "u-g0"), False),
        ("m-g0-00", ("0", LEADER), ("StatefulSet", "m-g0", "u-g0"), False),
        ("m-g0-w-0", ("0", LEADER), ("StatefulSet", "m-g0-w", "u-w"), False),
        ("m-g7-0", ("0", LEADER), ("StatefulSet", "m-g7", "gone"), False),  # into another group
        ("m-g0-0", None, ("StatefulSet", "m-g0", "u-g0"), False),
    ],
)
def test_pod_identity_is_uid_name_and_group(
    name: str, labels: tuple[str, str] | None, owner: tuple[str, str, str | None] | None, is_ours: bool
) -> None:
    metadata: dict[str, Any] = {"name": name}
    if labels is not None:
        metadata["labels"] = {GROUP_LABEL: labels[0], ROLE_LABEL: labels[1]}
    if owner is not None:
        kind, owner_name, uid = owner
        reference = {"kind": kind, "name": owner_name, "controller": True} | ({} if uid is None else {"uid": uid})
        metadata["ownerReferences"] = [reference]
    uids = {"m-g0": "u-g0", "m-g0-w": "u-w", "m-facts": "u-facts"}
    makers = {key: {"metadata": {"name": key, "uid": uid}} for key, uid in uids.items()}
    assert is_of_workload({"metadata": metadata}, "m", makers) is is_ours


def test_pod_of_two_controllers_is_not_ours() -> None:
    owners = [{"kind": "StatefulSet", "name": name, "uid": "u", "controller": True} for name in ("m-g0", "m-g1")]
    metadata = {"name": "m-g0-0", "ownerReferences": owners, "labels": {GROUP_LABEL: "0", ROLE_LABEL: LEADER}}
    assert not is_of_workload({"metadata": metadata}, "m", {})


class Answers(Cluster):
    """API client with one response to all requests."""

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


async def test_listed_objects_have_their_kind() -> None:
    pod = {"metadata": {"namespace": "n", "name": "m-g0-0", "resourceVersion": "7"}}  # as in an answer to a list
    door = Answers({"kind": "PodList", "items": [pod]})
    known = await door.list("Pod", "n")
    assert known == [{"kind": "Pod", **pod}]
    assert await door.are_current(known)
    pod["metadata"]["resourceVersion"] = "8"
    door.answer = {"kind": "PodList", "items": [{"metadata": {**pod["metadata"], "resourceVersion": "9"}}]}
    assert not await door.are_current(known)


async def test_get_missing_object_returns_none() -> None:
    assert await Answers(not_found(a_status("m"))).get("Pod", "n", "m") is None


@pytest.mark.parametrize("body", ["404 page not found\n", None, "", "{}", "[]", '{"reason": "NotFound", "details": 1}'])
async def test_404_of_unserved_kind_is_raised(
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
    """API client with one stored object or none; records its requests. If not `makes_versioned`, the API server
    rejects creation with a resourceVersion.
    """

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


async def test_new_child_is_created_in_one_call() -> None:
    door = Keeps(None)
    await door.apply(SET, a_deployment(), is_new=True)
    assert door.asked == ["patch"]
    assert door.present is not None
    door.asked.clear()
    made = {**door.present}
    with pytest.raises(NameTaken):  # by a resource of another uid
        await door.apply({**SET, "spec": {}}, a_deployment(name="other"), is_new=True)
    assert (door.present, door.asked) == (made, ["patch", "get"])


async def test_concurrent_creation_is_not_overwritten() -> None:
    class Busy(Keeps):
        """The object is replaced after each read."""

        async def get(self, kind: str, namespace: str | None, name: str) -> dict[str, Any] | None:
            seen, self.present = self.present, owned_by(uid="u-other")
            return seen

    door = Busy(owned_by())
    assert door.present is not None
    door.present["metadata"]["resourceVersion"] = "3"
    with pytest.raises(NotYet):
        await door.apply(SET, a_deployment(), is_new=True)
    assert door.present == owned_by(uid="u-other")


async def test_create_without_version_on_older_api_server() -> None:
    door = Keeps(None, makes_versioned=False)
    await door.apply(SET, a_deployment(), is_new=True)
    assert door.asked == ["patch", "get", "patch"]
    assert door.present is not None
    door.asked, door.present = [], None
    await door.apply(SET, a_deployment(), is_new=True)
    assert door.asked == ["get", "patch"], "it is known by now"


async def test_other_create_error_is_raised() -> None:
    door = Answers(refused(422, "Invalid", 'StatefulSet.apps "m-g0" is invalid: spec.template: Invalid value'))
    with pytest.raises(API_ERRORS, match="Invalid value"):
        await door.apply(SET, a_deployment(), is_new=True)


def owned_by(**owner: Any) -> dict[str, Any]:
    reference = {"kind": "InferenceDeployment", "name": "m", "uid": "u-m", "controller": True, **owner}
    return {"metadata": {"name": "m-g0", "ownerReferences": [reference]}}


@pytest.mark.parametrize(
    ("present", "error"),
    [
        (owned_by(uid="u-before"), NotYet),  # deleted with its former owner
        (owned_by(name="another", uid="u-another"), NameTaken),
        (owned_by(kind="StatefulSet", uid="u-set"), NameTaken),
        ({"metadata": {"name": "m-g0"}}, NameTaken),
    ],
)
async def test_child_of_deleted_owner_is_awaited(present: dict[str, Any], error: type[Exception]) -> None:
    manifest = {"kind": "StatefulSet", "metadata": {"namespace": "n", "name": "m-g0"}}
    with pytest.raises(error):
        await Keeps(present).apply(manifest, a_deployment(), is_new=True)


async def test_existing_stateful_set_is_observed_first() -> None:
    """The watches are about to report it; without its labels they never would."""
    manifest = {"kind": "StatefulSet", "metadata": {"namespace": "n", "name": "m-g0"}}
    present = owned_by()
    await Keeps(present).apply(manifest, a_deployment(), is_new=True)
    present["metadata"]["labels"] = common_labels(a_deployment())
    with pytest.raises(NotYet):
        await Keeps(present).apply(manifest, a_deployment(), is_new=True)


def test_own_child_does_not_belong_to_deleted_owner() -> None:
    assert not belongs_to_deleted_owner(owned_by(), a_deployment())


@pytest.mark.parametrize(
    ("answer", "budgets"),
    [
        ({"resources": [{"name": "poddisruptionbudgets"}], "items": []}, ()),
        ({"resources": [{"name": "podsecuritypolicies"}]}, None),
        (not_found("404 page not found"), None),  # Kubernetes before 1.21
    ],
)
async def test_budgets_are_listed_only_if_served(answer: dict[str, Any] | Exception, budgets: tuple[()] | None) -> None:
    found = await Answers(answer)._optional_children(a_deployment())
    assert found.get("PodDisruptionBudget") == budgets


async def test_optional_children_are_cached_for_a_minute() -> None:
    door = Answers({"resources": [{"name": "poddisruptionbudgets"}], "items": []})
    first = await door._optional_children(a_deployment())
    assert await door._optional_children(a_deployment()) is first
    manifest = {"kind": "PodDisruptionBudget", "metadata": {"namespace": "n", "name": "m"}}
    await door.apply(manifest, a_deployment(), is_new=False)
    assert await door._optional_children(a_deployment()) is not first


class Slow(Cluster):
    """API client in which only Lease requests complete."""

    def __init__(self) -> None:
        super().__init__()
        self.under_way = 0

    def _path(self, kind: str, namespace: str | None, name: str | None) -> str:
        group = "apis/coordination.k8s.io/v1/" if kind == "Lease" else "api/v1/"
        return f"/{group}{kind}/{namespace}/{name}"

    async def _send(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        if "Lease" not in path:
            self.under_way += 1
            await asyncio.Event().wait()
        return {"kind": "Lease"}


async def test_lease_call_bypasses_concurrency_limit() -> None:
    cluster = Slow()
    burst = [asyncio.create_task(cluster.get("Pod", "n", f"m-{number}")) for number in range(1000)]
    await asyncio.sleep(0)
    assert await cluster.get("Lease", "n", "trimtab") == {"kind": "Lease"}
    assert cluster.under_way == MAX_CONCURRENT_CALLS
    for task in burst:
        task.cancel()
    await asyncio.gather(*burst, return_exceptions=True)


class Evicts(Answers):
    """API client with one response to evictions; records deletions."""

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
    """Return the cause as Kubernetes words it."""
    message = f"The disruption budget {budget} needs 2 healthy pods and has 2 currently"
    return {"causes": [{"reason": "DisruptionBudget", "message": message}]}


@pytest.mark.parametrize(
    ("answer", "goes", "is_deleted"),
    [
        ({"kind": "Status", "status": "Success"}, True, False),
        (refused(429, "TooManyRequests", **forbidding("m")), False, False),
        (refused(429, "TooManyRequests", retryAfterSeconds=1), False, False),  # the API server is busy
        (refused(429, "TooManyRequests", **forbidding("m-2")), True, True),  # of another owner, which does not block
        (refused(500, "InternalError"), True, True),  # two budgets for one pod
        (refused(403, "Forbidden"), True, True),
        (refused(404, "NotFound"), True, True),  # Kubernetes before 1.22, or the pod is gone
        (refused(409, "Conflict"), True, False),  # another pod by now
    ],
)
async def test_evict_is_blocked_by_own_budget_only(
    answer: dict[str, Any] | Exception, goes: bool, is_deleted: bool
) -> None:
    door = Evicts(answer)
    assert await door.evict("n", "m-g0-0", uid="u", budget="m") is goes
    assert door.called[0] == ("post", "/Pod/n/m-g0-0/eviction")
    assert door.called[1:] == ([("delete", "/Pod/n/m-g0-0")] if is_deleted else [])


async def test_rendezvous_secret_has_one_manager_and_owner_per_resource() -> None:
    sent: list[tuple[str, dict[str, Any]]] = []

    class Recorder(Cluster):
        async def _call(self, method: str, path: str, **options: Any) -> dict[str, Any]:
            sent.append((path, options))
            return {}

    for name in ("m", "other"):
        deployment = a_deployment(name=name)
        await Recorder().apply(rendezvous_secret(deployment, token=name), deployment, is_new=True)
    assert {path for path, _ in sent} == {"/api/v1/namespaces/n/secrets/trimtab-rendezvous"}
    assert [options["query"]["fieldManager"] for _, options in sent] == ["trimtab-operator-m", "trimtab-operator-other"]
    assert [list(options["body"]["data"]) for _, options in sent] == [["m"], ["other"]]
    owners = [options["body"]["metadata"]["ownerReferences"][0] for _, options in sent]
    assert [(owner["uid"], owner["controller"]) for owner in owners] == [("u-m", False), ("u-other", False)]

"""The only door to the API server: about ten verbs on `kube/http.py`. No rule lives here.

Children are written by server-side apply under the field manager `trimtab-operator`, `/status` under `trimtab-status`;
the user's `spec` is never written. Ownership is added here and only here, so deleting a resource leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import datetime
from typing import Any

import aiohttp
import kubernetes.aio.client
import kubernetes.aio.config
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.dynamic.exceptions import ConflictError, DynamicApiError, NotFoundError

from trimtab_operator.builders.labels import DEPLOYMENT_LABEL, MANAGED_BY, children_selector, rendezvous_secret_name
from trimtab_operator.errors import MisconfiguredOperator, NameTaken, NotLeading, NotYet
from trimtab_operator.kube.http import JSON, ApiHttp, read
from trimtab_operator.kube.informer_cache import Cache
from trimtab_operator.kube.rbac import Right, missing_right
from trimtab_operator.layout import layout_of
from trimtab_operator.observed.actions import MAX_EVENT_MESSAGE
from trimtab_operator.observed.groups import ObservedChildren, is_worker
from trimtab_operator.resource.manifest import Manifest
from trimtab_operator.resource.spec import GROUP, KIND, PLURAL, VERSION, InferenceDeployment
from trimtab_operator.resource.time import timestamp

logger = logging.getLogger(__name__)

FIELD_MANAGER = "trimtab-operator"
STATUS_MANAGER = "trimtab-status"
REQUEST_SECONDS = 30.0  # no request to the API server takes longer, but for a watch
REQUEST_TIMEOUT = aiohttp.ClientTimeout(total=REQUEST_SECONDS)
CONNECT_SECONDS = 10.0
MAX_CALLS_AT_ONCE = 32  # of the connections that there are; the Lease waits for none of them

API_ERRORS = (DynamicApiError, ApiException)  # what the API server answered; connection trouble is an OSError
RESOURCES: Mapping[str, tuple[str, str, str, bool]] = {  # kind → group, version, plural, namespaced
    KIND: (GROUP, VERSION, PLURAL, True),
    "Service": ("", "v1", "services", True),
    "StatefulSet": ("apps", "v1", "statefulsets", True),
    "ConfigMap": ("", "v1", "configmaps", True),
    "Job": ("batch", "v1", "jobs", True),
    "Pod": ("", "v1", "pods", True),
    "ServiceAccount": ("", "v1", "serviceaccounts", True),
    "PodDisruptionBudget": ("policy", "v1", "poddisruptionbudgets", True),
    "NetworkPolicy": ("networking.k8s.io", "v1", "networkpolicies", True),
    "PodMonitor": ("monitoring.coreos.com", "v1", "podmonitors", True),
    "PrometheusRule": ("monitoring.coreos.com", "v1", "prometheusrules", True),
    "Event": ("", "v1", "events", True),
    "Secret": ("", "v1", "secrets", True),
    "Node": ("", "v1", "nodes", False),
    "Lease": ("coordination.k8s.io", "v1", "leases", True),
    "ValidatingWebhookConfiguration": (
        "admissionregistration.k8s.io",
        "v1",
        "validatingwebhookconfigurations",
        False,
    ),
}

OF_NOTHING = "1"  # etcd counts from 1, when it is empty: no object has this version
NO_VERSION_PLEASE = "should not be set on objects to be created"
LEASES = "/apis/coordination.k8s.io/"
OPTIONAL = ("PodDisruptionBudget", "NetworkPolicy", "PodMonitor", "PrometheusRule")  # engines do without them
OPTIONAL_FRESH_SECONDS = 60.0  # what only guards and watches engines is looked at once a minute
SERVED_FRESH_SECONDS = 300.0  # a kind that is installed later is found within minutes
RENDEZVOUS_SECRET_TTL_SECONDS = 60.0  # a Secret is never listed nor watched: it is read once a minute by whom it concerns
CHILDREN = ("Service", "StatefulSet", "ConfigMap", "Pod", "Job", "ServiceAccount")  # what every look reads
PAGE = 500  # objects of one answer

NOTHING_ASKED: Mapping[str, str | None] = {}
FORBIDDEN, NOT_FOUND, INVALID, TOO_MANY = 403, 404, 422, 429


def is_forbidden(error: BaseException) -> bool:
    """Whether the API server said that the operator has no right to this: not every installation gives all of them."""
    return getattr(error, "status", None) == FORBIDDEN


def is_invalid(error: BaseException) -> bool:
    """Whether the API server said that a value cannot be."""
    return getattr(error, "status", None) == INVALID


class Cluster:
    """One connection to one API server. Use it as an async context manager. `cache`, where there is one, is told of
    what is written; `may_write` is asked before every request that could change anything."""

    def __init__(self) -> None:
        self.cache: Cache | None = None
        self.may_write: Callable[[], bool] = lambda: True
        self._stack = AsyncExitStack()
        self._gate = asyncio.Semaphore(MAX_CALLS_AT_ONCE)
        self._api: ApiHttp | None = None
        self._served: dict[str, tuple[float, bool]] = {}
        self._optional: dict[str, tuple[float, Mapping[str, tuple[Manifest, ...]]]] = {}
        self._rendezvous_secrets: dict[str, tuple[float, tuple[Manifest, ...]]] = {}
        self._unversioned: set[str] = set()
        """Kinds of which this API server makes none whose version is given, such as Services of Kubernetes 1.20."""

    async def __aenter__(self) -> Cluster:
        """Connect: from inside a pod by its service account, else by KUBECONFIG. Raises MisconfiguredOperator."""
        configuration = kubernetes.aio.client.Configuration()
        try:
            _untyped(kubernetes.aio.config.load_incluster_config)(client_configuration=configuration)
        except kubernetes.aio.config.ConfigException:
            try:
                await _untyped(kubernetes.aio.config.load_kube_config)(client_configuration=configuration)
            except (kubernetes.aio.config.ConfigException, OSError) as error:
                raise MisconfiguredOperator(
                    f"no cluster: not in a pod, and KUBECONFIG cannot be read ({error}); set KUBECONFIG"
                ) from error
        return await self.connect(configuration)

    async def connect(self, configuration: Any) -> Cluster:
        """Connect as the client library is configured."""
        self._api = await self._stack.enter_async_context(ApiHttp(configuration))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    # --- verbs --------------------------------------------------------------------------------------------------------

    async def get(self, kind: str, namespace: str | None, name: str) -> dict[str, Any] | None:
        """One object, or None when the API server says that there is none."""
        try:
            return await self._call("get", self._path(kind, namespace, name))
        except NotFoundError as error:
            if not _speaks_of(error, name):
                raise
            return None

    async def list(
        self, kind: str, namespace: str | None, *, selector: str | None = None, fields: str | None = None
    ) -> list[dict[str, Any]]:
        """Every object of a kind, in one namespace or in all, by its labels (`selector`) or fields."""
        path = self._path(kind, namespace, None)
        found = await self._call("get", path, query={"labelSelector": selector, "fieldSelector": fields})
        return [{"kind": kind, **item} for item in found.get("items") or ()]  # lists say it once

    async def list_at(
        self, kind: str, namespace: str | None, *, selector: str | None = None
    ) -> tuple[tuple[dict[str, Any], ...], str]:
        """Every object of a kind, page by page, and the version at which that was all."""
        path, next_page = self._path(kind, namespace, None), None
        found: tuple[dict[str, Any], ...] = ()
        while True:
            query = {"labelSelector": selector, "limit": str(PAGE), "continue": next_page}
            page = await self._call("get", path, query=query)
            found += tuple(page.get("items") or ())
            next_page = page["metadata"].get("continue")
            if not next_page:
                return found, str(page["metadata"]["resourceVersion"])

    @asynccontextmanager
    async def watching(
        self, kind: str, namespace: str | None, *, selector: str | None, version: str, seconds: int
    ) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        """The events of a kind after a version, for so many seconds, as the API server words them."""
        assert self._api is not None
        response = await self._api.request(
            "get",
            self._path(kind, namespace, None),
            query=_named(
                {
                    "watch": "true",
                    "allowWatchBookmarks": "true",
                    "labelSelector": selector,
                    "resourceVersion": version,
                    "timeoutSeconds": str(seconds),
                }
            ),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
        )
        try:
            yield _events(response)
        finally:
            response.close()

    async def create(self, manifest: Manifest) -> dict[str, Any]:
        """Create; raises ConflictError when it exists."""
        path = self._path(manifest["kind"], manifest["metadata"].get("namespace"), None)
        return await self._call("post", path, body=manifest)

    async def replace(self, manifest: Manifest) -> dict[str, Any]:
        """Replace; with metadata.resourceVersion, only if nobody else wrote meanwhile (ConflictError)."""
        metadata = manifest["metadata"]
        path = self._path(manifest["kind"], metadata.get("namespace"), metadata["name"])
        return await self._call("put", path, body=manifest)

    async def patch(self, kind: str, namespace: str | None, name: str, body: Any) -> dict[str, Any]:
        """Strategic merge patch (lists merge by their keys); a list of operations is a JSON patch."""
        kind_of_patch = "json-patch" if isinstance(body, list) else "strategic-merge-patch"
        path = self._path(kind, namespace, name)
        return await self._call("patch", path, body=body, content_type=f"application/{kind_of_patch}+json")

    async def apply(self, manifest: Manifest, owner: InferenceDeployment, *, is_new: bool) -> None:
        """Server-side apply of a child. A new one must not exist under somebody else's ownership (NameTaken)."""
        metadata = {**manifest["metadata"], "ownerReferences": [owner_reference(owner)]}
        body = {**manifest, "metadata": metadata}
        if manifest["kind"] not in OPTIONAL:
            self._rendezvous_secrets.pop(owner.uid, None)
            self._wrote(body, owner, await self._made_or_changed(body, owner, is_new=is_new))
            return
        self._optional.pop(owner.uid, None)
        try:
            self._wrote(body, owner, await self._made_or_changed(body, owner, is_new=is_new))
        except API_ERRORS as error:
            if missing_right(error) is None:
                raise
            self._do_without(str(manifest["kind"]), missing_right(error))

    async def _made_or_changed(self, body: Manifest, owner: InferenceDeployment, *, is_new: bool) -> Manifest:
        """Apply a child; a new one in one call, which makes it only if there is no such object. What is there already
        is looked at before it is written over: ADR-0076."""
        if not is_new:
            return await self._apply(body, FIELD_MANAGER)
        kind = str(body["kind"])
        if kind not in self._unversioned:
            try:
                return await self._apply(_of_version(body, OF_NOTHING), FIELD_MANAGER)
            except ConflictError:
                pass
            except API_ERRORS as error:
                if NO_VERSION_PLEASE not in str(getattr(error, "body", None)):
                    raise
                self._unversioned.add(kind)
        present = await self._looked_at(body, owner)
        if present is not None:
            version = present["metadata"].get("resourceVersion")
        else:
            version = None if kind in self._unversioned else OF_NOTHING
        try:
            return await self._apply(_of_version(body, version), FIELD_MANAGER)
        except ConflictError as error:
            raise NotYet(f"{kind} {body['metadata']['name']} changes; it is looked at again") from error

    async def _looked_at(self, manifest: Manifest, owner: InferenceDeployment) -> Manifest | None:
        """The object of this name, if there is one. Raises NameTaken or NotYet where it is not to be written over."""
        metadata = manifest["metadata"]
        present = await self.get(manifest["kind"], metadata["namespace"], metadata["name"])
        if present is None:
            return None
        if is_of_a_former_namesake(present, owner):
            raise NotYet(
                f"{manifest['kind']} {metadata['name']} belongs to the InferenceDeployment that had this name before; "
                "it is waited for until Kubernetes has removed it"
            )
        if not is_owned(present, owner.uid):
            raise NameTaken(
                f"{manifest['kind']} {metadata['name']} exists and belongs to somebody else; "
                "delete it, or give the InferenceDeployment another name"
            )
        if manifest["kind"] == "StatefulSet" and _is_labelled(present, owner):
            raise NotYet(f"StatefulSet {metadata['name']} is there already; it is looked at again")
        return present

    async def apply_status(self, deployment: InferenceDeployment, status: Mapping[str, Any]) -> Mapping[str, Any]:
        """Replace what we said in `/status`, and return what became of it: an API server keeps what its schema knows.
        The uid keeps a namesake that was created meanwhile from getting it."""
        body = {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": KIND,
            "metadata": {"name": deployment.name, "namespace": deployment.namespace, "uid": deployment.uid},
            "status": status,
        }
        answer = await self._apply(body, STATUS_MANAGER, subresource="/status")
        self._wrote(body, deployment, answer)
        return answer.get("status") or {}

    async def delete(self, kind: str, namespace: str, name: str, *, uid: str, grace_seconds: int | None = None) -> None:
        """Delete, if it still is the object with this uid; one that is gone already is fine.

        With `grace_seconds` 0 a pod is gone at once, whether or not its node answers.
        """
        body: dict[str, Any] = {"propagationPolicy": "Background", "preconditions": {"uid": uid}}
        if grace_seconds is not None:
            body["gracePeriodSeconds"] = grace_seconds
        if kind in OPTIONAL:
            self._optional.clear()  # an administrator has changed the installation: all are looked at again
        try:
            await self._call("delete", self._path(kind, namespace, name), body=body)
        except (NotFoundError, ConflictError):
            return
        if self.cache is not None:
            self.cache.deleted(kind, namespace, name, uid)

    async def evict(self, namespace: str, name: str, *, uid: str, budget: str) -> bool:
        """Evict a pod, if it still is the one with this uid; False where the PodDisruptionBudget `budget` does not let
        it go now. Another's budget is no reason to keep it: where only that one refuses, or the API server evicts
        nobody in this version, or not for this operator, the pod is deleted."""
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": name, "namespace": namespace},
            "deleteOptions": {"preconditions": {"uid": uid}},
        }
        try:
            await self._call("post", self._path("Pod", namespace, name) + "/eviction", body=body)
        except ConflictError:
            return True
        except API_ERRORS as error:
            refusing = _refusing_budgets(error)
            if refusing is not None and (not refusing or any(budget in words.split() for words in refusing)):
                return False
            await self.delete("Pod", namespace, name, uid=uid)
            return True
        if self.cache is not None:
            self.cache.deleted("Pod", namespace, name, uid)
        return True

    # --- compositions -------------------------------------------------------------------------------------------------

    async def observe(self, deployment: InferenceDeployment) -> ObservedChildren:
        """The children of a resource as the API server gives them now: those that it owns, and its groups' pods."""
        selector = children_selector(deployment.name)
        found = await asyncio.gather(*(self.list(kind, deployment.namespace, selector=selector) for kind in CHILDREN))
        lists = dict(zip(CHILDREN, found, strict=True))
        secrets = await self._read_rendezvous_secret(deployment, lists["StatefulSet"])
        return _observed(deployment, lists, secrets, await self._optional_children(deployment))

    async def recall(self, deployment: InferenceDeployment, cache: Cache) -> ObservedChildren | None:
        """The children of a resource as watches have told of them; None where one of them says nothing."""
        namespace, owner = deployment.namespace, (deployment.namespace, deployment.name)
        if not all(cache.is_heard(kind, namespace) for kind in CHILDREN):
            return None
        optional = {}
        for kind in OPTIONAL:
            if cache.is_not_served(kind, namespace) or self._is_done_without(kind):
                continue
            if not cache.is_heard(kind, namespace):
                return None
            optional[kind] = owned(cache.of(kind, owner), deployment.uid)
        lists = {kind: cache.of(kind, owner) for kind in CHILDREN}
        secrets = await self._cached_rendezvous_secret(deployment, lists["StatefulSet"])
        return _observed(deployment, lists, secrets, optional)

    async def are_current(self, manifests: Iterable[Manifest]) -> bool:
        """Whether objects are still as they are known, each by one read."""
        return all(await asyncio.gather(*map(self._is_current, manifests)))

    async def _is_current(self, known: Manifest) -> bool:
        metadata = known["metadata"]
        name, namespace = metadata["name"], metadata["namespace"]
        if known["kind"] == "Pod":  # there is a right to list them, and none to get one
            present = next(iter(await self.list("Pod", namespace, fields=f"metadata.name={name}")), None)
        else:
            present = await self.get(known["kind"], namespace, name)
        return present is not None and present["metadata"]["resourceVersion"] == metadata["resourceVersion"]

    async def _optional_children(self, deployment: InferenceDeployment) -> Mapping[str, tuple[Manifest, ...]]:
        """The children of a resource of kinds that can be done without, as they were at most a minute ago; right after
        one of them was written, as they are."""
        now = time.monotonic()
        read_at, known = self._optional.get(deployment.uid, (now, None))
        if known is None or now - read_at > OPTIONAL_FRESH_SECONDS:
            found = [(kind, await self._optional_of(kind, deployment)) for kind in OPTIONAL]
            known = {kind: children for kind, children in found if children is not None}
            stale = now - 2 * OPTIONAL_FRESH_SECONDS  # of resources that are gone
            self._optional = {uid: seen for uid, seen in self._optional.items() if seen[0] > stale}
            self._optional[deployment.uid] = now, known
        return known

    async def _optional_of(self, kind: str, deployment: InferenceDeployment) -> tuple[Manifest, ...] | None:
        """None where the cluster does not serve the kind, or the operator has no right to it."""
        if not await self.serves(kind):
            return None
        try:
            found = await self.list(kind, deployment.namespace, selector=children_selector(deployment.name))
        except API_ERRORS as error:
            if not is_forbidden(error) and getattr(error, "status", None) != NOT_FOUND:
                raise
            self._do_without(kind, missing_right(error))
            return None
        return owned(found, deployment.uid)

    def _do_without(self, kind: str, right: Right | None) -> None:
        """Make none of a kind for some minutes: engines run without it."""
        self._served[kind] = time.monotonic(), False
        logger.warning("no %s is made: the operator has no right to %s", kind, right)

    def _is_done_without(self, kind: str) -> bool:
        """Whether none of a kind is made for now: there was no right to."""
        asked_at, is_served = self._served.get(kind, (0.0, True))
        return not is_served and time.monotonic() - asked_at <= SERVED_FRESH_SECONDS

    async def serves(self, kind: str) -> bool:
        """Whether the API server knows a kind in the version that is used here."""
        now = time.monotonic()
        asked_at, is_served = self._served.get(kind, (now, None))
        if is_served is None or now - asked_at > SERVED_FRESH_SECONDS:
            is_served = await self._discovers(kind)
            self._served[kind] = now, is_served
        return is_served

    async def _discovers(self, kind: str) -> bool:
        group, version, plural, _ = RESOURCES[kind]
        try:
            known = await self._call("get", f"/apis/{group}/{version}")
        except NotFoundError:
            return False
        except API_ERRORS as error:
            if not is_forbidden(error):
                raise
            return False
        return any(resource.get("name") == plural for resource in known.get("resources") or [])

    async def _read_rendezvous_secret(
        self, deployment: InferenceDeployment, stateful_sets: Iterable[Manifest]
    ) -> tuple[Manifest, ...]:
        """The Secret of a resource whose replicas span pods, or did; by its name, as Secrets are never listed."""
        if layout_of(deployment.spec).pods == 1 and not any(map(is_worker, stateful_sets)):
            return ()
        found = await self.get("Secret", deployment.namespace, rendezvous_secret_name(deployment))
        return () if found is None else (found,)

    async def _cached_rendezvous_secret(
        self, deployment: InferenceDeployment, stateful_sets: Iterable[Manifest]
    ) -> tuple[Manifest, ...]:
        """The same as it was at most a minute ago, and not before it was last written here."""
        now = time.monotonic()
        read_at, known = self._rendezvous_secrets.get(deployment.uid, (now, None))
        if known is None or now - read_at > RENDEZVOUS_SECRET_TTL_SECONDS:
            known = await self._read_rendezvous_secret(deployment, stateful_sets)
            if known:  # one that is not there is looked for each time
                self._rendezvous_secrets[deployment.uid] = now, known
        return known

    async def event(
        self, deployment: InferenceDeployment, *, kind: str, reason: str, message: str, now: datetime, key: str = ""
    ) -> None:
        """Record a core/v1 Event (every Kubernetes serves it). The same one again raises its count instead.

        `kind` is Normal or Warning; `key` tells events apart whose text is equal.
        """
        digest = hashlib.sha256(f"{deployment.uid}|{kind}|{reason}|{message}|{key}".encode()).hexdigest()[:16]
        name = f"{deployment.name}.{digest}"
        try:
            await self.create(_event(deployment, name, kind, reason, message, now))
        except ConflictError:
            present = await self.get("Event", deployment.namespace, name)
            count = int((present or {}).get("count") or 1) + 1
            body = {"count": count, "lastTimestamp": timestamp(now)}
            await self.patch("Event", deployment.namespace, name, body)

    async def secret(self, namespace: str, name: str, fresh: Mapping[str, bytes]) -> dict[str, bytes]:
        """The data of a Secret, created with `fresh` when there is none. Two creators end up with the same data."""
        manifest = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": name, "namespace": namespace, "labels": {"app.kubernetes.io/part-of": "trimtab"}},
            "type": "Opaque",
            "data": _encoded(fresh),
        }
        present = await self.get("Secret", namespace, name)
        if present is None:
            try:
                present = await self.create(manifest)
            except ConflictError:
                present = await self.get("Secret", namespace, name)
        data = (present or {}).get("data") or {}
        return {key: base64.b64decode(value) for key, value in data.items()}

    async def replace_secret(
        self, namespace: str, name: str, before: Mapping[str, bytes], after: Mapping[str, bytes]
    ) -> bool:
        """Replace all data of a Secret that exists, if it is still what it was `before`; whether it was."""
        is_as_before = {"op": "test", "path": "/data", "value": _encoded(before)}
        body = [*([is_as_before] if before else []), {"op": "add", "path": "/data", "value": _encoded(after)}]
        try:
            await self.patch("Secret", namespace, name, body)
        except API_ERRORS as error:
            if not is_invalid(error):
                raise
            return False
        return True

    # --- plumbing -----------------------------------------------------------------------------------------------------

    def _path(self, kind: str, namespace: str | None, name: str | None) -> str:
        group, version, plural, namespaced = RESOURCES[kind]
        parts = ["/apis", group, version] if group else ["/api", version]
        parts += ["namespaces", namespace] if namespaced and namespace else []
        return "/".join([*parts, plural, *([name] if name else [])])

    def _wrote(self, body: Manifest, owner: InferenceDeployment, answer: Manifest) -> None:
        """Let the cache know what is still to be heard of."""
        kind = str(body["kind"])
        if self.cache is not None and kind != "Secret" and "metadata" in answer:
            self.cache.wrote(kind, (owner.namespace, owner.name), answer)

    async def _apply(self, manifest: Manifest, manager: str, *, subresource: str = "") -> dict[str, Any]:
        metadata = manifest["metadata"]
        return await self._call(
            "patch",
            self._path(manifest["kind"], metadata["namespace"], metadata["name"]) + subresource,
            body=manifest,
            content_type="application/apply-patch+yaml",
            query={"fieldManager": manager, "force": "true"},
        )

    async def _call(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        """Make one request. Those of a thousand loops wait for each other here, and the Lease for none of them: else a
        burst of work would cost the right to do it."""
        if path.startswith(LEASES):
            return await self._answer(method, path, **options)
        async with self._gate:
            return await self._answer(method, path, **options)

    def _must_be_ours_to_write(self) -> None:
        """Raise NotLeading once writing is another process's: what was decided may have waited here, or read first."""
        if not self.may_write():
            raise NotLeading("the Lease has ended; another process acts now")

    async def _answer(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str | None] = NOTHING_ASKED,
        body: Any = None,
        content_type: str = JSON,
    ) -> dict[str, Any]:
        assert self._api is not None
        response = await self._api.request(
            method,
            path,
            query=_named(query),
            body=body,
            content_type=content_type,
            timeout=REQUEST_TIMEOUT,
            check=None if method == "get" else self._must_be_ours_to_write,
        )
        answer: dict[str, Any] = read(await response.read())
        return answer


def _named(query: Mapping[str, str | None]) -> dict[str, str]:
    """What of a query says something."""
    return {name: value for name, value in query.items() if value is not None}


async def _events(response: Any) -> AsyncIterator[dict[str, Any]]:
    """The lines of a watch; a line may be longer than any buffer."""
    rest = b""
    async for chunk in response.content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield read(line)


def _observed(
    deployment: InferenceDeployment,
    lists: Mapping[str, Sequence[Manifest]],
    secrets: Iterable[Manifest],
    optional: Mapping[str, tuple[Manifest, ...]],
) -> ObservedChildren:
    """What of these objects belongs to a resource: labels are anybody's, ownership is not."""
    stateful_sets, jobs = owned(lists["StatefulSet"], deployment.uid), owned(lists["Job"], deployment.uid)
    makers = {m["metadata"]["name"]: str(m["metadata"]["uid"]) for m in (*stateful_sets, *jobs)}
    return ObservedChildren(
        services=owned(lists["Service"], deployment.uid),
        stateful_sets=stateful_sets,
        config_maps=owned(lists["ConfigMap"], deployment.uid),
        pods=tuple(pod for pod in lists["Pod"] if is_of_workload(pod, deployment.name, makers)),
        jobs=jobs,
        accounts=owned(lists["ServiceAccount"], deployment.uid),
        secrets=owned(secrets, deployment.uid),
        optional=optional,
    )


def _untyped(function: Any) -> Any:
    """The client library has no annotations; what it returns is checked where it enters."""
    return function


def owner_reference(owner: InferenceDeployment) -> dict[str, Any]:
    """Makes a child go with its owner. It does not block the owner's deletion: that would need more rights."""
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": KIND,
        "name": owner.name,
        "uid": owner.uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }


def is_owned(manifest: Manifest, uid: str) -> bool:
    references = manifest["metadata"].get("ownerReferences") or []
    return any(reference.get("uid") == uid and reference.get("controller") for reference in references)


def _is_labelled(manifest: Manifest, owner: InferenceDeployment) -> bool:
    """Whether watches tell of a child of this owner, so that it is seen sooner or later. Labels may be lost."""
    labels = manifest["metadata"].get("labels") or {}
    return bool(labels.get(DEPLOYMENT_LABEL) == owner.name and labels.get("app.kubernetes.io/managed-by") == MANAGED_BY)


def is_of_a_former_namesake(manifest: Manifest, owner: InferenceDeployment) -> bool:
    """Whether a child belongs to a resource of the same name that was deleted: it goes with that one."""
    references = manifest["metadata"].get("ownerReferences") or []
    return any(
        (reference.get("kind"), reference.get("name")) == (KIND, owner.name) and reference.get("uid") != owner.uid
        for reference in references
        if reference.get("controller")
    )


def _of_version(manifest: Manifest, version: str | None) -> Manifest:
    """A manifest that is applied to an object of this version alone; None: to whatever there is."""
    if version is None:
        return manifest
    return {**manifest, "metadata": {**manifest["metadata"], "resourceVersion": version}}


def _speaks_of(error: NotFoundError, name: str) -> bool:
    """Whether a 404 says that the object is not there. An API server that does not serve the kind yet, as it starts,
    answers 404 as well, in other words."""
    try:
        said = json.loads(error.body or "")
        return bool(said["reason"] == "NotFound" and said["details"]["name"] == name)
    except (ValueError, TypeError, KeyError):
        return False


def _refusing_budgets(error: BaseException) -> tuple[str, ...] | None:
    """What an API server that evicts nobody now says of the budgets that forbid it: none where it is only busy. None:
    it refused for another reason."""
    if getattr(error, "status", None) != TOO_MANY:
        return None
    try:
        causes = json.loads(getattr(error, "body", None) or "{}")["details"]["causes"]
        return tuple(str(cause["message"]) for cause in causes if cause["reason"] == "DisruptionBudget")
    except (ValueError, TypeError, KeyError):
        return ()


def is_of_workload(pod: Manifest, name: str, makers: Mapping[str, str]) -> bool:
    """Whether a pod was made for one of the resource's StatefulSets or its Job.

    Labels are anybody's, and so is the name of an owner; the leader of a group is sent the admin token. `makers` are
    the uids of those that there are, by name. One that is gone by now may leave a pod that still drains.
    """
    for reference in pod["metadata"].get("ownerReferences") or []:
        kind, owner = reference.get("kind"), str(reference.get("name"))
        is_group = kind == "StatefulSet" and re.fullmatch(rf"{re.escape(name)}-g\d+(-w)?", owner) is not None
        if reference.get("controller") and (is_group or (kind == "Job" and owner == f"{name}-facts")):
            return owner not in makers or str(reference.get("uid")) == makers[owner]
    return False


def owned(manifests: Iterable[Manifest], uid: str) -> tuple[Manifest, ...]:
    return tuple(manifest for manifest in manifests if is_owned(manifest, uid))


def _encoded(data: Mapping[str, bytes]) -> dict[str, str]:
    return {key: base64.b64encode(value).decode() for key, value in data.items()}


def _event(
    deployment: InferenceDeployment, name: str, kind: str, reason: str, message: str, now: datetime
) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": deployment.namespace},
        "involvedObject": {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": KIND,
            "name": deployment.name,
            "namespace": deployment.namespace,
            "uid": deployment.uid,
        },
        "type": kind,
        "reason": reason,
        "message": message[:MAX_EVENT_MESSAGE],
        "source": {"component": FIELD_MANAGER},
        "reportingComponent": FIELD_MANAGER,
        "firstTimestamp": timestamp(now),
        "lastTimestamp": timestamp(now),
        "count": 1,
    }

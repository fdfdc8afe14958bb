"""Client of the API server: the only module that sends requests to it, through `kube/http.py`. It contains no
decisions.

Children are written by server-side apply with the field manager `trimtab-operator`, `/status` with `trimtab-status`.
The user's `spec` is never written. Owner references are added only here, so deleting a resource deletes all its
children.
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

from trimtab_operator.builders.labels import (
    DEPLOYMENT_LABEL,
    GROUP_LABEL,
    LEADER,
    MANAGED_BY,
    RENDEZVOUS_SECRET_NAME,
    ROLE_LABEL,
    WORKER,
    children_selector,
    router_name_of,
)
from trimtab_operator.errors import MisconfiguredOperator, NameTaken, NotLeading, NotYet
from trimtab_operator.kube.http import JSON, ApiHttp, OnResponse, ignore_response, parse_json
from trimtab_operator.kube.informer_cache import Cache
from trimtab_operator.kube.rbac import MissingPermission, missing_permission
from trimtab_operator.layout import layout_of
from trimtab_operator.observed.actions import MAX_EVENT_MESSAGE
from trimtab_operator.observed.groups import ObservedChildren, is_worker
from trimtab_operator.resource.manifest import Manifest
from trimtab_operator.resource.spec import GROUP, KIND, PLURAL, VERSION, InferenceDeployment
from trimtab_operator.resource.time import timestamp

logger = logging.getLogger(__name__)

FIELD_MANAGER = "trimtab-operator"
STATUS_MANAGER = "trimtab-status"
REQUEST_SECONDS = 30.0  # of every request except a watch
REQUEST_TIMEOUT = aiohttp.ClientTimeout(total=REQUEST_SECONDS)
CONNECT_SECONDS = 10.0
MAX_CONCURRENT_CALLS = 32  # of all connections; Lease calls are not limited

API_ERRORS = (DynamicApiError, ApiException)  # responses of the API server; connection errors are OSError
RESOURCES: Mapping[str, tuple[str, str, str, bool]] = {  # kind → group, version, plural, namespaced
    KIND: (GROUP, VERSION, PLURAL, True),
    "Service": ("", "v1", "services", True),
    "StatefulSet": ("apps", "v1", "statefulsets", True),
    "Deployment": ("apps", "v1", "deployments", True),
    "ConfigMap": ("", "v1", "configmaps", True),
    "Job": ("batch", "v1", "jobs", True),
    "Pod": ("", "v1", "pods", True),
    "ServiceAccount": ("", "v1", "serviceaccounts", True),
    "RoleBinding": ("rbac.authorization.k8s.io", "v1", "rolebindings", True),
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

NEVER_USED_VERSION = "1"  # etcd revision 1 is the empty store: no object has this version
VERSION_NOT_ALLOWED_MESSAGE = "should not be set on objects to be created"
LEASES = "/apis/coordination.k8s.io/"
OPTIONAL = (  # engines run without them
    "PodDisruptionBudget",
    "NetworkPolicy",
    "PodMonitor",
    "PrometheusRule",
    "RoleBinding",
    "Deployment",
)
OPTIONAL_FRESH_SECONDS = 60.0  # protection and monitoring objects are read once a minute
SERVED_FRESH_SECONDS = 300.0  # until a new CRD is noticed
RENDEZVOUS_SECRET_TTL_SECONDS = 60.0  # Secrets are never listed or watched, but read by name once a minute
CHILDREN = ("Service", "StatefulSet", "ConfigMap", "Pod", "Job", "ServiceAccount")  # read at each reconcile
PAGE_SIZE = 500  # objects per response

NO_QUERY: Mapping[str, str | None] = {}
BAD_REQUEST, CONFLICT, INTERNAL_ERROR = 400, 409, 500
UNAUTHORIZED, FORBIDDEN, NOT_FOUND, INVALID, TOO_MANY, UNAVAILABLE = 401, 403, 404, 422, 429, 503


def is_forbidden(error: BaseException) -> bool:
    """Return True if the operator lacks the permission (403): not every installation grants all of them."""
    return getattr(error, "status", None) == FORBIDDEN


def is_invalid(error: BaseException) -> bool:
    """Return True if the API server rejected a value (422)."""
    return getattr(error, "status", None) == INVALID


def is_unavailable(error: BaseException) -> bool:
    """Return True if the API server serves no request now, instead of rejecting this one."""
    return getattr(error, "status", None) in (UNAUTHORIZED, TOO_MANY, UNAVAILABLE)


def is_definite(error: BaseException) -> bool:
    """Return True if the API server will reject the same request again: a user or administrator must act."""
    status = getattr(error, "status", None)
    return isinstance(status, int) and BAD_REQUEST <= status < INTERNAL_ERROR and status != CONFLICT


class Cluster:
    """Connection to one API server, as an async context manager. Writes are recorded in `cache` if it is set;
    `may_write` is called before every request that could change anything.
    """

    def __init__(self) -> None:
        self.cache: Cache | None = None
        self.may_write: Callable[[], bool] = lambda: True
        self.on_response: OnResponse = ignore_response
        self._stack = AsyncExitStack()
        self._gate = asyncio.Semaphore(MAX_CONCURRENT_CALLS)
        self._api: ApiHttp | None = None
        self._served: dict[str, tuple[float, bool]] = {}
        self._optional: dict[str, tuple[float, Mapping[str, tuple[Manifest, ...]]]] = {}
        self._rendezvous_secrets: dict[str, tuple[float, tuple[Manifest, ...]]] = {}
        self._unversioned: set[str] = set()
        """Kinds that this API server does not create with a resourceVersion, such as Services in Kubernetes 1.20."""

    async def __aenter__(self) -> Cluster:
        """Connect with the pod's service account, else with KUBECONFIG.

        Raises:
            MisconfiguredOperator: Neither is available.
        """
        configuration = kubernetes.aio.client.Configuration()
        try:
            _untyped(kubernetes.aio.config.load_incluster_config)(client_configuration=configuration)
        except kubernetes.aio.config.ConfigException:
            try:
                await _untyped(kubernetes.aio.config.load_kube_config)(client_configuration=configuration)
            except (kubernetes.aio.config.ConfigException, OSError) as error:
                raise MisconfiguredOperator(
                    f"not in a pod, and KUBECONFIG cannot be read ({error}); set KUBECONFIG"
                ) from error
        return await self.connect(configuration)

    async def connect(self, configuration: Any) -> Cluster:
        """Connect with a configuration of the client library."""
        self._api = await self._stack.enter_async_context(ApiHttp(configuration))
        self._api.on_response = self.on_response
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    # --- verbs --------------------------------------------------------------------------------------------------------

    async def get(self, kind: str, namespace: str | None, name: str) -> dict[str, Any] | None:
        """Return one object. None if the API server reports that it does not exist."""
        try:
            return await self._call("get", self._path(kind, namespace, name))
        except NotFoundError as error:
            if not _names_object(error, name):
                raise
            return None

    async def list(
        self, kind: str, namespace: str | None, *, selector: str | None = None, fields: str | None = None
    ) -> list[dict[str, Any]]:
        """Return all objects of a kind, in one namespace or in all, by label selector or field selector."""
        path = self._path(kind, namespace, None)
        found = await self._call("get", path, query={"labelSelector": selector, "fieldSelector": fields})
        return [{"kind": kind, **item} for item in found.get("items") or ()]  # items of a list have no kind

    async def list_at(
        self, kind: str, namespace: str | None, *, selector: str | None = None
    ) -> tuple[tuple[dict[str, Any], ...], str]:
        """Return all objects of a kind, read page by page, and the resourceVersion of the list."""
        path, next_page = self._path(kind, namespace, None), None
        found: tuple[dict[str, Any], ...] = ()
        while True:
            query = {"labelSelector": selector, "limit": str(PAGE_SIZE), "continue": next_page}
            page = await self._call("get", path, query=query)
            found += tuple(page.get("items") or ())
            next_page = page["metadata"].get("continue")
            if not next_page:
                return found, str(page["metadata"]["resourceVersion"])

    @asynccontextmanager
    async def watch(
        self, kind: str, namespace: str | None, *, selector: str | None, version: str, seconds: int
    ) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        """Watch a kind after a version for `seconds`. Yields the API server's events."""
        assert self._api is not None
        response = await self._api.request(
            "get",
            self._path(kind, namespace, None),
            query=_without_none(
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
        """Create an object.

        Raises:
            ConflictError: It exists.
        """
        path = self._path(manifest["kind"], manifest["metadata"].get("namespace"), None)
        return await self._call("post", path, body=manifest)

    async def replace(self, manifest: Manifest) -> dict[str, Any]:
        """Replace an object.

        Raises:
            ConflictError: metadata.resourceVersion is set and no longer current.
        """
        metadata = manifest["metadata"]
        path = self._path(manifest["kind"], metadata.get("namespace"), metadata["name"])
        return await self._call("put", path, body=manifest)

    async def patch(self, kind: str, namespace: str | None, name: str, body: Any) -> dict[str, Any]:
        """Patch an object: a dict is a strategic merge patch (lists merge by key), a list is a JSON patch."""
        kind_of_patch = "json-patch" if isinstance(body, list) else "strategic-merge-patch"
        path = self._path(kind, namespace, name)
        return await self._call("patch", path, body=body, content_type=f"application/{kind_of_patch}+json")

    async def apply(self, manifest: Manifest, owner: InferenceDeployment, *, is_new: bool) -> None:
        """Apply a child by server-side apply.

        Raises:
            NameTaken: `is_new`, and an object of this name has another owner.
        """
        if manifest["kind"] == "Secret":
            await self._apply_shared_secret(manifest, owner)
            return
        metadata = {**manifest["metadata"], "ownerReferences": [owner_reference(owner)]}
        body = {**manifest, "metadata": metadata}
        if manifest["kind"] not in OPTIONAL:
            self._record_write(body, owner, await self._create_or_update(body, owner, is_new=is_new))
            return
        self._optional.pop(owner.uid, None)
        try:
            self._record_write(body, owner, await self._create_or_update(body, owner, is_new=is_new))
        except API_ERRORS as error:
            if missing_permission(error) is None:
                raise
            self._disable_optional_kind(str(manifest["kind"]), missing_permission(error))

    async def _apply_shared_secret(self, manifest: Manifest, owner: InferenceDeployment) -> None:
        """Apply the resource's key of the rendezvous Secret. Each resource is one of its owners and has its own field
        manager, so it keeps the keys of others. The Secret is deleted with the last owner.
        """
        self._rendezvous_secrets.pop(owner.uid, None)
        reference = {**owner_reference(owner), "controller": False}
        body = {**manifest, "metadata": {**manifest["metadata"], "ownerReferences": [reference]}}
        await self._apply(body, f"{FIELD_MANAGER}-{owner.name}")

    async def _create_or_update(self, body: Manifest, owner: InferenceDeployment, *, is_new: bool) -> Manifest:
        """Apply a child. A new child is created in one call that fails if the object exists; an existing object is
        checked before it is overwritten: ADR-0076.
        """
        if not is_new:
            return await self._apply(body, FIELD_MANAGER)
        kind = str(body["kind"])
        if kind not in self._unversioned:
            try:
                return await self._apply(_with_resource_version(body, NEVER_USED_VERSION), FIELD_MANAGER)
            except ConflictError:
                pass
            except API_ERRORS as error:
                if VERSION_NOT_ALLOWED_MESSAGE not in str(getattr(error, "body", None)):
                    raise
                self._unversioned.add(kind)
        present = await self._get_applicable(body, owner)
        if present is not None:
            version = present["metadata"].get("resourceVersion")
        else:
            version = None if kind in self._unversioned else NEVER_USED_VERSION
        try:
            return await self._apply(_with_resource_version(body, version), FIELD_MANAGER)
        except ConflictError as error:
            raise NotYet(f"{kind} {body['metadata']['name']} was changed concurrently; it is retried") from error

    async def _get_applicable(self, manifest: Manifest, owner: InferenceDeployment) -> Manifest | None:
        """Return the existing object of this name. None if there is none.

        Raises:
            NameTaken: It has another owner.
            NotYet: It must be observed, or be deleted by Kubernetes, before it is overwritten.
        """
        metadata = manifest["metadata"]
        present = await self.get(manifest["kind"], metadata["namespace"], metadata["name"])
        if present is None:
            return None
        if belongs_to_deleted_owner(present, owner):
            raise NotYet(
                f"{manifest['kind']} {metadata['name']} belongs to the InferenceDeployment that had this name before; "
                "waiting until Kubernetes has deleted it"
            )
        if not is_owned(present, owner.uid):
            raise NameTaken(
                f"{manifest['kind']} {metadata['name']} exists and has another owner; "
                "delete it, or give the InferenceDeployment another name"
            )
        if manifest["kind"] == "StatefulSet" and _is_labelled(present, owner):
            raise NotYet(f"StatefulSet {metadata['name']} exists already; it is observed before it is changed")
        return present

    async def apply_status(self, deployment: InferenceDeployment, status: Mapping[str, Any]) -> Mapping[str, Any]:
        """Replace the operator's part of `/status`. Return what the API server kept of it: fields unknown to the CRD
        are pruned. The uid protects a new resource with the same name.
        """
        body = {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": KIND,
            "metadata": {"name": deployment.name, "namespace": deployment.namespace, "uid": deployment.uid},
            "status": status,
        }
        answer = await self._apply(body, STATUS_MANAGER, subresource="/status")
        self._record_write(body, deployment, answer)
        return answer.get("status") or {}

    async def delete(self, kind: str, namespace: str, name: str, *, uid: str, grace_seconds: int | None = None) -> None:
        """Delete an object if it has this uid; a missing object is not an error. With `grace_seconds` 0 a pod is
        removed at once, even if its node does not respond.
        """
        body: dict[str, Any] = {"propagationPolicy": "Background", "preconditions": {"uid": uid}}
        if grace_seconds is not None:
            body["gracePeriodSeconds"] = grace_seconds
        if kind in OPTIONAL:
            self._optional.clear()  # the installation changed: read all again
        try:
            await self._call("delete", self._path(kind, namespace, name), body=body)
        except (NotFoundError, ConflictError):
            return
        if self.cache is not None:
            self.cache.record_delete(kind, namespace, name, uid)

    async def evict(self, namespace: str, name: str, *, uid: str, budget: str) -> bool:
        """Evict a pod if it has this uid. Return False if the PodDisruptionBudget `budget` blocks it. The pod is
        deleted if only other budgets block it, or the API server does not support evictions or does not permit them
        to this operator.
        """
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
            refusing = _blocking_budgets(error)
            if refusing is not None and (not refusing or any(budget in words.split() for words in refusing)):
                return False
            await self.delete("Pod", namespace, name, uid=uid)
            return True
        if self.cache is not None:
            self.cache.record_delete("Pod", namespace, name, uid)
        return True

    # --- compositions -------------------------------------------------------------------------------------------------

    async def list_children(self, deployment: InferenceDeployment) -> ObservedChildren:
        """Return the children of a resource from the API server: owned objects, and the pods of its groups."""
        selector = children_selector(deployment.name)
        found = await asyncio.gather(*(self.list(kind, deployment.namespace, selector=selector) for kind in CHILDREN))
        lists = dict(zip(CHILDREN, found, strict=True))
        secrets = await self._read_rendezvous_secret(deployment, lists["StatefulSet"])
        return _build_children(deployment, lists, secrets, await self._optional_children(deployment))

    async def cached_children(self, deployment: InferenceDeployment, cache: Cache) -> ObservedChildren | None:
        """Return the children of a resource from the cache. None if a kind is not synced."""
        namespace, owner = deployment.namespace, (deployment.namespace, deployment.name)
        if not all(cache.is_synced(kind, namespace) for kind in CHILDREN):
            return None
        optional = {}
        for kind in OPTIONAL:
            if cache.is_not_served(kind, namespace) or self._is_disabled(kind):
                continue
            if not cache.is_synced(kind, namespace):
                return None
            optional[kind] = filter_owned(cache.of(kind, owner), deployment.uid)
        lists = {kind: cache.of(kind, owner) for kind in CHILDREN}
        secrets = await self._cached_rendezvous_secret(deployment, lists["StatefulSet"])
        return _build_children(deployment, lists, secrets, optional)

    async def are_current(self, manifests: Iterable[Manifest]) -> bool:
        """Return True if all objects still have their resourceVersion. Sends one read per object."""
        return all(await asyncio.gather(*map(self._is_current, manifests)))

    async def _is_current(self, known: Manifest) -> bool:
        metadata = known["metadata"]
        name, namespace = metadata["name"], metadata["namespace"]
        if known["kind"] == "Pod":  # the operator may list pods, but not get one
            present = next(iter(await self.list("Pod", namespace, fields=f"metadata.name={name}")), None)
        else:
            present = await self.get(known["kind"], namespace, name)
        return present is not None and present["metadata"]["resourceVersion"] == metadata["resourceVersion"]

    async def _optional_children(self, deployment: InferenceDeployment) -> Mapping[str, tuple[Manifest, ...]]:
        """Return the children of optional kinds, at most a minute old; read again after one of them was written."""
        now = time.monotonic()
        read_at, known = self._optional.get(deployment.uid, (now, None))
        if known is None or now - read_at > OPTIONAL_FRESH_SECONDS:
            found = [(kind, await self._optional_of(kind, deployment)) for kind in OPTIONAL]
            known = {kind: children for kind, children in found if children is not None}
            stale = now - 2 * OPTIONAL_FRESH_SECONDS  # entries of deleted resources
            self._optional = {uid: seen for uid, seen in self._optional.items() if seen[0] > stale}
            self._optional[deployment.uid] = now, known
        return known

    async def _optional_of(self, kind: str, deployment: InferenceDeployment) -> tuple[Manifest, ...] | None:
        """Return the children of one optional kind. None if the cluster does not serve it or the permission is
        missing.
        """
        if not await self.serves(kind):
            return None
        try:
            found = await self.list(kind, deployment.namespace, selector=children_selector(deployment.name))
        except API_ERRORS as error:
            if not is_forbidden(error) and getattr(error, "status", None) != NOT_FOUND:
                raise
            self._disable_optional_kind(kind, missing_permission(error))
            return None
        return filter_owned(found, deployment.uid)

    def _disable_optional_kind(self, kind: str, permission: MissingPermission | None) -> None:
        """Create no objects of a kind for some minutes: engines run without them."""
        self._served[kind] = time.monotonic(), False
        logger.warning("no %s is created: the operator has no permission to %s", kind, permission)

    def _is_disabled(self, kind: str) -> bool:
        """Return True if a kind is disabled for now because of a missing permission."""
        asked_at, is_served = self._served.get(kind, (0.0, True))
        return not is_served and time.monotonic() - asked_at <= SERVED_FRESH_SECONDS

    async def serves(self, kind: str) -> bool:
        """Return True if the API server serves the kind in the version used here."""
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
        """Return the rendezvous Secret of a resource whose replicas span pods, or did. It is read by name, because
        Secrets are never listed.
        """
        if layout_of(deployment.spec).pods == 1 and not any(map(is_worker, stateful_sets)):
            return ()
        found = await self.get("Secret", deployment.namespace, RENDEZVOUS_SECRET_NAME)
        return () if found is None else (found,)

    async def _cached_rendezvous_secret(
        self, deployment: InferenceDeployment, stateful_sets: Iterable[Manifest]
    ) -> tuple[Manifest, ...]:
        """Return the rendezvous Secret, at most a minute old; read again after this process wrote it."""
        now = time.monotonic()
        read_at, known = self._rendezvous_secrets.get(deployment.uid, (now, None))
        if known is None or now - read_at > RENDEZVOUS_SECRET_TTL_SECONDS:
            known = await self._read_rendezvous_secret(deployment, stateful_sets)
            if known:  # a missing Secret is read each time
                self._rendezvous_secrets[deployment.uid] = now, known
        return known

    async def event(
        self, deployment: InferenceDeployment, *, kind: str, reason: str, message: str, now: datetime, key: str = ""
    ) -> None:
        """Emit a core/v1 Event (served by every Kubernetes version). A repeated Event increases its count. `kind` is
        Normal or Warning; `key` distinguishes events with equal text.
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

    async def get_or_create_secret(self, namespace: str, name: str, fresh: Mapping[str, bytes]) -> dict[str, bytes]:
        """Return the data of a Secret, created with `fresh` if it does not exist. Concurrent creators get the same
        data.
        """
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
        """Replace all data of an existing Secret if it still equals `before`. Return True if it was replaced."""
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

    def _record_write(self, body: Manifest, owner: InferenceDeployment, answer: Manifest) -> None:
        """Record the write in the cache."""
        kind = str(body["kind"])
        if self.cache is not None and kind != "Secret" and "metadata" in answer:
            self.cache.record_write(kind, (owner.namespace, owner.name), answer)

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
        """Send a request. The calls of all loops share a concurrency limit, but Lease calls do not wait for it: a
        burst of work must not cost the leadership.
        """
        if path.startswith(LEASES):
            return await self._send(method, path, **options)
        async with self._gate:
            return await self._send(method, path, **options)

    def _require_leadership(self) -> None:
        """Check the leadership before a write: it may have waited in this queue, or for a read.

        Raises:
            NotLeading: Another process may hold the Lease.
        """
        if not self.may_write():
            raise NotLeading("the Lease expired; another process may lead now")

    async def _send(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str | None] = NO_QUERY,
        body: Any = None,
        content_type: str = JSON,
    ) -> dict[str, Any]:
        assert self._api is not None
        response = await self._api.request(
            method,
            path,
            query=_without_none(query),
            body=body,
            content_type=content_type,
            timeout=REQUEST_TIMEOUT,
            check=None if method == "get" else self._require_leadership,
        )
        answer: dict[str, Any] = parse_json(await response.read())
        return answer


def _without_none(query: Mapping[str, str | None]) -> dict[str, str]:
    """Return the query parameters that have a value."""
    return {name: value for name, value in query.items() if value is not None}


async def _events(response: Any) -> AsyncIterator[dict[str, Any]]:
    """Yield the lines of a watch as events. A line may exceed any buffer."""
    rest = b""
    async for chunk in response.content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield parse_json(line)


def _build_children(
    deployment: InferenceDeployment,
    lists: Mapping[str, Sequence[Manifest]],
    secrets: Iterable[Manifest],
    optional: Mapping[str, tuple[Manifest, ...]],
) -> ObservedChildren:
    """Select the objects that the resource owns. Anyone can set labels, but not ownership."""
    stateful_sets, jobs = filter_owned(lists["StatefulSet"], deployment.uid), filter_owned(lists["Job"], deployment.uid)
    makers = {str(m["metadata"]["name"]): m for m in (*stateful_sets, *jobs)}
    return ObservedChildren(
        services=filter_owned(lists["Service"], deployment.uid),
        stateful_sets=stateful_sets,
        config_maps=filter_owned(lists["ConfigMap"], deployment.uid),
        pods=tuple(pod for pod in lists["Pod"] if is_of_workload(pod, deployment.name, makers)),
        router_pods=tuple(pod for pod in lists["Pod"] if is_of_router(pod, deployment.name)),
        jobs=jobs,
        accounts=filter_owned(lists["ServiceAccount"], deployment.uid),
        secrets=tuple(secrets),
        optional=optional,
    )


def _untyped(function: Any) -> Any:
    """Return the function as Any: the client library has no annotations, and results are checked where they enter."""
    return function


def owner_reference(owner: InferenceDeployment) -> dict[str, Any]:
    """Return an owner reference, so that the child is deleted with its owner. It does not block the owner's
    deletion, which would need more permissions.
    """
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
    """Return True if the watches report this child of the owner. Its labels may have been removed."""
    labels = manifest["metadata"].get("labels") or {}
    return bool(labels.get(DEPLOYMENT_LABEL) == owner.name and labels.get("app.kubernetes.io/managed-by") == MANAGED_BY)


def belongs_to_deleted_owner(manifest: Manifest, owner: InferenceDeployment) -> bool:
    """Return True if the object belongs to a deleted resource of the same name and is deleted with it."""
    references = manifest["metadata"].get("ownerReferences") or []
    return any(
        (reference.get("kind"), reference.get("name")) == (KIND, owner.name) and reference.get("uid") != owner.uid
        for reference in references
        if reference.get("controller")
    )


def _with_resource_version(manifest: Manifest, version: str | None) -> Manifest:
    """Return the manifest with this resourceVersion as a precondition. None means no precondition."""
    if version is None:
        return manifest
    return {**manifest, "metadata": {**manifest["metadata"], "resourceVersion": version}}


def _names_object(error: NotFoundError, name: str) -> bool:
    """Return True if a 404 response is about this object. An API server that does not serve the kind yet also
    returns 404, with another body.
    """
    try:
        said = json.loads(error.body or "")
        return bool(said["reason"] == "NotFound" and said["details"]["name"] == name)
    except (ValueError, TypeError, KeyError):
        return False


def _blocking_budgets(error: BaseException) -> tuple[str, ...] | None:
    """Return the messages of the PodDisruptionBudgets that block an eviction, empty if the API server is only busy.
    None for another error.
    """
    if getattr(error, "status", None) != TOO_MANY:
        return None
    try:
        causes = json.loads(getattr(error, "body", None) or "{}")["details"]["causes"]
        return tuple(str(cause["message"]) for cause in causes if cause["reason"] == "DisruptionBudget")
    except (ValueError, TypeError, KeyError):
        return ()


def is_of_workload(pod: Manifest, name: str, makers: Mapping[str, Manifest]) -> bool:
    """Return True if a pod is one that the resource's StatefulSets or its Job would create.

    Anyone who can create pods can set labels and owner references, and the leader of a group is sent the admin token.
    The uid of the owner, the exact name and the labels of the group must match therefore: a pod of that name is the
    StatefulSet's own, or blocks its creation. `makers` are the existing workloads by name. A deleted one may leave
    draining pods.
    """
    metadata = pod["metadata"]
    owners = [one for one in metadata.get("ownerReferences") or [] if one.get("controller")]
    if len(owners) != 1:
        return False
    kind, owner, uid = (str(owners[0].get(key)) for key in ("kind", "name", "uid"))
    if owner in makers and uid != makers[owner]["metadata"]["uid"]:
        return False
    if kind == "Job":
        return owner == f"{name}-facts"
    group = re.fullmatch(rf"{re.escape(name)}-g(0|[1-9]\d*)(-w)?", owner)
    number = re.fullmatch(rf"{re.escape(owner)}-(0|[1-9]\d*)", metadata["name"])
    if kind != "StatefulSet" or group is None or number is None:
        return False
    labels, role = metadata.get("labels") or {}, WORKER if group[2] else LEADER
    is_member = labels.get(GROUP_LABEL) == group[1] and labels.get(ROLE_LABEL, LEADER) == role
    return is_member and (role == WORKER or number[1] == "0")


def is_of_router(pod: Manifest, name: str) -> bool:
    """Return True if a pod was created for a ReplicaSet of the resource's router.

    A user with permission to create pods can imitate one. It learns only the routers' tokens (builders/admin_token.py).
    """
    owners = [owner for owner in pod["metadata"].get("ownerReferences") or [] if owner.get("controller")]
    return any(
        owner.get("kind") == "ReplicaSet"
        and re.fullmatch(rf"{re.escape(router_name_of(name))}-[a-z0-9]+", str(owner.get("name")))
        for owner in owners
    )


def filter_owned(manifests: Iterable[Manifest], uid: str) -> tuple[Manifest, ...]:
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

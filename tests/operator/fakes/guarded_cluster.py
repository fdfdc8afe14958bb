"""A FakeCluster behind the operator's real door to the API server, which asks for every right as RBAC does.

What is called is what `edge.cluster.Cluster` would send; what is granted is what a role says; what was used is noted.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.dynamic.exceptions import api_exception
from operator_cluster import FakeCluster
from trimtab_operator.kube.client import RESOURCES, Cluster
from trimtab_operator.observed.actions import Apply
from trimtab_operator.resource.spec import KIND

KINDS = {(group, plural): kind for kind, (group, _, plural, _) in RESOURCES.items()}
EXCEPTION: Callable[[ApiException], Exception] = api_exception  # the client library is untyped
NO_CHILDREN = ("Event", "Lease", "ValidatingWebhookConfiguration")
VERBS = {"get": "get", "post": "create", "put": "update", "patch": "patch", "delete": "delete"}


@dataclass(frozen=True, slots=True)
class Grant:
    """A right; no `namespace`: in all of them and beyond; no `name`: whatever it is called."""

    group: str
    resource: str
    verb: str
    namespace: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """What one call asks for, as an API server's authorizer reads it."""

    group: str
    resource: str
    verb: str
    namespace: str | None
    name: str | None

    def is_covered_by(self, grant: Grant) -> bool:
        what = (grant.group, grant.resource, grant.verb) == (self.group, self.resource, self.verb)
        return what and grant.namespace in (None, self.namespace) and grant.name in (None, self.name)

    @property
    def refusal(self) -> str:
        """The words of an API server."""
        where = f'in the namespace "{self.namespace}"' if self.namespace else "at the cluster scope"
        return (
            f'{self.resource} is forbidden: User "operator" cannot {self.verb} resource "{self.resource}" '
            f'in API group "{self.group}" {where}'
        )


def source(method: str, path: str) -> Asked:
    """What a method on a path asks for."""
    parts = path.strip("/").split("/")
    group, rest = ("", parts[2:]) if parts[0] == "api" else (parts[1], parts[3:])
    namespace = None
    if rest[0] == "namespaces" and len(rest) > 2:
        namespace, rest = rest[1], rest[2:]
    resource, name, subresource = (*rest, None, None)[:3]
    assert resource is not None
    verb = "list" if method == "get" and name is None else VERBS[method]
    return Asked(group, f"{resource}/{subresource}" if subresource else resource, verb, namespace, name)


def versioned(found: dict[str, Any]) -> dict[str, Any]:
    """An object with a version, which is another one when anything of it is."""
    version = zlib.crc32(json.dumps(found, sort_keys=True).encode())
    return {**found, "metadata": {**found["metadata"], "resourceVersion": str(version)}}


class GuardedDoor(Cluster):
    """The door of one operator that has these rights."""

    def __init__(self, cluster: FakeCluster, grants: Iterable[Grant]) -> None:
        super().__init__()
        self.cluster = cluster
        self.grants = list(grants)
        self.used: set[Grant] = set()
        self.others: dict[str, dict[str, Any]] = {}
        """What is no child of the resource, by its path."""

    def _path(self, kind: str, namespace: str | None, name: str | None) -> str:
        group, version, plural, _ = RESOURCES[kind]
        parts = ["apis", group, version] if group else ["api", version]
        parts += ["namespaces", namespace] if namespace else []
        return "/" + "/".join([*parts, plural, *([name] if name else [])])

    async def _call(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        if path.startswith("/apis/") and path.count("/") == 3:
            return self._discovery(path.split("/")[2])
        asked = source(method, path)
        self._authorize(asked)
        kind = KINDS[asked.group, asked.resource.partition("/")[0]]
        body = options.get("body") or {}
        if kind == "InferenceDeployment":
            return self._resource(asked, body)
        if kind == "Node":
            return {"items": list(self.cluster._nodes())}
        is_child = asked.namespace in (None, "n") and kind not in NO_CHILDREN
        if not is_child:
            return self._other(asked, path, body)
        found = self._child(asked, kind, body)
        name = ((options.get("query") or {}).get("fieldSelector") or "").removeprefix("metadata.name=")
        if asked.verb == "list":
            return {"items": [versioned(item) for item in found["items"] if name in ("", item["metadata"]["name"])]}
        return versioned(found) if found else found

    def _discovery(self, group: str) -> dict[str, Any]:
        """Everybody may ask what is served."""
        served = [
            plural for kind, (of, _, plural, _) in RESOURCES.items() if of == group and kind in self.cluster.serves
        ]
        return {"resources": [{"name": name} for name in served]}

    def _authorize(self, asked: Asked) -> None:
        covering = [grant for grant in self.grants if asked.is_covered_by(grant)]
        if not covering:
            raise answer(403, asked.refusal)
        self.used.update(covering)

    def _resource(self, asked: Asked, body: dict[str, Any]) -> dict[str, Any]:
        if asked.verb == "patch":
            assert asked.resource.endswith("/status"), "the owner's spec is written"
            self.cluster.write_status(body["status"])
        assert self.cluster.body is not None
        return (
            {"items": [self.cluster.body]} if asked.verb == "list" else versioned({"kind": KIND, **self.cluster.body})
        )

    def _child(self, asked: Asked, kind: str, body: dict[str, Any]) -> dict[str, Any]:
        cluster, name = self.cluster, asked.name or ""
        store = cluster.pods if kind == "Pod" else {n: made for (k, n), made in cluster.objects.items() if k == kind}
        if asked.verb == "list":
            return {"items": [store[name] for name in sorted(store)]}
        if asked.verb == "patch":
            if name not in store:  # server-side apply creates what is not there
                self._authorize(Asked(asked.group, asked.resource, "create", asked.namespace, name))
            elif body["metadata"].get("resourceVersion") not in (
                None,
                versioned(store[name])["metadata"]["resourceVersion"],
            ):
                raise answer(409, "the object has been modified", name)
            cluster.apply_now(Apply(body, name not in store, "", None))
            return cluster.objects[kind, name]
        if name not in store:
            raise answer(404, f"{name} not found", name)
        if asked.resource == "pods/eviction":
            self._evict(name, body)
            return {}
        if asked.verb == "delete":
            cluster.delete_now(kind, name, body["preconditions"]["uid"], body.get("gracePeriodSeconds"))
            return {}
        return store[name]

    def _evict(self, name: str, body: dict[str, Any]) -> None:
        if not self.cluster.lets_go(name):
            raise answer(429, "Cannot evict pod as it would violate the pod's disruption budget.")
        self.cluster.delete_now("Pod", name, body["deleteOptions"]["preconditions"]["uid"])

    def _other(self, asked: Asked, path: str, body: Any) -> dict[str, Any]:
        if asked.verb == "list":
            return {"items": list(self.cluster.creation_failures)}
        if asked.verb == "create":
            path = f"{path}/{body['metadata']['name']}"
            if path in self.others:
                raise answer(409, "exists already")
            self.others[path] = {**body, "metadata": {**body["metadata"], "resourceVersion": "1"}}
        elif path not in self.others:
            raise answer(404, f"{asked.name} not found", asked.name or "")
        elif asked.verb == "update":
            self.others[path] = body
        elif isinstance(body, list):  # a JSON patch of a Secret's data
            for operation in body:
                if operation["op"] == "test" and operation["value"] != self.others[path]["data"]:
                    raise answer(422, "the data is not what it was")
            self.others[path] = {**self.others[path], "data": body[-1]["value"]}
        elif asked.verb == "patch":
            self.others[path] = {**self.others[path], **body}
        return self.others[path]


def answer(status: int, message: str, name: str = "") -> Exception:
    """An error as the client library raises it."""
    error = ApiException(status=status, reason="refused")
    reason = {403: "Forbidden", 404: "NotFound", 409: "AlreadyExists", 422: "Invalid", 429: "TooManyRequests"}[status]
    said = {"kind": "Status", "message": message, "reason": reason, "details": {"name": name}, "code": status}
    error.body, error.headers = json.dumps(said), {"Content-Type": "application/json"}
    return EXCEPTION(error)

"""Kopf's handlers: its watch of InferenceDeployments feeds the informer cache and starts the reconcile loops.

Only event and index handlers are used. They add no finalizer and write nothing, so a resource can be deleted while no
operator runs (ADR-0005), and only its owner writes to it. ADR-0077.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
from functools import partial
from typing import Any

import kopf

from trimtab_operator.kube.informer_cache import Cache
from trimtab_operator.observed.groups import is_terminating
from trimtab_operator.reconcile.reconciler import Reconciler
from trimtab_operator.resource.manifest import Manifest
from trimtab_operator.resource.spec import GROUP, KIND, PLURAL, VERSION, class_of

logger = logging.getLogger(__name__)

CANCELLATION_SECONDS = 10.0  # a loop that is stopped may finish the request in flight
WATCH_SERVER_TIMEOUT_SECONDS = 50  # an integer: the API server parses nothing else
WATCH_CLIENT_TIMEOUT_SECONDS = 60.0  # ends a watch whose connection died silently


class NoProgressStorage(kopf.ProgressStorage):
    """Storage that keeps nothing: the operator has no permission to write annotations to resources."""

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        return None

    def purge(self, **_: Any) -> None:
        return None

    def touch(self, **_: Any) -> None:
        return None

    def clear(self, *, essence: kopf.BodyEssence) -> kopf.BodyEssence:
        return essence


class NoDiffBaseStorage(kopf.DiffBaseStorage):
    """Storage that copies nothing: no handler reads the diff, and Kopf's default copies the resource at each event."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        return None


class ReconcileLoops:
    """One task per resource, by uid: a resource that was deleted and created again gets a new one at once."""

    def __init__(self, reconciler: Reconciler) -> None:
        self._reconciler = reconciler
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._is_stopped = False

    def start(self, body: Manifest) -> None:
        """Start the loop of a resource, unless it runs or the resource is being deleted."""
        metadata = body["metadata"]
        uid = str(metadata["uid"])
        if self._is_stopped or uid in self._tasks or is_terminating(body):
            return
        namespace, name = str(metadata["namespace"]), str(metadata["name"])
        task = asyncio.create_task(self._reconciler.run(namespace, name, uid), name=f"reconcile {namespace}/{name}")
        self._tasks[uid] = task
        task.add_done_callback(partial(self._ended, uid))

    async def stop(self) -> None:
        """Cancel all loops and wait for them, for at most CANCELLATION_SECONDS."""
        self._is_stopped = True
        tasks = tuple(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CANCELLATION_SECONDS)

    def _ended(self, uid: str, task: asyncio.Task[None]) -> None:
        self._tasks.pop(uid, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a reconcile loop failed; the next event starts it again", exc_info=error)


def build_registry(loops: ReconcileLoops, cache: Cache, *, operator_class: str | None = None) -> kopf.OperatorRegistry:
    """Return the registry with all handlers, bound to the loops and the informer cache. Resources of another class are
    ignored.
    """
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    def login(**kwargs: Any) -> kopf.ConnectionInfo | None:
        inside = kopf.login_with_service_account(**kwargs)
        return _by_address(inside) if inside is not None else kopf.login_with_kubeconfig(**kwargs)

    # Before Kopf looks for tasks that are left over: it waits 5 s for them and then cancels them itself.
    @kopf.on.cleanup(registry=registry)
    async def stop(**_: Any) -> None:
        await loops.stop()

    # Kopf calls no event handler before all listed resources are indexed. So the first event finds the list complete,
    # which the GPU budget needs. Nothing is stored in the index itself.
    @kopf.index(GROUP, VERSION, PLURAL, registry=registry)
    async def listed(**_: Any) -> dict[str, None]:
        return {}

    @kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)
    async def receive(event: kopf.RawEvent, **_: Any) -> None:
        body: Manifest = dict(event["object"])
        if class_of(body) != operator_class:
            return
        cache.apply_kopf_event(KIND, event["type"], body)
        if event["type"] != "DELETED":
            loops.start(body)

    return registry


def _by_address(inside: kopf.ConnectionInfo) -> kopf.ConnectionInfo:
    """Return the connection with the API server's address instead of a name: not every cluster has DNS."""
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        return inside
    return dataclasses.replace(inside, server=f"https://{f'[{host}]' if ':' in host else host}:{port}")


def build_settings() -> kopf.OperatorSettings:
    """Return Kopf's settings: no state of its own in resources, no discovery, bounded waiting."""
    settings = kopf.OperatorSettings()
    settings.persistence.progress_storage = NoProgressStorage()
    settings.persistence.diffbase_storage = NoDiffBaseStorage()
    settings.posting.enabled = False
    settings.scanning.disabled = True  # needs no permission to list CRDs and namespaces
    settings.watching.server_timeout = WATCH_SERVER_TIMEOUT_SECONDS
    settings.watching.client_timeout = WATCH_CLIENT_TIMEOUT_SECONDS
    settings.watching.connect_timeout = 10.0
    settings.networking.request_timeout = 30.0
    settings.process.ultimate_exiting_timeout = 30.0
    return settings

"""Kopf's decorators, and nothing else: a daemon per resource. What wakes it is the cache's to tell
(kube/informer_cache.py).

The daemon needs no finalizer: children go by ownership, and the loop ends when its resource is gone. So a resource can
be deleted while no operator runs (ADR-0005).
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import kopf

from trimtab_operator.reconcile.reconciler import Reconciler
from trimtab_operator.resource.spec import GROUP, PLURAL, VERSION

CANCELLATION_SECONDS = 10.0  # a loop that is told to stop gets so long for the request in flight
WATCH_SECONDS = 50  # an integer: the API server parses nothing else
PATIENCE_SECONDS = 60.0  # a watch that is not ended by then died without a word


class NothingKept(kopf.ProgressStorage):
    """Kopf writes nothing into resources: the operator has no right to, so that their owner alone writes them."""

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


class NothingCompared(kopf.DiffBaseStorage):
    """Nothing is compared with what a resource was before: a loop looks at it as it is. So nothing of it is copied
    either, as Kopf does by itself at each event, of each status that is written."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        return None


def build_registry(reconciler: Reconciler) -> kopf.OperatorRegistry:
    """All handlers, bound to one reconciler."""
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    def login(**kwargs: Any) -> kopf.ConnectionInfo | None:
        inside = kopf.login_with_service_account(**kwargs)
        return _by_address(inside) if inside is not None else kopf.login_with_kubeconfig(**kwargs)

    @kopf.daemon(GROUP, VERSION, PLURAL, registry=registry, cancellation_timeout=CANCELLATION_SECONDS)
    async def reconcile(namespace: str | None, name: str | None, uid: str | None, **_: Any) -> None:
        assert namespace is not None
        assert name is not None
        assert uid is not None
        await reconciler.run(namespace, name, uid)

    _without_finalizer(registry)
    return registry


def _by_address(inside: kopf.ConnectionInfo) -> kopf.ConnectionInfo:
    """The API server by the address that every pod is given: Kopf's choice is a name, and not every cluster has DNS."""
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        return inside
    return dataclasses.replace(inside, server=f"https://{f'[{host}]' if ':' in host else host}:{port}")


def _without_finalizer(registry: kopf.OperatorRegistry) -> None:
    """Kopf gives every daemon a finalizer and has no switch for it; the handler's own field decides."""
    handlers = registry._spawning._handlers
    handlers[:] = [dataclasses.replace(handler, requires_finalizer=False) for handler in handlers]


def build_settings() -> kopf.OperatorSettings:
    """Kopf with no state of its own in our resources, and patient with nobody."""
    settings = kopf.OperatorSettings()
    settings.persistence.progress_storage = NothingKept()
    settings.persistence.diffbase_storage = NothingCompared()
    settings.posting.enabled = False
    settings.scanning.disabled = True  # no rights to list CRDs and namespaces are needed
    settings.watching.server_timeout = WATCH_SECONDS
    settings.watching.client_timeout = PATIENCE_SECONDS
    settings.watching.connect_timeout = 10.0
    settings.networking.request_timeout = 30.0
    settings.process.ultimate_exiting_timeout = 30.0
    return settings

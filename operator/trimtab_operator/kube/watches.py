"""Watches that feed the informer cache: list a kind, follow its changes, and detect a dead connection.

The API server ends a watch after WATCH_SECONDS, and the client ends it a little later, which bounds the time lost on a
dead connection. The next watch continues at the last version. If the API server no longer has that version, the kind is
listed again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from contextlib import suppress

from trimtab_operator.builders.labels import MANAGED_BY
from trimtab_operator.kube.client import OPTIONAL, Cluster, is_forbidden
from trimtab_operator.kube.informer_cache import Cache, Enqueue, Store, SyncState, version_of
from trimtab_operator.kube.leader_election import CONNECTION_ERRORS
from trimtab_operator.resource.spec import KIND

logger = logging.getLogger(__name__)

WATCH_SECONDS = 50  # an integer: the API server parses nothing else
WATCH_CLIENT_TIMEOUT_SECONDS = 60.0  # a longer watch has a dead connection
UNSERVED_RETRY_SECONDS = 300.0  # until a new CRD or permission is noticed
MIN_WATCH_SECONDS = 1.0  # a watch that ends sooner counts as failed, so that requests do not repeat in a loop
BACKOFF_SECONDS = (0.5, 1.0, 2.0, 5.0)  # between failing attempts
FIRST_SYNC_TIMEOUT_SECONDS = 20.0  # for the initial lists, before the loops start
FIRST_SYNC_POLL_SECONDS = 0.05
REQUIRED = (KIND, "StatefulSet", "Pod", "Service", "ConfigMap", "Job", "ServiceAccount")
MANAGED_SELECTOR = f"app.kubernetes.io/managed-by={MANAGED_BY}"


class Expired(Exception):
    """The API server no longer has the changes after a version (410 Gone)."""


def build_cache(namespaces: Iterable[str], enqueue: Enqueue) -> Cache:
    """Return a cache of all observed kinds in these namespaces, or in all namespaces if none is given."""
    scopes = tuple(namespaces) or (None,)
    return Cache((Store(kind, namespace) for kind in (*REQUIRED, *OPTIONAL) for namespace in scopes), enqueue)


async def wait_for_first_sync(cache: Cache) -> None:
    """Wait until every kind was listed or cannot be listed. After a timeout the observer reads missing kinds from
    the API server.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(FIRST_SYNC_TIMEOUT_SECONDS):
            while any(store.sync_state is SyncState.NOT_SYNCED for store in _followed(cache)):  # noqa: ASYNC110 - once, at the start
                await asyncio.sleep(FIRST_SYNC_POLL_SECONDS)


async def run_watches(cluster: Cluster, cache: Cache) -> None:
    """Feed the cache until cancelled."""
    await asyncio.gather(*(_follow(cluster, cache, store) for store in _followed(cache)))


def _followed(cache: Cache) -> tuple[Store, ...]:
    """Return the stores of all kinds but InferenceDeployments, which Kopf watches (reconcile/kopf_handlers.py)."""
    return tuple(store for store in cache.stores if store.kind != KIND)


async def _follow(cluster: Cluster, cache: Cache, store: Store) -> None:
    """Keep one kind synced until cancelled, whatever error occurs."""
    failures, version, clock = 0, None, asyncio.get_running_loop().time
    while True:
        try:
            if store.kind in OPTIONAL and not await cluster.serves(store.kind):
                cache.mark_not_served(store)
                await asyncio.sleep(UNSERVED_RETRY_SECONDS)
                continue
            if version is None:
                version = await _list(cluster, cache, store)
            began = clock()
            version = await _watch(cluster, cache, store, version)
            if clock() - began >= MIN_WATCH_SECONDS:
                failures = 0
                continue
        except Expired:
            version = None
        except (*CONNECTION_ERRORS, ValueError, KeyError) as error:
            if is_forbidden(error):
                cache.mark_not_served(store)
                logger.warning("%s cannot be watched and is read at each reconcile: %s", store.kind, error)
                await asyncio.sleep(UNSERVED_RETRY_SECONDS)
                version = None
                continue
            logger.warning("a watch failed", extra={"kind": store.kind, "error": str(error) or type(error).__name__})
            if getattr(error, "status", None) is not None:  # the API server responded with an error
                version = None
        except Exception:  # an error in one kind must not end the watches of the others
            version = None
            logger.exception("a watch failed", extra={"kind": store.kind})
        await asyncio.sleep(BACKOFF_SECONDS[min(failures, len(BACKOFF_SECONDS) - 1)])
        failures += 1


async def _list(cluster: Cluster, cache: Cache, store: Store) -> str:
    items, version = await cluster.list_at(store.kind, store.namespace, selector=MANAGED_SELECTOR)
    cache.replace_all(store, items, int(version) if version.isdecimal() else None)
    return version


async def _watch(cluster: Cluster, cache: Cache, store: Store, version: str) -> str:
    """Watch for changes after a version, for WATCH_SECONDS. Return the version it got to.

    Raises:
        Expired: The kind must be listed again.
    """
    assert store.sync_state is SyncState.SYNCED
    watch = cluster.watch(
        store.kind, store.namespace, selector=MANAGED_SELECTOR, version=version, seconds=WATCH_SECONDS
    )
    try:
        async with asyncio.timeout(WATCH_CLIENT_TIMEOUT_SECONDS), watch as events:
            cache.mark_alive(store)
            async for event in events:
                kind, manifest = event["type"], event["object"]
                if kind == "ERROR":
                    raise Expired(str(manifest.get("message", "")))
                version = str(manifest["metadata"]["resourceVersion"])
                if kind == "BOOKMARK":
                    cache.mark_alive(store, version_of(manifest))
                else:
                    cache.apply_event(store, kind, manifest)
    except TimeoutError:
        logger.warning("a watch timed out and is restarted", extra={"kind": store.kind})
        return version
    cache.mark_alive(store)  # the API server ended it regularly
    return version

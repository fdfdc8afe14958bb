"""The watches that feed the cache: list a kind, then be told of every change, and notice when nobody tells any more.

A watch is ended by the API server after WATCH_SECONDS, and by us a little later: one that died without a word costs at
most that. It goes on where the last one ended; where the API server has forgotten that, the kind is listed again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from contextlib import suppress

from trimtab_operator.builders.labels import MANAGED_BY
from trimtab_operator.kube.client import OPTIONAL, Cluster, is_forbidden
from trimtab_operator.kube.informer_cache import Cache, Heard, Rings, Store, version_of
from trimtab_operator.kube.leader_election import CONNECTION_ERRORS
from trimtab_operator.resource.spec import KIND

logger = logging.getLogger(__name__)

WATCH_SECONDS = 50  # an integer: the API server parses nothing else
PATIENCE_SECONDS = 60.0  # a watch that is not ended by then is ended here
AGAIN_SECONDS = 300.0  # a kind that is installed later, or a right that is given, is found within minutes
PAUSES_SECONDS = (0.5, 1.0, 2.0, 5.0)  # between attempts that fail
FIRST_SECONDS = 20.0  # for the first lists, before the loops begin
FIRST_POLL_SECONDS = 0.05
REQUIRED = (KIND, "StatefulSet", "Pod", "Service", "ConfigMap", "Job", "ServiceAccount")
OURS = f"app.kubernetes.io/managed-by={MANAGED_BY}"


class Expired(Exception):
    """The API server does not know any more what came after a version."""


def new_cache(namespaces: Iterable[str], rings: Rings) -> Cache:
    """A cache of all kinds that looks read, in these namespaces, or in all where none is named."""
    scopes = tuple(namespaces) or (None,)
    return Cache((Store(kind, namespace) for kind in (*REQUIRED, *OPTIONAL) for namespace in scopes), rings)


async def first_heard(cache: Cache) -> None:
    """Wait until every kind was listed or cannot be; after a while without: looks ask for what is not known."""
    with suppress(TimeoutError):
        async with asyncio.timeout(FIRST_SECONDS):
            while any(store.heard is Heard.NOT_YET for store in _followed(cache)):  # noqa: ASYNC110 - once, at the start
                await asyncio.sleep(FIRST_POLL_SECONDS)


async def keep(cluster: Cluster, cache: Cache) -> None:
    """Feed the cache for as long as this runs."""
    await asyncio.gather(*(_follow(cluster, cache, store) for store in _followed(cache)))


def _followed(cache: Cache) -> tuple[Store, ...]:
    """Return the stores of all kinds but InferenceDeployments, which Kopf watches (reconcile/kopf_handlers.py)."""
    return tuple(store for store in cache.stores if store.kind != KIND)


async def _follow(cluster: Cluster, cache: Cache, store: Store) -> None:
    """Keep one kind known, whatever happens."""
    failures, version = 0, None
    while True:
        try:
            if store.kind in OPTIONAL and not await cluster.serves(store.kind):
                cache.not_served(store)
                await asyncio.sleep(AGAIN_SECONDS)
                continue
            if version is None:
                version = await _list(cluster, cache, store)
            version = await _watch(cluster, cache, store, version)
            failures = 0
            continue
        except Expired:
            version = None
            continue
        except (*CONNECTION_ERRORS, ValueError, KeyError) as error:
            if is_forbidden(error):
                cache.not_served(store)
                logger.warning("%s cannot be watched, and is read at each look: %s", store.kind, error)
                await asyncio.sleep(AGAIN_SECONDS)
                version = None
                continue
            logger.warning("a watch failed", extra={"kind": store.kind, "error": str(error) or type(error).__name__})
            if getattr(error, "status", None) is not None:  # the API server answered, and not as was hoped
                version = None
        except Exception:  # whatever is wrong with one kind must not end the watches of all
            version = None
            logger.exception("a watch failed", extra={"kind": store.kind})
        await asyncio.sleep(PAUSES_SECONDS[min(failures, len(PAUSES_SECONDS) - 1)])
        failures += 1


async def _list(cluster: Cluster, cache: Cache, store: Store) -> str:
    items, version = await cluster.list_at(store.kind, store.namespace, selector=OURS)
    cache.listed(store, items, int(version) if version.isdecimal() else None)
    return version


async def _watch(cluster: Cluster, cache: Cache, store: Store, version: str) -> str:
    """Hear what comes after a version, for a while; the version up to which it was told. Raises Expired."""
    assert store.heard is Heard.LISTED
    asked = cluster.watching(store.kind, store.namespace, selector=OURS, version=version, seconds=WATCH_SECONDS)
    try:
        async with asyncio.timeout(PATIENCE_SECONDS), asked as events:
            cache.alive(store)
            async for event in events:
                kind, manifest = event["type"], event["object"]
                if kind == "ERROR":
                    raise Expired(str(manifest.get("message", "")))
                version = str(manifest["metadata"]["resourceVersion"])
                if kind == "BOOKMARK":
                    cache.alive(store, version_of(manifest))
                else:
                    cache.changed(store, kind, manifest)
    except TimeoutError:
        logger.warning("a watch fell silent, and is begun anew", extra={"kind": store.kind})
        return version
    cache.alive(store)  # it was ended as agreed
    return version

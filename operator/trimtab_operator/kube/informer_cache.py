"""Informer cache of InferenceDeployments and their children, so that a reconcile needs no list calls.

The cache lags behind the API server. Three rules make that harmless. An observation waits for the writes of this
process (`wait_until_settled`). Cached objects are re-read before a destructive write (`reconcile/observer.py`). A kind
that is not synced is read from the API server. No I/O here: `kube/watches.py` feeds the cache. ADR-0034.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from trimtab_operator.builders.labels import DEPLOYMENT_LABEL
from trimtab_operator.observed.groups import is_terminating
from trimtab_operator.resource.manifest import Manifest
from trimtab_operator.resource.spec import KIND

STALE_SECONDS = 75.0  # without a watch event or bookmark a kind counts as not synced
SETTLE_SECONDS = 5.0  # a watch reports a write within milliseconds
STATE_KINDS = ("ConfigMap",)  # reconciler state: written in many iterations, and no reason for another one
SERVER_COMPLETED_KINDS = ("Service",)  # the API server adds an address, the rendezvous address of a replica's ranks
RELEVANT_STATUS_FIELDS: Mapping[str, tuple[str, ...]] = {
    "StatefulSet": ("observedGeneration",),
    "PodDisruptionBudget": (),
    "Deployment": (),
}
"""Status fields that plans read, of kinds whose controllers update the status often. Other changes enqueue nothing."""
MAX_INTERNED_LENGTH = 80  # characters: longer strings are seldom equal
DROPPED_METADATA = ("managedFields",)  # half of an object's bytes, and never read

Owner = tuple[str, str]
"""Namespace and name of the InferenceDeployment that an object belongs to."""
Enqueue = Callable[[str, str], None]


class SyncState(Enum):
    """Sync state of a kind."""

    NOT_SYNCED = auto()
    SYNCED = auto()
    NOT_SERVED = auto()  # by this cluster, or no permission to watch it


def owner_of(kind: str, manifest: Manifest) -> Owner:
    """Return the owner that an object's label names. Only its owner reference proves the ownership."""
    metadata = manifest["metadata"]
    own = metadata["name"] if kind == KIND else (metadata.get("labels") or {}).get(DEPLOYMENT_LABEL, "")
    return str(metadata.get("namespace", "")), str(own)


def version_of(manifest: Manifest) -> int | None:
    """Return the resourceVersion of an object or list. None if it is not a number and cannot be compared."""
    text = str(manifest["metadata"].get("resourceVersion", ""))
    return int(text) if text.isdecimal() else None


@dataclass(slots=True)
class Store:
    """Cached objects of one kind, in one namespace or in all."""

    kind: str
    namespace: str | None = None
    sync_state: SyncState = SyncState.NOT_SYNCED
    last_event_at: float = 0.0
    """Time of the last event or bookmark (monotonic)."""
    version: int = 0
    """Latest resourceVersion that was reported."""
    expires: bool = True
    """True if silence makes it stale. Kopf restarts its own watch, and reports no event while nothing changes."""
    _objects: dict[Owner, dict[str, Manifest]] = field(default_factory=dict)
    """Objects by owner and name."""
    _owners: dict[Owner, Owner] = field(default_factory=dict)
    """Owner by namespace and name of an object."""

    def of(self, owner: Owner) -> tuple[Manifest, ...]:
        """Return the objects of an owner, sorted by name."""
        return tuple(stored for _, stored in sorted(self._objects.get(owner, {}).items()))

    def get(self, manifest: Manifest) -> Manifest | None:
        """Return the cached object with the name of this one. None if there is none."""
        metadata = manifest["metadata"]
        owner = self._owners.get((str(metadata.get("namespace", "")), metadata["name"]))
        return None if owner is None else self._objects[owner].get(metadata["name"])

    def find_owner(self, namespace: str, name: str) -> Owner | None:
        """Return the owner of an object. None if there is no object with this name."""
        return self._owners.get((namespace, name))

    def owners(self) -> Iterator[Owner]:
        """Return all owners that have objects."""
        return iter(self._objects)

    def replace(self, items: Iterable[Manifest], version: int | None) -> set[Owner]:
        """Replace all objects by a list. Return the owners whose objects changed."""
        before = {owner: dict(stored) for owner, stored in self._objects.items()}
        self._objects.clear()
        self._owners.clear()
        for item in items:
            self._put(item)
        self.version = version or 0
        owners = before.keys() | self._objects.keys()
        return {owner for owner in owners if _versions(before, owner) != _versions(self._objects, owner)}

    def put(self, manifest: Manifest) -> Owner:
        """Add or replace an object. Return its owner."""
        self.version = max(self.version, version_of(manifest) or 0)
        self._drop(manifest)
        return self._put(manifest)

    def drop(self, manifest: Manifest) -> Owner:
        """Remove an object. Return its owner."""
        self.version = max(self.version, version_of(manifest) or 0)
        return self._drop(manifest) or owner_of(self.kind, manifest)

    def _put(self, manifest: Manifest) -> Owner:
        owner = owner_of(self.kind, manifest)
        metadata = {key: value for key, value in manifest["metadata"].items() if key not in DROPPED_METADATA}
        stored = {"kind": self.kind, **manifest, "metadata": metadata}
        with suppress(RecursionError):  # deeply nested objects are stored without interning
            stored = intern_strings(stored)
        self._objects.setdefault(owner, {})[metadata["name"]] = stored
        self._owners[owner[0], metadata["name"]] = owner
        return owner

    def _drop(self, manifest: Manifest) -> Owner | None:
        metadata = manifest["metadata"]
        owner = self._owners.pop((str(metadata.get("namespace", "")), metadata["name"]), None)
        if owner is not None:
            stored = self._objects[owner]
            stored.pop(metadata["name"], None)
            if not stored:
                del self._objects[owner]
        return owner


def intern_strings(value: Any) -> Any:
    """Return a copy with interned keys and short strings: a thousand resources share most of them."""
    if isinstance(value, dict):
        return {sys.intern(key): intern_strings(part) for key, part in value.items()}
    if isinstance(value, list):
        return [intern_strings(part) for part in value]
    return sys.intern(value) if type(value) is str and len(value) <= MAX_INTERNED_LENGTH else value


def _is_irrelevant_change(kind: str, before: Manifest | None, after: Manifest | None) -> bool:
    """Return True if only the version and status fields that no plan reads have changed."""
    if kind not in RELEVANT_STATUS_FIELDS or before is None or after is None:
        return False
    return _relevant_content(kind, before) == _relevant_content(kind, after)


def _relevant_content(kind: str, manifest: Manifest) -> dict[str, Any]:
    metadata = {key: value for key, value in manifest["metadata"].items() if key != "resourceVersion"}
    status = manifest.get("status") or {}
    read = {field: status.get(field) for field in RELEVANT_STATUS_FIELDS[kind] if _is_status_relevant(kind, metadata)}
    return {**manifest, "metadata": metadata, "status": read}


def _is_status_relevant(kind: str, metadata: Mapping[str, Any]) -> bool:
    """Return True if a plan reads the status. `observedGeneration` matters only after a template change."""
    return kind != "StatefulSet" or metadata.get("generation") != 1


def _versions(objects: Mapping[Owner, Mapping[str, Manifest]], owner: Owner) -> dict[str, str]:
    found = objects.get(owner, {})
    return {name: str(stored["metadata"].get("resourceVersion", "")) for name, stored in found.items()}


@dataclass(frozen=True, slots=True)
class PendingWrite:
    """Write of this process that a watch has not reported yet: up to a version, or a deleted uid."""

    kind: str
    version: int | None = None
    gone: str | None = None


class Cache:
    """All stores, and the pending writes of this process. `enqueue` is called with the owner of each change."""

    def __init__(
        self,
        stores: Iterable[Store],
        enqueue: Enqueue = lambda _namespace, _name: None,
        *,
        clock: Callable[[], float] = time.monotonic,
        settle_seconds: float = SETTLE_SECONDS,
    ) -> None:
        self.enqueue = enqueue
        self._stores = {(store.kind, store.namespace): store for store in stores}
        self._clock = clock
        self._settle_seconds = settle_seconds
        self._written: dict[Owner, set[PendingWrite]] = {}
        self._progress: dict[Owner, asyncio.Event] = {}

    @property
    def stores(self) -> tuple[Store, ...]:
        return tuple(self._stores.values())

    # --- reads --------------------------------------------------------------------------------------------------------

    def age_of(self, kind: str) -> float:
        """Return the seconds since the last event or bookmark of a kind; 0 if the cluster does not serve it."""
        stores = (store for store in self.stores if store.kind == kind and store.sync_state is SyncState.SYNCED)
        return max((self._clock() - store.last_event_at for store in stores), default=0.0)

    def is_synced(self, kind: str, namespace: str) -> bool:
        """Return True if the kind is listed and its watch is alive."""
        store = self._store(kind, namespace)
        return store is not None and store.sync_state is SyncState.SYNCED and not self._is_stale(store)

    def is_not_served(self, kind: str, namespace: str) -> bool:
        """Return True if the kind cannot be watched."""
        store = self._store(kind, namespace)
        return store is not None and store.sync_state is SyncState.NOT_SERVED

    def of(self, kind: str, owner: Owner) -> tuple[Manifest, ...]:
        """Return the objects of a kind that belong to an owner."""
        store = self._store(kind, owner[0])
        return () if store is None else store.of(owner)

    def list_all(self, kind: str, namespace: str | None) -> list[Manifest] | None:
        """Return all objects of a kind, in one namespace or in all. None if the kind is not synced."""
        store = self._stores.get((kind, namespace))
        if store is None or store.sync_state is not SyncState.SYNCED or self._is_stale(store):
            return None
        return [stored for owner in store.owners() for stored in store.of(owner)]

    async def wait_until_settled(self, owner: Owner) -> bool:
        """Wait until the watches have reported all writes of this process to a resource. Return False after the
        timeout.
        """
        try:
            async with asyncio.timeout(self._settle_seconds):
                while not self._is_settled(owner):
                    progress = self._progress.setdefault(owner, asyncio.Event())
                    progress.clear()
                    await progress.wait()
        except TimeoutError:
            return False
        return True

    def forget(self, owner: Owner) -> None:
        """Drop the pending writes of a deleted resource."""
        self._written.pop(owner, None)
        self._progress.pop(owner, None)

    # --- writes of this process ---------------------------------------------------------------------------------------

    def record_write(self, kind: str, owner: Owner, answer: Manifest) -> None:
        """Record the API server's response to a write."""
        self._written.setdefault(owner, set()).add(PendingWrite(kind, version=version_of(answer) or None))

    def record_delete(self, kind: str, namespace: str, name: str, uid: str) -> None:
        """Record a delete request. An object that was never cached is not waited for."""
        store = self._store(kind, namespace)
        owner = None if store is None else store.find_owner(namespace, name)
        if owner is not None:
            self._written.setdefault(owner, set()).add(PendingWrite(kind, gone=uid))

    # --- events of watches --------------------------------------------------------------------------------------------

    def replace_all(self, store: Store, items: Iterable[Manifest], version: int | None) -> None:
        """Apply a complete list."""
        changed = store.replace(items, version)
        store.sync_state = SyncState.SYNCED
        self.mark_alive(store)
        for owner in changed:
            self._notify(owner)
        for progress in self._progress.values():
            progress.set()

    def apply_kopf_event(self, kind: str, event: str | None, manifest: Manifest) -> None:
        """Apply an event of a watch that Kopf runs, after its first list is complete. An event type of None means
        that the object was listed.
        """
        for store in self.stores:
            if store.kind == kind:
                store.sync_state, store.expires = SyncState.SYNCED, False
        target = self._store(kind, str(manifest["metadata"].get("namespace", "")))
        assert target is not None
        self.apply_event(target, event or "MODIFIED", manifest)

    def discard(self, kind: str, owner: Owner, uid: str) -> None:
        """Drop an object that the API server no longer has. Kopf does not report deletions that happened while it
        had to list again.
        """
        store = self._store(kind, owner[0])
        for manifest in () if store is None else store.of(owner):
            if store is not None and manifest["metadata"].get("uid") == uid:
                store.drop(manifest)

    def apply_event(self, store: Store, event: str, manifest: Manifest) -> None:
        """Apply a watch event: ADDED, MODIFIED or DELETED."""
        self.mark_alive(store)
        is_gone, before = event == "DELETED", store.get(manifest)
        owner = store.drop(manifest) if is_gone else store.put(manifest)
        is_ignored = (
            store.kind in STATE_KINDS
            or self._is_echo(store, owner, manifest)
            or _is_irrelevant_change(store.kind, before, store.get(manifest))
        )
        if not is_gone and is_ignored:
            self._wake_waiters(owner)
        else:
            self._notify(owner)

    def mark_alive(self, store: Store, version: int | None = None) -> None:
        """Record that the watch of a kind is alive, up to this version."""
        store.last_event_at = self._clock()
        store.version = max(store.version, version or 0)

    def mark_not_served(self, store: Store) -> None:
        """Record that a kind cannot be watched."""
        store.sync_state = SyncState.NOT_SERVED

    def _is_echo(self, store: Store, owner: Owner, manifest: Manifest) -> bool:
        """Return True if the event is an unchanged write of this process. It needs no reconcile unless the API
        server adds fields that the next plan needs.
        """
        echo = PendingWrite(store.kind, version=version_of(manifest))
        return (
            store.kind not in SERVER_COMPLETED_KINDS
            and echo.version is not None
            and echo in self._written.get(owner, ())
        )

    def _notify(self, owner: Owner) -> None:
        self._wake_waiters(owner)
        self.enqueue(*owner)

    def _wake_waiters(self, owner: Owner) -> None:
        progress = self._progress.get(owner)
        if progress is not None:
            progress.set()

    def _store(self, kind: str, namespace: str) -> Store | None:
        return self._stores.get((kind, namespace)) or self._stores.get((kind, None))

    def _is_stale(self, store: Store) -> bool:
        return store.expires and self._clock() - store.last_event_at > STALE_SECONDS

    def _is_settled(self, owner: Owner) -> bool:
        left = {written for written in self._written.get(owner, ()) if not self._is_observed(owner, written)}
        if left:
            self._written[owner] = left
            return False
        self._written.pop(owner, None)
        self._progress.pop(owner, None)
        return True

    def _is_observed(self, owner: Owner, written: PendingWrite) -> bool:
        store = self._store(written.kind, owner[0])
        if store is None or store.sync_state is not SyncState.SYNCED:
            return True  # it is read from the API server
        if written.gone is None:
            return written.version is not None and store.version >= written.version
        present = [stored for stored in store.of(owner) if stored["metadata"].get("uid") == written.gone]
        return all(is_terminating(stored) for stored in present)

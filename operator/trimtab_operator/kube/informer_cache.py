"""What the API server has told of our resources and their children, kept by watches: a look asks nobody.

A cache lags. What keeps that harmless: a look waits for what this process itself has written (`settled`); whoever acts
by what is cached reads that again first (`reconcile/observer.py`); and a kind that is not heard of is asked for as if
there were no cache. No I/O here: `kube/watches.py` brings what is said. ADR-0034.
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

SILENT_SECONDS = 75.0  # a kind that was not heard of for so long may be anything by now
SETTLE_SECONDS = 5.0  # a watch tells of a write within milliseconds
OWN_NOTES = ("ConfigMap",)  # what a loop remembers: written in many turns, and no reason for another one
ANSWERED = ("Service",)  # it is given an address, at which ranks of a replica meet
STATUS_READ: Mapping[str, tuple[str, ...]] = {"StatefulSet": ("observedGeneration",), "PodDisruptionBudget": ()}
"""What turns read of the status of kinds whose controllers write it again and again: the rest is no reason for one."""
SHORT_WORD = 80  # letters: longer texts are seldom the same
NOT_READ = ("managedFields",)  # of metadata: half of an object's bytes, and nobody asks

Owner = tuple[str, str]
"""Namespace and name of the resource that something belongs to."""
Rings = Callable[[str, str], None]


class Heard(Enum):
    """Whether a kind is known by a watch."""

    NOT_YET = auto()
    LISTED = auto()
    NOT_SERVED = auto()  # by this cluster, or there is no right to watch it


def owner_of(kind: str, manifest: Manifest) -> Owner:
    """Whom an object says it belongs to. That it does is for its owner reference to show."""
    metadata = manifest["metadata"]
    own = metadata["name"] if kind == KIND else (metadata.get("labels") or {}).get(DEPLOYMENT_LABEL, "")
    return str(metadata.get("namespace", "")), str(own)


def version_of(manifest: Manifest) -> int | None:
    """The version of an object, or of a list; None where it is no number, and so cannot be compared."""
    said = str(manifest["metadata"].get("resourceVersion", ""))
    return int(said) if said.isdecimal() else None


@dataclass(slots=True)
class Store:
    """The objects of one kind, in one namespace or in all, as far as a watch has told of them."""

    kind: str
    namespace: str | None = None
    heard: Heard = Heard.NOT_YET
    heard_at: float = 0.0
    """When anything was last heard (monotonic)."""
    version: int = 0
    """Of the latest that was told."""
    expires: bool = True
    """True if silence makes it stale. Kopf restarts its own watch, and reports no event while nothing changes."""
    _objects: dict[Owner, dict[str, Manifest]] = field(default_factory=dict)
    """By whom they belong to, and by name."""
    _homes: dict[Owner, Owner] = field(default_factory=dict)
    """By namespace and name of an object, whom it belongs to."""

    def of(self, owner: Owner) -> tuple[Manifest, ...]:
        """What belongs to a resource, by name."""
        return tuple(made for _, made in sorted(self._objects.get(owner, {}).items()))

    def known(self, manifest: Manifest) -> Manifest | None:
        """The object of this name as it was told last; None where there is none."""
        metadata = manifest["metadata"]
        home = self._homes.get((str(metadata.get("namespace", "")), metadata["name"]))
        return None if home is None else self._objects[home].get(metadata["name"])

    def home_of(self, namespace: str, name: str) -> Owner | None:
        """Whom an object belongs to; None where there is none of this name."""
        return self._homes.get((namespace, name))

    def owners(self) -> Iterator[Owner]:
        """All to whom something belongs."""
        return iter(self._objects)

    def replace(self, items: Iterable[Manifest], version: int | None) -> set[Owner]:
        """Take a whole list in; whose objects changed by it."""
        before = {owner: dict(made) for owner, made in self._objects.items()}
        self._objects.clear()
        self._homes.clear()
        for item in items:
            self._put(item)
        self.version = version or 0
        owners = before.keys() | self._objects.keys()
        return {owner for owner in owners if _versions(before, owner) != _versions(self._objects, owner)}

    def put(self, manifest: Manifest) -> Owner:
        """Take one object in; whom it belongs to."""
        self.version = max(self.version, version_of(manifest) or 0)
        self._drop(manifest)
        return self._put(manifest)

    def drop(self, manifest: Manifest) -> Owner:
        """Forget one object; whom it belonged to."""
        self.version = max(self.version, version_of(manifest) or 0)
        return self._drop(manifest) or owner_of(self.kind, manifest)

    def _put(self, manifest: Manifest) -> Owner:
        owner = owner_of(self.kind, manifest)
        metadata = {key: value for key, value in manifest["metadata"].items() if key not in NOT_READ}
        kept = {"kind": self.kind, **manifest, "metadata": metadata}
        with suppress(RecursionError):  # what is nested that deep is kept as it came
            kept = shared(kept)
        self._objects.setdefault(owner, {})[metadata["name"]] = kept
        self._homes[owner[0], metadata["name"]] = owner
        return owner

    def _drop(self, manifest: Manifest) -> Owner | None:
        metadata = manifest["metadata"]
        home = self._homes.pop((str(metadata.get("namespace", "")), metadata["name"]), None)
        if home is not None:
            made = self._objects[home]
            made.pop(metadata["name"], None)
            if not made:
                del self._objects[home]
        return home


def shared(value: Any) -> Any:
    """A copy whose names and short words are one in memory for all objects that have them: a thousand resources are
    told in the same words."""
    if isinstance(value, dict):
        return {sys.intern(key): shared(part) for key, part in value.items()}
    if isinstance(value, list):
        return [shared(part) for part in value]
    return sys.intern(value) if type(value) is str and len(value) <= SHORT_WORD else value


def _reads_the_same(kind: str, before: Manifest | None, after: Manifest | None) -> bool:
    """Whether nothing of an object has changed but its version and what of its status no turn reads."""
    if kind not in STATUS_READ or before is None or after is None:
        return False
    return _as_turns_read(kind, before) == _as_turns_read(kind, after)


def _as_turns_read(kind: str, manifest: Manifest) -> dict[str, Any]:
    metadata = {key: value for key, value in manifest["metadata"].items() if key != "resourceVersion"}
    status = manifest.get("status") or {}
    read = {field: status.get(field) for field in STATUS_READ[kind] if _matters(kind, metadata)}
    return {**manifest, "metadata": metadata, "status": read}


def _matters(kind: str, metadata: Mapping[str, Any]) -> bool:
    """Which template a controller has seen is asked before pods are replaced: those of a first one are none."""
    return kind != "StatefulSet" or metadata.get("generation") != 1


def _versions(objects: Mapping[Owner, Mapping[str, Manifest]], owner: Owner) -> dict[str, str]:
    found = objects.get(owner, {})
    return {name: str(made["metadata"].get("resourceVersion", "")) for name, made in found.items()}


@dataclass(frozen=True, slots=True)
class Written:
    """What this process has written and a watch is still to tell: of a kind, up to a version, or that a uid is gone."""

    kind: str
    version: int | None = None
    gone: str | None = None


class Cache:
    """All stores, and what they are still to hear of our own writes. `rings` is called with whom a change concerns."""

    def __init__(
        self,
        stores: Iterable[Store],
        rings: Rings = lambda _namespace, _name: None,
        *,
        clock: Callable[[], float] = time.monotonic,
        settle_seconds: float = SETTLE_SECONDS,
    ) -> None:
        self.rings = rings
        self._stores = {(store.kind, store.namespace): store for store in stores}
        self._clock = clock
        self._settle_seconds = settle_seconds
        self._written: dict[Owner, set[Written]] = {}
        self._progress: dict[Owner, asyncio.Event] = {}

    @property
    def stores(self) -> tuple[Store, ...]:
        return tuple(self._stores.values())

    # --- what a look asks ---------------------------------------------------------------------------------------------

    def is_heard(self, kind: str, namespace: str) -> bool:
        """Whether a kind is known now, as it was a moment ago."""
        store = self._store(kind, namespace)
        return store is not None and store.heard is Heard.LISTED and not self._is_silent(store)

    def is_not_served(self, kind: str, namespace: str) -> bool:
        """Whether it is known that nothing will be heard of a kind."""
        store = self._store(kind, namespace)
        return store is not None and store.heard is Heard.NOT_SERVED

    def of(self, kind: str, owner: Owner) -> tuple[Manifest, ...]:
        """What of a kind belongs to a resource."""
        store = self._store(kind, owner[0])
        return () if store is None else store.of(owner)

    def all_of(self, kind: str, namespace: str | None) -> list[Manifest] | None:
        """Everything of a kind, in one namespace or in all; None where it is not known now."""
        store = self._stores.get((kind, namespace))
        if store is None or store.heard is not Heard.LISTED or self._is_silent(store):
            return None
        return [made for owner in store.owners() for made in store.of(owner)]

    async def settled(self, owner: Owner) -> bool:
        """Wait until all is heard that this process has written for a resource; whether it was, in time."""
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
        """Drop what was expected of a resource that is gone."""
        self._written.pop(owner, None)
        self._progress.pop(owner, None)

    # --- what this process writes -------------------------------------------------------------------------------------

    def wrote(self, kind: str, owner: Owner, answer: Manifest) -> None:
        """Note what the API server answered to a write."""
        self._written.setdefault(owner, set()).add(Written(kind, version=version_of(answer) or None))

    def deleted(self, kind: str, namespace: str, name: str, uid: str) -> None:
        """Note that an object was asked to go; one that was never heard of is not waited for."""
        store = self._store(kind, namespace)
        owner = None if store is None else store.home_of(namespace, name)
        if owner is not None:
            self._written.setdefault(owner, set()).add(Written(kind, gone=uid))

    # --- what watches tell --------------------------------------------------------------------------------------------

    def listed(self, store: Store, items: Iterable[Manifest], version: int | None) -> None:
        """Take in a whole list."""
        changed = store.replace(items, version)
        store.heard = Heard.LISTED
        self.alive(store)
        for owner in changed:
            self._told(owner)
        for progress in self._progress.values():
            progress.set()

    def received(self, kind: str, event: str | None, manifest: Manifest) -> None:
        """Take in an event of a watch that Kopf runs, after its first list is complete. None: the object was listed."""
        for store in self.stores:
            if store.kind == kind:
                store.heard, store.expires = Heard.LISTED, False
        target = self._store(kind, str(manifest["metadata"].get("namespace", "")))
        assert target is not None
        self.changed(target, event or "MODIFIED", manifest)

    def discard(self, kind: str, owner: Owner, uid: str) -> None:
        """Drop an object that the API server no longer has. Kopf does not report what was deleted while it had to list
        again."""
        store = self._store(kind, owner[0])
        for manifest in () if store is None else store.of(owner):
            if store is not None and manifest["metadata"].get("uid") == uid:
                store.drop(manifest)

    def changed(self, store: Store, event: str, manifest: Manifest) -> None:
        """Take in one event of a watch: ADDED, MODIFIED or DELETED."""
        self.alive(store)
        is_gone, before = event == "DELETED", store.known(manifest)
        owner = store.drop(manifest) if is_gone else store.put(manifest)
        is_no_news = (
            store.kind in OWN_NOTES
            or self._is_echo(store, owner, manifest)
            or _reads_the_same(store.kind, before, store.known(manifest))
        )
        if not is_gone and is_no_news:
            self._hurry(owner)
        else:
            self._told(owner)

    def alive(self, store: Store, version: int | None = None) -> None:
        """Note that a kind is still being told of, up to this version."""
        store.heard_at = self._clock()
        store.version = max(store.version, version or 0)

    def not_served(self, store: Store) -> None:
        """Note that nothing will be heard of a kind."""
        store.heard = Heard.NOT_SERVED

    def _is_echo(self, store: Store, owner: Owner, manifest: Manifest) -> bool:
        """Whether this is what we wrote ourselves, and nobody has touched since: news to nobody, unless the API server
        adds what the next turn needs."""
        echo = Written(store.kind, version=version_of(manifest))
        return store.kind not in ANSWERED and echo.version is not None and echo in self._written.get(owner, ())

    def _told(self, owner: Owner) -> None:
        self._hurry(owner)
        self.rings(*owner)

    def _hurry(self, owner: Owner) -> None:
        progress = self._progress.get(owner)
        if progress is not None:
            progress.set()

    def _store(self, kind: str, namespace: str) -> Store | None:
        return self._stores.get((kind, namespace)) or self._stores.get((kind, None))

    def _is_silent(self, store: Store) -> bool:
        return store.expires and self._clock() - store.heard_at > SILENT_SECONDS

    def _is_settled(self, owner: Owner) -> bool:
        left = {written for written in self._written.get(owner, ()) if not self._is_told(owner, written)}
        if left:
            self._written[owner] = left
            return False
        self._written.pop(owner, None)
        self._progress.pop(owner, None)
        return True

    def _is_told(self, owner: Owner, written: Written) -> bool:
        store = self._store(written.kind, owner[0])
        if store is None or store.heard is not Heard.LISTED:
            return True  # it is asked for anew
        if written.gone is None:
            return written.version is not None and store.version >= written.version
        present = [made for made in store.of(owner) if made["metadata"].get("uid") == written.gone]
        return all(is_terminating(made) for made in present)

"""What all resources ask for and hold of the GPU budget, kept in the process that leads: it runs all their loops.

A loop puts its resource's stake before it acts by it, and only if its share is still what it reckoned with: so two that
decide at once do not both take what is left. A resource whose loop has not spoken yet counts as the cache knows it.
Nothing is stored: a new process hears all of it again from the cache and from its loops.
"""

from __future__ import annotations

from collections.abc import Callable

from trimtab_operator.kube.informer_cache import Cache, Owner
from trimtab_operator.observed.groups import Observed
from trimtab_operator.planning.gpu_budget import Stake, room_beside, shares_now, stake_of, standing_stake
from trimtab_operator.planning.snapshot import as_read
from trimtab_operator.resource.installation import GpuBudget
from trimtab_operator.resource.manifest import Manifest
from trimtab_operator.resource.spec import KIND

Rings = Callable[[str, str], None]


class Stakes:
    """The stakes. `rings` is called with namespace and name of each resource whose share another one has changed."""

    def __init__(self, budget: GpuBudget, rings: Rings, cache: Cache | None = None) -> None:
        self._budget = budget
        self._rings = rings
        self._cache = cache
        self._stakes: dict[str, Stake] = {}

    def of_others(self, namespace: str, name: str) -> tuple[Stake, ...] | None:
        """What all but this resource ask for and hold; None where it is not known which others there are."""
        if self._cache is not None and not self._match(self._cache):
            return None
        return tuple(stake for key, stake in self._stakes.items() if key != f"{namespace}/{name}")

    def put(self, stake: Stake, count: int, *, beside: int = 0, grows: bool = True) -> bool:
        """Take so many replicas for a resource, and so many beside them while a change rolls, those that go counted,
        where that is still its share; whether it was. Fewer than there are can always be taken. `grows`: those that run
        take what they lack to be what is asked for, too."""
        before = self._stakes.get(stake.key)
        others = [other for key, other in self._stakes.items() if key != stake.key]
        grown = stake.lacks(count) if grows else 0
        if count > stake.running or grown:
            granted = shares_now((stake, *others), self._budget)[stake.key]
            if granted.replicas < count or (grown and not granted.grows):
                return False
        is_more = beside > 0 and count + beside > stake.running
        if is_more and room_beside(stake, count, others, self._budget).now < count + beside - max(stake.running, count):
            return False
        self._change(stake.key, before, stake.with_replicas(count, beside=beside, grows=grows))
        return True

    def forget(self, namespace: str, name: str) -> None:
        """A resource is gone."""
        key = f"{namespace}/{name}"
        self._change(key, self._stakes.get(key), None)

    def _change(self, key: str, before: Stake | None, after: Stake | None) -> None:
        """Put one in the place of another, and ring where that changes what others get."""
        if before == after:
            return
        shares = shares_now(tuple(self._stakes.values()), self._budget)
        self._stakes.pop(key, None)
        if after is not None:
            self._stakes[key] = after
        for other, granted in shares_now(tuple(self._stakes.values()), self._budget).items():
            if other != key and shares.get(other) != granted:
                namespace, _, name = other.partition("/")
                self._rings(namespace, name)

    def _match(self, cache: Cache) -> bool:
        """Bring the stakes in line with which resources there are; whether that is known."""
        bodies: dict[str, Manifest] = {}
        for store in cache.stores:
            if store.kind != KIND:
                continue
            present = cache.all_of(KIND, store.namespace)
            if present is None:
                return False
            bodies.update({f"{body['metadata']['namespace']}/{body['metadata']['name']}": body for body in present})
        for key in [key for key in self._stakes if key not in bodies]:
            self._change(key, self._stakes[key], None)
        for key, body in bodies.items():
            if key not in self._stakes:
                self._stakes[key] = _as_cached(cache, (body["metadata"]["namespace"], body["metadata"]["name"]), body)
        return True


def _as_cached(cache: Cache, owner: Owner, body: Manifest) -> Stake:
    """The stake of a resource that no loop of this process has looked at yet, by its children and its status."""
    children = Observed(stateful_sets=cache.of("StatefulSet", owner), pods=cache.of("Pod", owner))
    deployment, misread = as_read(body, default_image=None)
    stake = standing_stake(deployment, children)
    if misread or deployment.is_paused:
        return stake
    asked = [deployment.status.get(field) for field in ("wantedReplicas", "desiredReplicas")]
    wanted = next((count for count in asked if isinstance(count, int) and not isinstance(count, bool)), stake.running)
    return stake_of(deployment, children, wanted=max(0, wanted))

"""What all resources ask for and hold of the GPU budget, kept in the process that leads: it runs all their loops.

A loop puts its resource's stake before it acts by it, and only if its share is still what it reckoned with: so two that
decide at once do not both take what is left. A resource whose loop has not spoken yet counts as the cache knows it.
Nothing is stored: a new process hears all of it again from the cache and from its loops.
"""

from __future__ import annotations

from collections.abc import Callable

from trimtab_operator.kube.informer_cache import Cache, Owner
from trimtab_operator.observed.groups import ObservedChildren
from trimtab_operator.planning.gpu_budget import (
    GpuClaim,
    build_gpu_claim,
    current_gpu_claim,
    current_grants,
    surge_room,
)
from trimtab_operator.planning.snapshot import parse_resource
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
        self._stakes: dict[str, GpuClaim] = {}

    def of_others(self, namespace: str, name: str) -> tuple[GpuClaim, ...] | None:
        """What all but this resource ask for and hold; None where it is not known which others there are."""
        if self._cache is not None and not self._match(self._cache):
            return None
        return tuple(gpu_claim for key, gpu_claim in self._stakes.items() if key != f"{namespace}/{name}")

    def put(self, gpu_claim: GpuClaim, count: int, *, beside: int = 0, grows: bool = True) -> bool:
        """Take so many replicas for a resource, and so many beside them while a change rolls, those that go counted,
        where that is still its share; whether it was. Fewer than there are can always be taken. `grows`: those that run
        take what they lack to be what is asked for, too."""
        before = self._stakes.get(gpu_claim.key)
        others = [other for key, other in self._stakes.items() if key != gpu_claim.key]
        grown = gpu_claim.missing_gpus(count) if grows else 0
        if count > gpu_claim.running or grown:
            granted = current_grants((gpu_claim, *others), self._budget)[gpu_claim.key]
            if granted.replicas < count or (grown and not granted.grows):
                return False
        is_more = beside > 0 and count + beside > gpu_claim.running
        if is_more and surge_room(gpu_claim, count, others, self._budget).now < count + beside - max(
            gpu_claim.running, count
        ):
            return False
        self._change(gpu_claim.key, before, gpu_claim.with_grant(count, beside=beside, grows=grows))
        return True

    def forget(self, namespace: str, name: str) -> None:
        """A resource is gone."""
        key = f"{namespace}/{name}"
        self._change(key, self._stakes.get(key), None)

    def _change(self, key: str, before: GpuClaim | None, after: GpuClaim | None) -> None:
        """Put one in the place of another, and ring where that changes what others get."""
        if before == after:
            return
        shares = current_grants(tuple(self._stakes.values()), self._budget)
        self._stakes.pop(key, None)
        if after is not None:
            self._stakes[key] = after
        for other, granted in current_grants(tuple(self._stakes.values()), self._budget).items():
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


def _as_cached(cache: Cache, owner: Owner, body: Manifest) -> GpuClaim:
    """The stake of a resource that no loop of this process has looked at yet, by its children and its status."""
    children = ObservedChildren(stateful_sets=cache.of("StatefulSet", owner), pods=cache.of("Pod", owner))
    deployment, parse_errors = parse_resource(body, default_image=None)
    gpu_claim = current_gpu_claim(deployment, children)
    if parse_errors or deployment.is_paused:
        return gpu_claim
    asked = [deployment.status.get(field) for field in ("wantedReplicas", "desiredReplicas")]
    wanted = next(
        (count for count in asked if isinstance(count, int) and not isinstance(count, bool)), gpu_claim.running
    )
    return build_gpu_claim(deployment, children, wanted=max(0, wanted))

"""GPU claims of all resources against the GPU budget, in the memory of the leading process, which runs all loops.

A loop reserves its claim before it acts on it. The reservation succeeds only if its grant is unchanged, so two
concurrent plans cannot both take the last GPUs. A resource without a reservation counts as in the cache. Nothing is
persisted: a new leader rebuilds the claims from the cache and from its loops.
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

Enqueue = Callable[[str, str], None]


class GpuClaims:
    """GPU claims by resource. `enqueue` is called with the namespace and name of each resource whose grant changed."""

    def __init__(self, budget: GpuBudget, enqueue: Enqueue, cache: Cache | None = None) -> None:
        self._budget = budget
        self._enqueue = enqueue
        self._cache = cache
        self._claims: dict[str, GpuClaim] = {}

    def other_claims(self, namespace: str, name: str) -> tuple[GpuClaim, ...] | None:
        """Return the claims of all other resources. None if the list of resources is not known."""
        if self._cache is not None and not self._sync_with_cache(self._cache):
            return None
        return tuple(gpu_claim for key, gpu_claim in self._claims.items() if key != f"{namespace}/{name}")

    def reserve(self, gpu_claim: GpuClaim, count: int, *, beside: int = 0, grows: bool = True) -> bool:
        """Reserve `count` replicas, and `beside` surge replicas during a rollout, terminating ones included.

        Return False if they exceed the current grant. Scaling in always succeeds. With `grows`, running replicas also
        reserve the additional GPUs of the desired spec.
        """
        before = self._claims.get(gpu_claim.key)
        others = [other for key, other in self._claims.items() if key != gpu_claim.key]
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
        self._replace_claim(gpu_claim.key, before, gpu_claim.with_grant(count, beside=beside, grows=grows))
        return True

    def forget(self, namespace: str, name: str) -> None:
        """Drop the claim of a deleted resource."""
        key = f"{namespace}/{name}"
        self._replace_claim(key, self._claims.get(key), None)

    def _replace_claim(self, key: str, before: GpuClaim | None, after: GpuClaim | None) -> None:
        """Replace a claim, and enqueue the other resources whose grants change."""
        if before == after:
            return
        shares = current_grants(tuple(self._claims.values()), self._budget)
        self._claims.pop(key, None)
        if after is not None:
            self._claims[key] = after
        for other, granted in current_grants(tuple(self._claims.values()), self._budget).items():
            if other != key and shares.get(other) != granted:
                namespace, _, name = other.partition("/")
                self._enqueue(namespace, name)

    def _sync_with_cache(self, cache: Cache) -> bool:
        """Drop claims of deleted resources and add those of new ones. Return False if the list of resources is not
        known.
        """
        bodies: dict[str, Manifest] = {}
        for store in cache.stores:
            if store.kind != KIND:
                continue
            present = cache.list_all(KIND, store.namespace)
            if present is None:
                return False
            bodies.update({f"{body['metadata']['namespace']}/{body['metadata']['name']}": body for body in present})
        for key in [key for key in self._claims if key not in bodies]:
            self._replace_claim(key, self._claims[key], None)
        for key, body in bodies.items():
            if key not in self._claims:
                self._claims[key] = _claim_from_cache(
                    cache, (body["metadata"]["namespace"], body["metadata"]["name"]), body
                )
        return True


def _claim_from_cache(cache: Cache, owner: Owner, body: Manifest) -> GpuClaim:
    """Return the claim of a resource that no loop of this process has observed yet, from its children and status."""
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

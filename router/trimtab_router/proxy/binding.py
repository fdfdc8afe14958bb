"""Late binding of requests to replicas, for the proxy and for the endpoint picker.

A request is bound to a replica while some replica's predicted queue is at most one full step long. Otherwise it is
held, so that priorities, fairness and the choice of the replica are decided as late as possible.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from time import monotonic

from trimtab_router.config import RouterConfig
from trimtab_router.hold.queue import HeldRequest, HoldQueue
from trimtab_router.metrics import RouterMetrics
from trimtab_router.proxy.demand import Demand
from trimtab_router.proxy.description import Description
from trimtab_router.proxy.errors import HttpError
from trimtab_router.scoring.score import choose
from trimtab_router.scoring.state import Choice
from trimtab_router.state_stream.registry import Registry

TRIED_SECONDS = 1.0
"""Time until a replica that failed a request may be tried again by it, if there is no other."""
TICK_SECONDS = 0.02
"""Interval of another look at the queue while requests are held: a predicted queue shrinks as time passes."""
EXPIRY_SECONDS = 0.25
RETRY_AFTER_SECONDS = 5
"""Retry-After of rejected requests."""


class BindableRequest(HeldRequest):
    """A request that needs a replica."""

    __slots__ = ("arrived_at", "description", "tried", "was_held")

    def __init__(self, num_bytes: int, arrived_at: float) -> None:
        super().__init__(tenant="", priority=0, num_bytes=num_bytes, held_at=arrived_at)
        self.arrived_at = arrived_at
        self.description: Description | None = None
        self.tried: frozenset[str] = frozenset()
        """Replicas that have failed this request."""
        self.was_held = False

    def excluded(self, now: float) -> frozenset[str]:
        """Return the replicas that must not be chosen."""
        return self.tried

    @property
    def is_restricted(self) -> bool:
        """True if the request may not use every replica, so that others can be served while it waits."""
        return bool(self.tried)

    def on_hold(self) -> None:
        """Handle that the request is held for the first time."""

    def bind(self, choice: Choice, now: float) -> None:
        """Use the chosen replica."""
        raise NotImplementedError

    def fail(self, error: HttpError) -> None:
        """Answer with an error."""
        raise NotImplementedError


class Binder:
    """Binds requests to replicas, or holds them."""

    def __init__(self, config: RouterConfig, registry: Registry, metrics: RouterMetrics) -> None:
        self.queue = HoldQueue(config.max_held_requests, config.max_held_bytes)
        self.demand = Demand()
        self._config, self._registry, self._metrics = config, registry, metrics
        self._rng = random.Random()
        self._loop = asyncio.get_running_loop()
        self._parked: dict[BindableRequest, asyncio.TimerHandle] = {}
        """Requests that wait before their next attempt."""
        self._is_scheduled = False
        self._tick: asyncio.TimerHandle | None = None
        self._expires_at = 0.0
        registry.on_change = self.schedule

    @property
    def num_held(self) -> int:
        """Number of requests that are waiting for a replica."""
        return len(self.queue) + len(self._parked)

    def submit(self, request: BindableRequest, description: Description) -> None:
        """Bind a request that has arrived, or hold it."""
        request.description = description
        request.tenant, request.priority = description.routed.tenant, description.routed.priority
        now = monotonic()
        self.demand.arrive(description.routed.prompt_tokens, now)
        self._metrics.offered(description.routed.prompt_tokens)
        if not len(self.queue) or not description.computes:
            choice = self._choose(request, now)
            if choice is not None and _may_bind(request, choice):
                self._bind(request, choice, now)
                return
        self._hold(request, now)

    def cancel(self, request: BindableRequest) -> None:
        """Forget a request whose client left, if it waits."""
        timer = self._parked.pop(request, None)
        if timer is not None:
            timer.cancel()
        elif request in self.queue:
            self.queue.remove(request)
        self._report_held()
        self.schedule()

    def park(
        self, request: BindableRequest, seconds: float, resume: Callable[[BindableRequest], None] | None = None
    ) -> None:
        """Hold a request for some time before its next attempt. `resume` then gets it instead of the queue."""
        self._mark_held(request)
        self._parked[request] = self._loop.call_later(seconds, self._unpark, request, resume or self._requeue)

    def schedule(self) -> None:
        """Look at the queue at the end of this iteration of the event loop."""
        if len(self.queue) and not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._pump)

    # --- holding --------------------------------------------------------------------------------------------------

    def _hold(self, request: BindableRequest, now: float) -> None:
        if self._config.max_hold_seconds <= 0:
            self._reject(request, now)
            return
        self._mark_held(request)
        for rejected in self.queue.push(request):
            assert isinstance(rejected, BindableRequest)
            self._fail(rejected, 429, "too many requests are waiting; try again later", "queue-full")
        self._report_held()
        self._start_tick()

    def _mark_held(self, request: BindableRequest) -> None:
        if not request.was_held:
            request.was_held = True
            request.on_hold()

    def _pump(self) -> None:
        """Bind held requests while some replica has room."""
        self._is_scheduled = False
        now = monotonic()
        if now >= self._expires_at:
            self._expire(now)
        while (held := self.queue.head(now)) is not None:
            assert isinstance(held, BindableRequest)
            choice = self._choose(held, now)
            if choice is None and held.is_restricted:
                self.queue.remove(held)
                self.park(held, TRIED_SECONDS, self._forget_tried)
                continue
            if choice is None or not _may_bind(held, choice):
                break
            assert held.description is not None
            self.queue.serve(held, held.description.routed.prompt_tokens - choice.best.cached_tokens)
            self._bind(held, choice, now)
        self._report_held()
        self._start_tick()

    def _expire(self, now: float) -> None:
        """Reject requests that have been held for too long."""
        self._expires_at = now + EXPIRY_SECONDS
        for expired in self.queue.expired(now - self._config.max_hold_seconds):
            assert isinstance(expired, BindableRequest)
            self.queue.remove(expired)
            self._reject(expired, now)

    def _start_tick(self) -> None:
        if len(self.queue) and self._tick is None:
            self._tick = self._loop.call_later(TICK_SECONDS, self._on_tick)

    def _on_tick(self) -> None:
        self._tick = None
        self._pump()

    def _unpark(self, request: BindableRequest, resume: Callable[[BindableRequest], None]) -> None:
        del self._parked[request]
        resume(request)

    def _requeue(self, request: BindableRequest) -> None:
        self.queue.push_front(request)
        self._pump()

    def _forget_tried(self, request: BindableRequest) -> None:
        request.tried = frozenset()
        self._requeue(request)

    def _report_held(self) -> None:
        self.demand.set_held(self.num_held, self.queue.oldest())

    # --- choice ---------------------------------------------------------------------------------------------------

    def _choose(self, request: BindableRequest, now: float) -> Choice | None:
        assert request.description is not None
        return choose(
            request.description.routed,
            self._registry.replicas(now),
            self._registry.index,
            now,
            self._rng,
            request.excluded(now),
            itl_target=self._config.itl_target_seconds,
        )

    def _bind(self, request: BindableRequest, choice: Choice, now: float) -> None:
        assert request.description is not None
        self._metrics.bound(request.description.routed, choice, now - request.arrived_at)
        request.bind(choice, now)

    def _reject(self, request: BindableRequest, now: float) -> None:
        """Answer a request that cannot be held, or not any longer."""
        if self._registry.replicas(now):
            self._fail(request, 429, "all replicas are busy; try again later", "max-hold")
        else:
            self._fail(request, 503, "no replica is available; try again later", "no-replica")

    def _fail(self, request: BindableRequest, status: int, message: str, reason: str) -> None:
        self._metrics.dropped(reason)
        request.fail(HttpError(status, message, retry_after=RETRY_AFTER_SECONDS, reason=reason))


def _may_bind(request: BindableRequest, choice: Choice) -> bool:
    assert request.description is not None
    return not request.description.computes or choice.has_room

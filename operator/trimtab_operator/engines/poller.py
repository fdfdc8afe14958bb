"""Poller of the engines of one resource: reads their state and patches their live fields.

Engine responses are untrusted and may never arrive; a poll waits at most ENGINE_TIMEOUT_SECONDS. A request that is
still in flight continues in the background, and the next poll takes its result; meanwhile the engine is not polled
again and not waited for. The last observation of a late engine stays valid for a while, because otherwise the status of
every resource on a busy node would flap. A patch is not sent again before it is answered, nor after a rejection until
something changes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import aiohttp

from trimtab_operator.builders.admin_token import Tokens
from trimtab_operator.engines import scrape
from trimtab_operator.engines.admin_client import EngineClient, Failure, OutOfBounds, Patched, Rejected, Stale
from trimtab_operator.engines.http import pod_url
from trimtab_operator.engines.prometheus import Prometheus
from trimtab_operator.engines.scrape import PrometheusReading, ScrapeFailure
from trimtab_operator.observed.actions import LiveValues, Patch
from trimtab_operator.observed.engines import EngineObservation, EngineTarget, MetricsSettings
from trimtab_operator.tuner.moves import Reason
from trimtab_operator.tuner.samples import RequestUpdates, Sample, Source

logger = logging.getLogger(__name__)

ENGINE_TIMEOUT_SECONDS = 1.0  # an idle engine responds within milliseconds; late results are taken by the next poll
STALE_STATUS_SECONDS = (
    20.0  # validity of the last observation of a late engine: on a busy node any engine is late at times
)
REJECTED_PATCH_RETRY_SECONDS = 300.0  # until a rejected patch is sent again: the bounds may have changed
MAX_CONCURRENT_POLLS = 8  # per resource, with up to five requests each: its share of all connections

NO_PROMETHEUS = (
    "spec.metrics.source: Prometheus is not configured in this operator; use Auto or Pods, or set the operator flag "
    "--prometheus-url"
)

PatchAnswer = Patched | Stale | OutOfBounds | Failure
OnAnswer = Callable[[Patch, PatchAnswer], Awaitable[None]]


@dataclass(slots=True)
class _EngineState:
    """In-flight requests and last results of one engine."""

    poll_task: asyncio.Task[EngineObservation] | None = None
    patch_task: asyncio.Task[None] | None = None
    rejected: list[tuple[LiveValues, int, float]] = field(default_factory=list)
    """Recently rejected patches: values, generation and time (by `clock`). Any other response clears them."""
    after_request: int | None = None
    """Number of the last finished request that a poll returned."""
    last_sample: Sample | None = None
    """Last sample that a poll returned."""
    last_observation: tuple[EngineObservation, float] | None = None
    """Last observation and its time (by `clock`). None after a patch was sent."""

    def unrejected_fields(self, order: Patch, now: float) -> LiveValues | None:
        """Return the values of a patch, or its fallback, that were not rejected recently. None if both were."""
        self.rejected = [refusal for refusal in self.rejected if now - refusal[2] < REJECTED_PATCH_RETRY_SECONDS]
        refused = [values for values, generation, _ in self.rejected if generation == order.if_match]
        return next((f for f in (order.fields, order.fallback) if f is not None and f not in refused), None)

    def end(self) -> None:
        """Cancel the requests in flight."""
        for task in (self.poll_task, self.patch_task):
            if task is not None:
                task.cancel()


@dataclass(slots=True)
class EnginePoller:
    """Poller of one resource. Call `close` when the resource is deleted."""

    http: aiohttp.ClientSession
    clock: Callable[[], float] = time.time
    timeout_seconds: float = ENGINE_TIMEOUT_SECONDS
    prometheus: Prometheus | None = None
    may_write: Callable[[], bool] = lambda: True
    """Called before every patch."""
    _settings: MetricsSettings = field(default_factory=MetricsSettings)
    """Settings of the last poll."""
    _states: dict[str, _EngineState] = field(default_factory=dict)
    """State by the uid of the leader pod."""
    _queries: set[asyncio.Task[Mapping[str, Sample | ScrapeFailure]]] = field(default_factory=set)
    """Prometheus queries in flight. They serve several engines, so a deleted engine does not cancel them."""
    _gate: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_CONCURRENT_POLLS))

    async def poll(
        self,
        targets: Iterable[EngineTarget],
        tokens: Tokens,
        settings: MetricsSettings | None = None,
        *,
        allow_stale_engine_status: bool = False,
    ) -> dict[str, EngineObservation]:
        """Poll all engines concurrently, and Prometheus if `settings` select it. Return the observations by group.

        The state of deleted engines is dropped. With `allow_stale_engine_status`, engines without requests are not
        polled while their last observation is valid.
        """
        wanted = list(targets)
        reachable = {target.instance: target for target in wanted if target.address is not None}
        for gone in self._states.keys() - reachable.keys():
            self._states.pop(gone).end()
        late = {
            uid: observed for uid, target in reachable.items() if (observed := self._take_result(target)) is not None
        }
        settings = settings or MetricsSettings()
        if settings != self._settings:  # earlier observations used another source
            self._settings = settings
            for state in self._states.values():
                state.last_observation = None
        free = [target for target in reachable.values() if not self._is_polled(target)]
        if allow_stale_engine_status:
            free = [
                target
                for target in free
                if (observed := self._stale_observation(target)) is None or not observed.is_idle
            ]
        stored = self._start_prometheus_query(free, settings)
        begun = [self._start_poll(target, tokens, stored.get(target.pod)) for target in free]
        if begun:
            await asyncio.wait(begun, timeout=self.timeout_seconds)
        return {target.group: self._observation(target, late.get(target.instance)) for target in wanted}

    def _is_polled(self, target: EngineTarget) -> bool:
        """Return True if an earlier poll of the engine is still in flight."""
        state = self._states.get(target.instance)
        return state is not None and state.poll_task is not None

    def _start_prometheus_query(
        self, targets: Iterable[EngineTarget], settings: MetricsSettings
    ) -> dict[str, PrometheusReading]:
        """Start a query and return its pending result by pod. Empty if the pods are scraped instead."""
        pods = {target.pod: target.created_at for target in targets if target.ready}
        if not pods or settings.source == "Pods" or (settings.source == "Auto" and self.prometheus is None):
            return {}
        reading = asyncio.create_task(_samples(self.prometheus, settings, pods))
        self._queries.add(reading)
        reading.add_done_callback(self._queries.discard)
        return {pod: PrometheusReading(reading, pod, allow_scrape=settings.source == "Auto") for pod in pods}

    def _start_poll(
        self, target: EngineTarget, tokens: Tokens, stored: PrometheusReading | None
    ) -> asyncio.Task[EngineObservation]:
        state = self._states.setdefault(target.instance, _EngineState())
        state.poll_task = asyncio.create_task(self._poll_engine(target, tokens, state.after_request, stored))
        return state.poll_task

    async def _poll_engine(
        self, target: EngineTarget, tokens: Tokens, after: int | None, stored: PrometheusReading | None
    ) -> EngineObservation:
        token = tokens.for_hash(target.token_sha256)
        async with self._gate:
            try:
                return await scrape.observe_engine(
                    target, http=self.http, token=token, after_request=after, stored=stored, clock=self.clock
                )
            except Exception as error:  # an engine response must not end the loop of its resource
                logger.exception("an engine's response could not be processed", extra={"group": target.group})
                return _without_observation(
                    target, f"the engine's response could not be processed: {type(error).__name__}"
                )

    def _take_result(self, target: EngineTarget) -> EngineObservation | None:
        """Return the result of a completed poll. None if there is none, or the pod's readiness changed since."""
        state = self._states.get(target.instance)
        if state is None or state.poll_task is None or not state.poll_task.done():
            return None
        observed, state.poll_task = state.poll_task.result(), None
        if observed.ready != target.ready:
            return None
        if state.last_sample is not None and self._is_old(observed, state.last_sample):
            observed = replace(observed, sample=state.last_sample.repeated())
        elif observed.sample is not None:
            state.last_sample = observed.sample
            if observed.next_request is not None:
                state.after_request = observed.next_request
        state.last_observation = observed, self.clock()
        return observed

    def _stale_observation(self, target: EngineTarget) -> EngineObservation | None:
        """Return the last observation while it is valid. The age of its sample shows how old it is. None if it has
        expired.
        """
        state = self._states.get(target.instance)
        if state is None or state.last_observation is None:
            return None
        observed, observed_at = state.last_observation
        if observed.ready != target.ready or not 0 <= self.clock() - observed_at < STALE_STATUS_SECONDS:
            return None
        return observed if observed.sample is None else replace(observed, sample=observed.sample.repeated())

    def _is_old(self, observed: EngineObservation, last: Sample) -> bool:
        """Return True if Prometheus has not scraped since the last sample, so the finished requests wait for the next
        scrape.

        A sample older than the lookback means that a clock was set back.
        """
        if observed.sample is None or observed.source is not Source.PROMETHEUS or self.prometheus is None:
            return False
        return 0 <= last.at - observed.sample.at <= self.prometheus.connection.lookback_seconds

    def _observation(self, target: EngineTarget, late: EngineObservation | None) -> EngineObservation:
        if target.address is None:
            return _without_observation(target, "the pod has no address yet")
        observed = self._take_result(target)
        if observed is not None:
            return observed if late is None else _merge_requests(late, observed)
        waiting = f"no response within {self.timeout_seconds:g} s; still waiting"
        return late or self._stale_observation(target) or _without_observation(target, waiting)

    async def are_metrics_unchanged(self, known: Sequence[tuple[EngineTarget, bytes]]) -> bool:
        """Return True if the metrics of all engines equal the known ones (`EngineSeen.page`). Sends one request per
        engine.

        Return False if an engine is late, or another request to it is in flight.
        """
        if any(self._is_polled(target) or self._is_patched(target) for target, _ in known):
            return False
        try:
            async with asyncio.timeout(self.timeout_seconds):
                if len(known) == 1:  # the usual case: a separate task would cost half as much as the request
                    observed = [await self._metrics_hash(known[0][0])]
                else:
                    observed = await asyncio.gather(*(self._metrics_hash(target) for target, _ in known))
        except TimeoutError:
            return False
        is_same = observed == [page for _, page in known]
        if is_same:
            self._refresh_observations(target.instance for target, _ in known)
        return is_same

    def _refresh_observations(self, instances: Iterable[str]) -> None:
        """Set the time of the last observations to now."""
        now = self.clock()
        for instance in instances:
            state = self._states.get(instance)
            if state is not None and state.last_observation is not None:
                state.last_observation = state.last_observation[0].repeated_at(now), now

    async def _metrics_hash(self, target: EngineTarget) -> bytes | None:
        assert target.address is not None
        async with self._gate:
            lines = await scrape.fetch_metric_lines(self.http, pod_url(target.address, target.api_port))
        return None if isinstance(lines, ScrapeFailure) else scrape.hash_of(lines)

    def _is_patched(self, target: EngineTarget) -> bool:
        """Return True if a patch of the engine is in flight."""
        state = self._states.get(target.instance)
        return state is not None and state.patch_task is not None and not state.patch_task.done()

    async def patch(self, orders: Iterable[Patch], tokens: Tokens, on_answer: OnAnswer) -> None:
        """Send all patches concurrently. `on_answer` is called with each response, possibly after this returns."""
        sent = [task for order in orders if (task := self._start_patch(order, tokens, on_answer)) is not None]
        if sent:
            await asyncio.wait(sent, timeout=self.timeout_seconds)

    def _start_patch(self, order: Patch, tokens: Tokens, on_answer: OnAnswer) -> asyncio.Task[None] | None:
        """Start a patch. None if an earlier one is in flight, or this one was rejected."""
        state = self._states.setdefault(order.target.instance, _EngineState())
        if state.patch_task is not None and not state.patch_task.done():
            return None
        fields = state.unrejected_fields(order, self.clock())
        if fields is None:
            return None
        if state.poll_task is not None:  # its result would have the values before the patch
            state.poll_task.cancel()
            state.poll_task = None
        state.last_observation = None
        state.patch_task = asyncio.create_task(self._patch(replace(order, fields=fields), tokens, on_answer))
        return state.patch_task

    async def _patch(self, order: Patch, tokens: Tokens, on_answer: OnAnswer) -> None:
        address, port = order.target.address, order.target.admin_port
        assert address is not None
        token = tokens.for_hash(order.target.token_sha256)
        client = EngineClient(self.http, pod_url(address, port), token)
        if not self.may_write():  # another process leads by now
            return
        answer = await client.patch(order.fields, if_match=order.if_match)
        is_refused = isinstance(answer, OutOfBounds | Rejected)
        state = self._states.setdefault(order.target.instance, _EngineState())
        if is_refused:
            state.rejected.append((order.fields, order.if_match, self.clock()))
        else:
            state.rejected.clear()
        state.last_observation = None  # it may be from before the patch
        await on_answer(order, answer)

    def close(self) -> None:
        """Cancel all requests in flight."""
        for state in self._states.values():
            state.end()
        for reading in self._queries:
            reading.cancel()
        self._states.clear()


async def _samples(
    prometheus: Prometheus | None, settings: MetricsSettings, pods: Mapping[str, float]
) -> Mapping[str, Sample | ScrapeFailure]:
    if prometheus is None:
        return dict.fromkeys(pods, ScrapeFailure(NO_PROMETHEUS, Reason.PROMETHEUS_UNAVAILABLE))
    return await prometheus.samples(settings.namespace, pods, settings.labels)


def _without_observation(target: EngineTarget, why: str) -> EngineObservation:
    return EngineObservation(target.ready, why)


def _merge_requests(earlier: EngineObservation, observed: EngineObservation) -> EngineObservation:
    """Return the observation with the finished requests of an earlier one added: each request is reported once."""
    if earlier.sample is None or observed.sample is None:
        return observed
    old, new = earlier.sample.requests, observed.sample.requests
    if old is None:
        return observed
    both = (
        old if new is None else RequestUpdates((*old.finished, *new.finished), new.unfinished, old.missed + new.missed)
    )
    return replace(observed, sample=replace(observed.sample, requests=both))

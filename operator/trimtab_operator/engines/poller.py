"""The door to the engines of a resource: asks each what it says now, and changes their live fields.

An engine's answer is a stranger's word, and may never come. So nobody waits for it longer than PATIENCE_SECONDS: what
is under way goes on beside the loop, and its answer is taken up by the next look. An engine that is still being asked
since an earlier look is not waited for at all. What one that is late said last stands for a while: else the status of
every resource on a busy node would change back and forth. A change that is on its way is not sent again before it is
answered, nor one that was refused before anything changes.
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
from trimtab_operator.engines.scrape import ScrapeFailure, Stored
from trimtab_operator.observed.actions import LiveValues, Patch
from trimtab_operator.observed.engines import EngineObservation, EngineTarget, MetricsSettings
from trimtab_operator.tuner.moves import Reason
from trimtab_operator.tuner.samples import RequestUpdates, Sample, Source

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 1.0  # an engine at rest answers within milliseconds; a busy CPU's may be taken up by the next look
REPEATED_SECONDS = 20.0  # an engine's last word, while it is late: on a busy node any is at times
REFUSED_SECONDS = 300.0  # before what an engine refused is asked of it again: what may be set can have changed
MAX_ASKED_AT_ONCE = 8  # engines of one resource, each of up to five things: its share of all connections

NO_PROMETHEUS = (
    "spec.metrics.source is Prometheus, and this operator was given none; use Auto or Pods, or have whoever installed "
    "it set --prometheus-url"
)

PatchAnswer = Patched | Stale | OutOfBounds | Failure
OnAnswer = Callable[[Patch, PatchAnswer], Awaitable[None]]


@dataclass(slots=True)
class _Conversation:
    """What is under way with one engine."""

    asking: asyncio.Task[EngineObservation] | None = None
    patching: asyncio.Task[None] | None = None
    refused: list[tuple[LiveValues, int, float]] = field(default_factory=list)
    """The changes that were refused lately, and since anything else was answered: their values, the generation that
    each was for, and when (by `clock`)."""
    after_request: int | None = None
    """The last finished request that a look has told of."""
    told: Sample | None = None
    """The last sample that a look has told of."""
    word: tuple[EngineObservation, float] | None = None
    """What it said last, and when (by `clock`) a look heard it; None once it was asked to change."""

    def unrefused(self, order: Patch, now: float) -> LiveValues | None:
        """What of a change can be asked of it: the values, or what is `otherwise`, unless they were refused lately."""
        self.refused = [refusal for refusal in self.refused if now - refusal[2] < REFUSED_SECONDS]
        refused = [values for values, generation, _ in self.refused if generation == order.if_match]
        return next((f for f in (order.fields, order.fallback) if f is not None and f not in refused), None)

    def end(self) -> None:
        for task in (self.asking, self.patching):
            if task is not None:
                task.cancel()


@dataclass(slots=True)
class Engines:
    """The engines of one resource. `close` it when the resource is gone."""

    http: aiohttp.ClientSession
    clock: Callable[[], float] = time.time
    patience_seconds: float = PATIENCE_SECONDS
    prometheus: Prometheus | None = None
    may_write: Callable[[], bool] = lambda: True
    """Asked before every change."""
    _asked: MetricsSettings = field(default_factory=MetricsSettings)
    """Where the last look had metrics read."""
    _with: dict[str, _Conversation] = field(default_factory=dict)
    """What is under way, by the uid of the leader's pod."""
    _reading: set[asyncio.Task[Mapping[str, Sample | ScrapeFailure]]] = field(default_factory=set)
    """What Prometheus is being asked; no engine's end cancels it."""
    _gate: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_ASKED_AT_ONCE))

    async def look(
        self,
        targets: Iterable[EngineTarget],
        tokens: Tokens,
        asked: MetricsSettings | None = None,
        *,
        believes_last_words: bool = False,
    ) -> dict[str, EngineObservation]:
        """Ask every engine at once, and Prometheus where `asked` says so; by group, what they said in time. Engines
        that are gone are forgotten. Who `believes_last_words` does not ask those that had no request when they spoke
        last, where that word would stand if they were late."""
        wanted = list(targets)
        reachable = {target.instance: target for target in wanted if target.address is not None}
        for gone in self._with.keys() - reachable.keys():
            self._with.pop(gone).end()
        late = {uid: said for uid, target in reachable.items() if (said := self._taken_up(target)) is not None}
        asked = asked or MetricsSettings()
        if asked != self._asked:  # what they said before answers another question
            self._asked = asked
            for conversation in self._with.values():
                conversation.word = None
        free = [target for target in reachable.values() if not self._is_asked(target)]
        if believes_last_words:
            free = [target for target in free if (said := self._repeated(target)) is None or not said.is_idle]
        stored = self._stored(free, asked)
        begun = [self._begin(target, tokens, stored.get(target.pod)) for target in free]
        if begun:
            await asyncio.wait(begun, timeout=self.patience_seconds)
        return {target.group: self._said(target, late.get(target.instance)) for target in wanted}

    def _is_asked(self, target: EngineTarget) -> bool:
        """Whether it is still being asked since an earlier look."""
        conversation = self._with.get(target.instance)
        return conversation is not None and conversation.asking is not None

    def _stored(self, targets: Iterable[EngineTarget], asked: MetricsSettings) -> dict[str, Stored]:
        """By pod, what Prometheus will say; nothing where the pods are asked themselves."""
        pods = {target.pod: target.created_at for target in targets if target.ready}
        if not pods or asked.source == "Pods" or (asked.source == "Auto" and self.prometheus is None):
            return {}
        reading = asyncio.create_task(_samples(self.prometheus, asked, pods))
        self._reading.add(reading)
        reading.add_done_callback(self._reading.discard)
        return {pod: Stored(reading, pod, may_scrape=asked.source == "Auto") for pod in pods}

    def _begin(self, target: EngineTarget, tokens: Tokens, stored: Stored | None) -> asyncio.Task[EngineObservation]:
        conversation = self._with.setdefault(target.instance, _Conversation())
        conversation.asking = asyncio.create_task(self._ask(target, tokens, conversation.after_request, stored))
        return conversation.asking

    async def _ask(
        self, target: EngineTarget, tokens: Tokens, after: int | None, stored: Stored | None
    ) -> EngineObservation:
        token = tokens.for_hash(target.token_sha256)
        async with self._gate:
            try:
                return await scrape.ask(
                    target, http=self.http, token=token, after_request=after, stored=stored, clock=self.clock
                )
            except Exception as error:  # whatever an engine says must not end the loop of its resource
                logger.exception("an engine's answer could not be dealt with", extra={"group": target.group})
                return _unsaid(target, f"its answer could not be dealt with: {type(error).__name__}")

    def _taken_up(self, target: EngineTarget) -> EngineObservation | None:
        """The answer that has come since it was asked, if it has, and if it still speaks of a pod as ready as now."""
        conversation = self._with.get(target.instance)
        if conversation is None or conversation.asking is None or not conversation.asking.done():
            return None
        said, conversation.asking = conversation.asking.result(), None
        if said.ready != target.ready:
            return None
        if conversation.told is not None and self._is_old(said, conversation.told):
            said = replace(said, sample=conversation.told.repeated())
        elif said.sample is not None:
            conversation.told = said.sample
            if said.next_request is not None:
                conversation.after_request = said.next_request
        conversation.word = said, self.clock()
        return said

    def _repeated(self, target: EngineTarget) -> EngineObservation | None:
        """What it said last, as long as that may still be so: one that answers late now and then is not silent, and
        says nothing new by it. The age of its sample says how old that is."""
        conversation = self._with.get(target.instance)
        if conversation is None or conversation.word is None:
            return None
        said, heard_at = conversation.word
        if said.ready != target.ready or not 0 <= self.clock() - heard_at < REPEATED_SECONDS:
            return None
        return said if said.sample is None else replace(said, sample=said.sample.repeated())

    def _is_old(self, said: EngineObservation, told: Sample) -> bool:
        """Whether Prometheus has not scraped since a look told of a sample: requests that ended since wait for it to. A
        sample that is older than any that could be told of is another matter: a clock was set back."""
        if said.sample is None or said.source is not Source.PROMETHEUS or self.prometheus is None:
            return False
        return 0 <= told.at - said.sample.at <= self.prometheus.connection.look_back_seconds

    def _said(self, target: EngineTarget, late: EngineObservation | None) -> EngineObservation:
        if target.address is None:
            return _unsaid(target, "the pod has no address yet")
        said = self._taken_up(target)
        if said is not None:
            return said if late is None else _with_requests_of(late, said)
        waiting = f"no answer within {self.patience_seconds:g} s; it is still waited for"
        return late or self._repeated(target) or _unsaid(target, waiting)

    async def say_the_same(self, known: Sequence[tuple[EngineTarget, bytes]]) -> bool:
        """Whether the pages of metrics of these engines say what is known of them (`EngineSeen.page`): one request to
        each. If so it is what they said last. One that is asked already, or is late, may say anything."""
        if any(self._is_asked(target) or self._is_patched(target) for target, _ in known):
            return False
        try:
            async with asyncio.timeout(self.patience_seconds):
                if len(known) == 1:  # as of most: a task of its own would cost as much as half of the asking
                    said = [await self._page(known[0][0])]
                else:
                    said = await asyncio.gather(*(self._page(target) for target, _ in known))
        except TimeoutError:
            return False
        is_same = said == [page for _, page in known]
        if is_same:
            self._hear_again(target.instance for target, _ in known)
        return is_same

    def _hear_again(self, instances: Iterable[str]) -> None:
        """Let what engines said last have been said now."""
        now = self.clock()
        for instance in instances:
            conversation = self._with.get(instance)
            if conversation is not None and conversation.word is not None:
                conversation.word = conversation.word[0].repeated_at(now), now

    async def _page(self, target: EngineTarget) -> bytes | None:
        assert target.address is not None
        async with self._gate:
            lines = await scrape.lines_of(self.http, pod_url(target.address, target.api_port))
        return None if isinstance(lines, ScrapeFailure) else scrape.hash_of(lines)

    def _is_patched(self, target: EngineTarget) -> bool:
        """Whether a change is on its way to it."""
        conversation = self._with.get(target.instance)
        return conversation is not None and conversation.patching is not None and not conversation.patching.done()

    async def patch(self, orders: Iterable[Patch], tokens: Tokens, on_answer: OnAnswer) -> None:
        """Send every change at once. `on_answer` hears each answer, in time or later."""
        sent = [task for order in orders if (task := self._sent(order, tokens, on_answer)) is not None]
        if sent:
            await asyncio.wait(sent, timeout=self.patience_seconds)

    def _sent(self, order: Patch, tokens: Tokens, on_answer: OnAnswer) -> asyncio.Task[None] | None:
        """Send a change; None while an earlier one is not answered, or where this one was refused."""
        conversation = self._with.setdefault(order.target.instance, _Conversation())
        if conversation.patching is not None and not conversation.patching.done():
            return None
        fields = conversation.unrefused(order, self.clock())
        if fields is None:
            return None
        if conversation.asking is not None:  # its answer would speak of the values before
            conversation.asking.cancel()
            conversation.asking = None
        conversation.word = None
        conversation.patching = asyncio.create_task(self._patch(replace(order, fields=fields), tokens, on_answer))
        return conversation.patching

    async def _patch(self, order: Patch, tokens: Tokens, on_answer: OnAnswer) -> None:
        address, port = order.target.address, order.target.admin_port
        assert address is not None
        token = tokens.for_hash(order.target.token_sha256)
        client = EngineClient(self.http, pod_url(address, port), token)
        if not self.may_write():  # another process asks it by now, and tells of it
            return
        answer = await client.patch(order.fields, if_match=order.if_match)
        is_refused = isinstance(answer, OutOfBounds | Rejected)
        conversation = self._with.setdefault(order.target.instance, _Conversation())
        if is_refused:
            conversation.refused.append((order.fields, order.if_match, self.clock()))
        else:
            conversation.refused.clear()
        conversation.word = None  # it may have been said before the change
        await on_answer(order, answer)

    def close(self) -> None:
        """Let go of all that is under way."""
        for conversation in self._with.values():
            conversation.end()
        for reading in self._reading:
            reading.cancel()
        self._with.clear()


async def _samples(
    prometheus: Prometheus | None, asked: MetricsSettings, pods: Mapping[str, float]
) -> Mapping[str, Sample | ScrapeFailure]:
    if prometheus is None:
        return dict.fromkeys(pods, ScrapeFailure(NO_PROMETHEUS, Reason.PROMETHEUS_UNAVAILABLE))
    return await prometheus.samples(asked.namespace, pods, asked.labels)


def _unsaid(target: EngineTarget, why: str) -> EngineObservation:
    return EngineObservation(target.ready, why)


def _with_requests_of(earlier: EngineObservation, said: EngineObservation) -> EngineObservation:
    """An answer, with the requests that an earlier one told of as well: each is told once."""
    if earlier.sample is None or said.sample is None:
        return said
    old, new = earlier.sample.requests, said.sample.requests
    if old is None:
        return said
    both = old if new is None else RequestUpdates((*old.finished, *new.finished), new.unfinished, old.missed + new.missed)
    return replace(said, sample=replace(said.sample, requests=both))

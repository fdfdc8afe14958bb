"""One replica as this router knows it: the reports of its cores plus the router's own dispatches. No I/O.

A dispatch is *credit* until the engine acknowledges it: it counts in `ReplicaState.pending_*`. From then on the
engine's reports include it. Without a stream the dispatch counts until its answer ends.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from trimtab_router.endpoints.endpoint import Endpoint
from trimtab_router.protocol.messages import (
    MAX_CORES,
    Acknowledged,
    Coefficients,
    Delta,
    Draining,
    Hello,
    Load,
    Message,
    Resting,
    Snapshot,
    unpack_keys,
)
from trimtab_router.protocol.prefix_keys import CUT_BYTES, KEY_RULE
from trimtab_router.scoring.prefix_index import PrefixIndex
from trimtab_router.scoring.state import ReplicaState, RoutedRequest, StepTime

LOST_SECONDS = 2.0
"""Without a message for this long, the last report is no longer trusted to be complete."""
FORGET_SECONDS = 30.0
"""After this long without a message the last report counts no longer; own dispatches are the only load."""
EXPECTED_SECONDS = 5.0
"""Time after the predicted first token for which dispatched keys count as cached: a burst follows its first request."""
MAX_APPROXIMATE_KEYS = 1 << 15
"""Dispatched keys that a replica without a stream is assumed to hold: 16 MiB of text."""
MAX_KEYS = 1 << 19
"""Keys of a replica's cores, about 67 million tokens of text in 100 MB of memory; more are ignored."""
MAX_TOKENS = 1 << 40
MAX_REQUESTS = 1 << 20
MAX_SECONDS = 3600.0
MIN_BYTES_PER_TOKEN, MAX_BYTES_PER_TOKEN = 1.0, 32.0

Number = TypeVar("Number", int, float)


class SequenceGap(Exception):
    """Messages of the stream were lost: only a snapshot helps."""


@dataclass(slots=True)
class _Dispatch:
    prefill_tokens: float
    """Uncached prompt tokens, as predicted at dispatch."""
    context_tokens: int
    is_credit: bool = True
    """False once the engine's reports include it."""


@dataclass(slots=True)
class _Core:
    sequence: int
    load: Load
    coefficients: Coefficients | None
    keys: set[int] | None = None
    """The core's keys, where several cores share one bit of the index."""


class Replica:
    """State of one replica. `index` is shared by all replicas; `bit` is this one's place in it."""

    def __init__(self, endpoint: Endpoint, bit: int, index: PrefixIndex) -> None:
        self.endpoint = endpoint
        self.state = ReplicaState(endpoint.name, bit)
        self.hello: Hello | None = None
        self.bytes_per_token = 0.0
        """Measured by the engine; 0 if unknown."""
        self.received_at: float | None = None
        """Time of the last message; None if there was none, or it is too long ago to count."""
        self._index = index
        self._cores: dict[int, _Core] = {}
        self._dispatches: dict[int, _Dispatch] = {}
        self._approximate: OrderedDict[int, None] | None = OrderedDict()
        """Dispatched keys of a replica without a stream, least recently used first. None while the engine reports."""
        self._is_draining = self._is_resting = False

    # --- own dispatches -------------------------------------------------------------------------------------------

    @property
    def num_unfinished(self) -> int:
        """Number of own dispatches that have not ended."""
        return len(self._dispatches)

    def dispatched(self, number: int, request: RoutedRequest, now: float, expected_ttft: float = 0.0) -> None:
        """Count a request that is sent to this replica now, and is expected to be computed after that many seconds."""
        cached = self._index.match(request.keys, now).get(self.state.index, 0) if request.keys else 0
        uncached = max(1.0, request.prompt_tokens - cached * request.tokens_per_key)
        num_cores = max(1, len(self._cores))  # the state is the mean core's
        dispatch = _Dispatch(uncached / num_cores, int(uncached / num_cores))
        self._dispatches[number] = dispatch
        self._count(dispatch, 1)
        if not request.keys:
            return
        self._index.expect(self.state.index, request.keys, now + expected_ttft + EXPECTED_SECONDS)
        if self._approximate is not None:
            self._remember(request.keys)

    def first_byte(self, number: int) -> None:
        """Note that the answer has begun: the prompt is computed."""
        dispatch = self._dispatches.get(number)
        if dispatch is not None and dispatch.is_credit:
            self.state.pending_prefill_tokens -= dispatch.prefill_tokens
            dispatch.prefill_tokens = 0.0

    def finished(self, number: int) -> None:
        """Forget a dispatch that has ended, in any way."""
        dispatch = self._dispatches.pop(number, None)
        if dispatch is None:
            return
        if dispatch.is_credit:
            self._count(dispatch, -1)
        elif self._approximate is not None:  # the last report counts it, and no newer one comes
            self.state.running = max(0, self.state.running - 1)
            self.state.context_tokens = max(0, self.state.context_tokens - dispatch.context_tokens)

    def _count(self, dispatch: _Dispatch, sign: int) -> None:
        state = self.state
        state.pending_requests += sign
        state.pending_prefill_tokens += sign * dispatch.prefill_tokens
        state.pending_context_tokens += sign * dispatch.context_tokens
        if not state.pending_requests:
            state.pending_prefill_tokens = state.pending_context_tokens = 0.0  # without rounding errors

    def _acknowledge(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            dispatch = self._dispatches.get(number)
            if dispatch is not None and dispatch.is_credit:
                dispatch.is_credit = False
                self._count(dispatch, -1)

    def _remember(self, keys: Iterable[int]) -> None:
        """Assume that the replica caches these keys from now on, instead of its least recently used ones."""
        assert self._approximate is not None
        held = self._approximate
        new = [key for key in keys if key not in held]
        for key in keys:
            held[key] = None
            held.move_to_end(key)
        self._index.add(self.state.index, new)
        if len(held) > MAX_APPROXIMATE_KEYS:
            evicted = [held.popitem(last=False)[0] for _ in range(len(held) - MAX_APPROXIMATE_KEYS)]
            self._index.remove(self.state.index, evicted)

    # --- reports --------------------------------------------------------------------------------------------------

    def receive(self, message: Message, now: float) -> None:
        """Apply one message of the replica's stream.

        Raises:
            SequenceGap: A message before this one was lost, or came too late: the stream must begin again.
        """
        if self._approximate is not None and not isinstance(message, Hello):
            raise SequenceGap("the stream was silent for too long")  # keys of own dispatches have replaced its picture
        self.received_at = now
        match message:
            case Hello():
                self._begin(message)
            case Snapshot():
                self._replace(message)
                self._sum_up(now)
            case Delta():
                self._change(message)
                self._sum_up(now)
            case Acknowledged(numbers):
                self._acknowledge(numbers)
            case Draining():
                self._is_draining = True
            case Resting(pause, sleep):
                self._is_resting = pause is not None or sleep is not None
        self.state.draining = self._is_draining or self._is_resting

    def check_age(self, now: float) -> None:
        """Fall back to own knowledge if the stream has been silent for too long."""
        if self.received_at is None:
            return
        age = now - self.received_at
        if age > LOST_SECONDS and self._approximate is None:
            self._approximate = OrderedDict()
        if age > FORGET_SECONDS:
            self._forget_reports()

    def best_core(self, keys: Sequence[int]) -> int | None:
        """Return the data-parallel core that has cached most of the leading keys, if it can run a request at once.

        None leaves the choice to the replica: it has one core, or none of its cores has any of the keys.
        """
        if len(self._cores) < 2 or not keys:
            return None
        counts = {number: _num_leading(keys, core.keys or ()) for number, core in self._cores.items()}
        most = max(counts.values())
        if not most:
            return None
        holders = [number for number, count in counts.items() if count == most]
        best = min(holders, key=lambda number: self._cores[number].load.running)
        load = self._cores[best].load
        return best if not load.waiting and load.running < load.slots else None

    def close(self) -> None:
        """Remove the replica's keys from the index."""
        self._index.clear(self.state.index)

    def _begin(self, hello: Hello) -> None:
        self.hello = hello
        self._cores.clear()
        self._index.clear(self.state.index)
        self._approximate = None
        self._is_draining = self._is_resting = False

    @property
    def _has_keys(self) -> bool:
        rule = None if self.hello is None else self.hello.key_rule
        return rule is not None and rule.version == KEY_RULE and rule.cut_bytes == CUT_BYTES

    def _replace(self, snapshot: Snapshot) -> None:
        if snapshot.core not in self._cores and len(self._cores) >= MAX_CORES:
            return
        self._forget_core(snapshot.core)
        self._cores[snapshot.core] = core = _Core(snapshot.sequence, snapshot.load, snapshot.coefficients)
        self._add_keys(core, snapshot.keys)

    def _change(self, delta: Delta) -> None:
        core = self._cores.get(delta.core)
        if core is None or delta.sequence != core.sequence + 1:
            raise SequenceGap(f"core {delta.core}: message {delta.sequence} does not follow")
        core.sequence = delta.sequence
        core.load = delta.load or core.load
        core.coefficients = delta.coefficients or core.coefficients
        if delta.removed:
            self._remove_keys(core, delta.removed)
        if delta.added:
            self._add_keys(core, delta.added)

    def _add_keys(self, core: _Core, packed: bytes) -> None:
        if not self._has_keys:
            return
        if core.keys is None and self.hello is not None and len(self.hello.cores) > 1:
            core.keys = set()
        copies = sum(len(each.keys) for each in self._cores.values() if each.keys is not None)
        room = MAX_KEYS - max(copies, self._index.num_keys(self.state.index))
        keys = unpack_keys(packed)[: max(0, room)]
        if core.keys is not None:
            core.keys.update(keys)
        self._index.add(self.state.index, keys)

    def _remove_keys(self, core: _Core, packed: bytes) -> None:
        keys: Iterable[int] = unpack_keys(packed)
        if core.keys is not None:
            core.keys.difference_update(keys)
            keys = [key for key in keys if not self._is_held(key)]
        self._index.remove(self.state.index, keys)

    def _is_held(self, key: int) -> bool:
        return any(core.keys is not None and key in core.keys for core in self._cores.values())

    def _forget_core(self, number: int) -> None:
        core = self._cores.pop(number, None)
        if core is None:
            return
        if core.keys is None:
            self._index.clear(self.state.index)
        else:
            self._index.remove(self.state.index, [key for key in core.keys if not self._is_held(key)])

    def _forget_reports(self) -> None:
        """Count own dispatches only, all of them, until a new stream begins."""
        self.received_at, self._cores = None, {}
        old = self.state
        self.state = ReplicaState(old.replica, old.index, draining=old.draining)
        for dispatch in self._dispatches.values():
            dispatch.is_credit = True
            self._count(dispatch, 1)

    def _sum_up(self, now: float) -> None:
        """Set the state to the mean core: a request waits for one core's queue, and runs in its batch."""
        cores, state = list(self._cores.values()), self.state
        if not cores:
            return
        count, loads = len(cores), [core.load for core in cores]
        state.reported_at = now
        state.running = _mean([_bounded(load.running, MAX_REQUESTS) for load in loads])
        state.waiting = _mean([_bounded(load.waiting, MAX_REQUESTS) for load in loads])
        state.prefill_tokens = sum(_bounded(load.prefill_tokens, MAX_TOKENS) for load in loads) / count
        state.context_tokens = _mean([_bounded(load.context_tokens, MAX_TOKENS) for load in loads])
        state.kv_used_tokens = _mean([_bounded(load.kv_used_tokens, MAX_TOKENS) for load in loads])
        state.kv_total_tokens = _mean([_bounded(load.kv_total_tokens, MAX_TOKENS) for load in loads])
        state.token_budget = _mean([_bounded(load.token_budget, MAX_TOKENS) for load in loads])
        state.slots = _mean([_bounded(load.slots, MAX_REQUESTS) for load in loads])
        state.prefill_share = sum(_bounded(load.prefill_share, 1.0) for load in loads) / count
        seconds = min(_bounded(load.step_seconds, MAX_SECONDS) for load in loads)
        state.step_ends_at = now + seconds if seconds > 0 else None
        state.step_time = next((_step_time(core.coefficients) for core in cores if core.coefficients), None)
        state.adapters = frozenset[str]().union(*(load.adapters for load in loads))
        ratios = [ratio for load in loads if (ratio := _bounded(load.bytes_per_token, MAX_BYTES_PER_TOKEN)) > 0]
        self.bytes_per_token = max(sum(ratios) / len(ratios), MIN_BYTES_PER_TOKEN) if ratios else 0.0


def _num_leading(keys: Sequence[int], held: Collection[int]) -> int:
    return next((place for place, key in enumerate(keys) if key not in held), len(keys))


def _mean(values: list[int]) -> int:
    """Return the mean, rounded up: one request in two cores is load."""
    return values[0] if len(values) == 1 else -(-sum(values) // len(values))


def _bounded(value: Number, most: Number) -> Number:
    """Return the value within 0 and `most`, 0 if it is not a number: an engine must not spoil the score of others."""
    return min(max(value, type(most)(0)), most) if math.isfinite(value) else type(most)(0)


def _step_time(fit: Coefficients) -> StepTime | None:
    """Return the step time, or None if it is not usable."""
    values = [fit.base, fit.per_token, fit.per_sequence, fit.per_context]
    if not all(math.isfinite(value) and 0 <= value <= MAX_SECONDS for value in values) or not any(values):
        return None
    return StepTime(*values)

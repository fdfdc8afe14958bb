"""The state stream's sending side in the first process: mirrors the cores' state and sends it to each router.

A router gets a snapshot first and changes afterwards, merged over DELTA_SECONDS. A router that reads slowly gets fewer,
larger deltas: pending changes are kept as a set, never as a queue. Cores report only while a router listens, and for
LINGER_SECONDS afterwards, so that the keys survive a router's restart.
"""

import asyncio
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

import msgspec
from trimtab_router.protocol.messages import (
    BEAT_SECONDS,
    DELTA_SECONDS,
    Acknowledged,
    Beat,
    Coefficients,
    Delta,
    Draining,
    Hello,
    Load,
    Message,
    Resting,
    Snapshot,
    encode_frame,
    pack_keys,
)

from trimtab_engine.messages.state_stream import CoreReport, Dispatch

LINGER_SECONDS = 600.0
MAX_LISTENERS = 32
MAX_KEYS_PER_FRAME = 1 << 20
MAX_RECENT_DISPATCHES = 4096
"""Acknowledgements kept for each router, for its next connection."""
MAX_ROUTERS = 256
"""Routers whose acknowledgements are kept."""


@dataclass(slots=True)
class _Core:
    """State of one core as it was last reported."""

    keys: set[int] = field(default_factory=set)
    load: Load = field(default_factory=Load)
    step_ends_at: float = 0.0
    coefficients: Coefficients | None = None

    def load_at(self, now: float) -> Load:
        """Return the load with the time that the running step still takes."""
        seconds = max(0.0, self.step_ends_at - now)
        return (
            self.load if seconds == self.load.step_seconds else msgspec.structs.replace(self.load, step_seconds=seconds)
        )


@dataclass(slots=True)
class _Pending:
    """Changes of one core that a router has not got."""

    sequence: int = 0
    keys: dict[int, bool] = field(default_factory=dict)
    """True for keys that were added, False for removed ones."""
    has_load: bool = False
    has_coefficients: bool = False


class _Listener:
    """One router's stream."""

    def __init__(self, router: str) -> None:
        self.router = router
        self.changed = asyncio.Event()
        self.pending: dict[int, _Pending] = {}
        """By core, once its snapshot was sent."""
        self.acknowledged: list[int] = []
        self.hello: Hello | None = None
        self.draining: Draining | None = None
        self.resting = Resting()


class StateHub:
    """All streams of one engine.

    Args:
        hello: Returns the engine's description; None while it loads.
        report: Starts and stops the cores' reports.
        clock: CLOCK_MONOTONIC seconds, as in the cores' reports.
    """

    def __init__(
        self,
        hello: Callable[[str], Hello | None],
        report: Callable[[bool], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._make_hello, self._report, self._clock = hello, report, clock
        self._epoch = uuid.uuid4().hex
        self._cores: dict[int, _Core] = {}
        self._listeners: set[_Listener] = set()
        self._recent: OrderedDict[str, deque[int]] = OrderedDict()
        self._draining: Draining | None = None
        self._resting = Resting()
        self._is_reporting = self._is_closed = False
        self._linger: asyncio.TimerHandle | None = None

    # --- the engine's side ----------------------------------------------------------------------------------------

    def receive(self, core: int, report: CoreReport, time: float) -> None:
        """Take in one core's report, made at `time`."""
        if not self._is_reporting:
            return
        known = self._cores.setdefault(core, _Core())
        known.keys.difference_update(report.removed)
        known.keys.update(report.added)
        has_load = report.load != known.load
        known.load, known.step_ends_at = report.load, time + report.load.step_seconds
        known.coefficients = report.coefficients or known.coefficients
        for dispatch in report.dispatches:
            self._remember(dispatch)
        for listener in self._listeners:
            pending = listener.pending.get(core)
            if pending is not None:
                pending.keys.update(dict.fromkeys(report.removed, False))
                pending.keys.update(dict.fromkeys(report.added, True))
                pending.has_load |= has_load
                pending.has_coefficients |= report.coefficients is not None
            own = [dispatch.number for dispatch in report.dispatches if dispatch.router == listener.router]
            listener.acknowledged += own
            if has_load or own or report.added or report.removed or pending is None:
                listener.changed.set()

    def remove_core(self, core: int) -> None:
        """Forget a core that has ended."""
        self._cores.pop(core, None)
        self._wake()

    def drain(self, deadline_seconds: float | None = None) -> None:
        """Announce that the engine takes no new requests, and ends."""
        if self._draining is None:
            self._draining = Draining(deadline_seconds)
            self._wake()

    def rest(self, pause: str | None, sleep: int | None) -> None:
        """Announce a pause, a sleep, or the end of both."""
        resting = Resting(pause, sleep)
        if resting != self._resting:
            self._resting = resting
            self._wake()

    def close(self) -> None:
        """End all streams."""
        self._is_closed = True
        if self._linger is not None:
            self._linger.cancel()
        self._wake()

    def _remember(self, dispatch: Dispatch) -> None:
        recent = self._recent.get(dispatch.router)
        if recent is None:
            recent = self._recent[dispatch.router] = deque(maxlen=MAX_RECENT_DISPATCHES)
            if len(self._recent) > MAX_ROUTERS:
                self._recent.popitem(last=False)
        else:
            self._recent.move_to_end(dispatch.router)
        recent.append(dispatch.number)

    def _wake(self) -> None:
        for listener in self._listeners:
            listener.changed.set()

    # --- the routers' side ----------------------------------------------------------------------------------------

    @property
    def is_loading(self) -> bool:
        """True while there is nothing to stream yet."""
        return self._make_hello(self._epoch) is None

    @property
    def has_room(self) -> bool:
        """True if another router may listen."""
        return len(self._listeners) < MAX_LISTENERS and not self._is_closed

    async def stream(self, router: str) -> AsyncGenerator[bytes, None]:
        """Yield the frames for one router until the engine ends or the generator is closed."""
        listener = _Listener(router)
        self._listeners.add(listener)
        self._start_reports()
        try:
            while not self._is_closed:
                listener.changed.clear()
                frames = self._take(listener)
                yield b"".join(map(encode_frame, frames or [Beat()]))
                await asyncio.sleep(DELTA_SECONDS)
                try:
                    async with asyncio.timeout(BEAT_SECONDS - DELTA_SECONDS):
                        await listener.changed.wait()
                except TimeoutError:
                    pass
        finally:
            self._listeners.discard(listener)
            if not self._listeners and not self._is_closed:
                self._linger = asyncio.get_running_loop().call_later(LINGER_SECONDS, self._stop_reports)

    def _start_reports(self) -> None:
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None
        if not self._is_reporting:
            self._is_reporting = True
            self._report(True)

    def _stop_reports(self) -> None:
        self._is_reporting = False
        self._cores.clear()
        self._report(False)

    def _take(self, listener: _Listener) -> list[Message]:
        """Return the messages that bring the router up to date."""
        now, messages = self._clock(), list[Message]()
        hello = self._make_hello(self._epoch)
        if hello is not None and (listener.hello is None or listener.hello.cores != hello.cores):
            listener.hello, listener.draining, listener.resting = hello, None, Resting()
            listener.pending.clear()
            messages.append(hello)
            listener.acknowledged = list(self._recent.get(listener.router, ()))
        if listener.hello is None:
            return messages
        for number in listener.hello.cores:
            core = self._cores.get(number)
            pending = listener.pending.get(number)
            if core is None:
                continue
            if pending is None:
                listener.pending[number] = pending = _Pending()
                messages += _snapshot(number, core, pending, now)
            elif pending.keys or pending.has_load or pending.has_coefficients:
                messages += _deltas(number, core, pending, now)
        if listener.acknowledged:
            messages.append(Acknowledged(listener.acknowledged))
            listener.acknowledged = []
        if self._draining is not None and listener.draining is None:
            listener.draining = self._draining
            messages.append(self._draining)
        if self._resting != listener.resting:
            listener.resting = self._resting
            messages.append(self._resting)
        return messages


def _snapshot(number: int, core: _Core, pending: _Pending, now: float) -> list[Message]:
    keys = list(core.keys)
    first = Snapshot(
        pending.sequence, number, core.load_at(now), pack_keys(keys[:MAX_KEYS_PER_FRAME]), core.coefficients
    )
    return [first, *_key_deltas(number, pending, [], keys[MAX_KEYS_PER_FRAME:])]


def _deltas(number: int, core: _Core, pending: _Pending, now: float) -> list[Message]:
    removed = [key for key, is_added in pending.keys.items() if not is_added]
    added = [key for key, is_added in pending.keys.items() if is_added]
    messages: list[Message] = [*_key_deltas(number, pending, removed, added)]
    last = messages[-1] if messages else None
    if not isinstance(last, Delta):
        pending.sequence += 1
        last = Delta(pending.sequence, number)
        messages.append(last)
    last.load = core.load_at(now)
    last.coefficients = core.coefficients if pending.has_coefficients else None
    pending.keys, pending.has_load, pending.has_coefficients = {}, False, False
    return messages


def _key_deltas(number: int, pending: _Pending, removed: Sequence[int], added: Sequence[int]) -> list[Delta]:
    """Return deltas with these keys, in frames of bounded size."""
    deltas = []
    for first in range(0, max(len(removed), len(added)), MAX_KEYS_PER_FRAME):
        pending.sequence += 1
        span = slice(first, first + MAX_KEYS_PER_FRAME)
        deltas.append(Delta(pending.sequence, number, pack_keys(removed[span]), pack_keys(added[span])))
    return deltas

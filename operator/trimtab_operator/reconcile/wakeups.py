"""Alarms: who sees something change rings, and the loop that it concerns ticks at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class WakeUps:
    """One alarm per resource. Whoever sees something change rings it; its loop then ticks at once."""

    def __init__(self) -> None:
        self._alarms: dict[tuple[str, str], asyncio.Event] = {}
        self._listeners: dict[tuple[str, str], Callable[[], None]] = {}

    def of(self, namespace: str, name: str) -> asyncio.Event:
        """A new alarm; it replaces that of a namesake, whose loop is about to end."""
        alarm = self._alarms[namespace, name] = asyncio.Event()
        return alarm

    def ring(self, namespace: str, name: str) -> None:
        alarm = self._alarms.get((namespace, name))
        if alarm is not None:
            alarm.set()
        listener = self._listeners.get((namespace, name))
        if listener is not None:
            listener()

    @contextmanager
    def listening(self, namespace: str, name: str, listener: Callable[[], None]) -> Iterator[None]:
        """Have each ring told at once, though nobody waits for the alarm."""
        self._listeners[namespace, name] = listener
        try:
            yield
        finally:
            if self._listeners.get((namespace, name)) is listener:  # and not that of a namesake
                del self._listeners[namespace, name]

    def forget(self, namespace: str, name: str, alarm: asyncio.Event) -> bool:
        """Drop an alarm, unless a resource of the same name has put its own in its place; whether it was dropped."""
        is_last = self._alarms.get((namespace, name)) is alarm
        if is_last:
            del self._alarms[namespace, name]
        return is_last

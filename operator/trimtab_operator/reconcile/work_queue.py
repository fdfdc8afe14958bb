"""Work queue of resources to reconcile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class WorkQueue:
    """Pending flag per resource. Enqueueing sets it and wakes the resource's loop; several wake-ups before a tick
    coalesce.
    """

    def __init__(self) -> None:
        self._events: dict[tuple[str, str], asyncio.Event] = {}
        self._listeners: dict[tuple[str, str], Callable[[], None]] = {}

    def register(self, namespace: str, name: str) -> asyncio.Event:
        """Return a new pending flag. It replaces the flag of a deleted resource with the same name, whose loop is
        about to end.
        """
        event = self._events[namespace, name] = asyncio.Event()
        return event

    def enqueue(self, namespace: str, name: str) -> None:
        event = self._events.get((namespace, name))
        if event is not None:
            event.set()
        listener = self._listeners.get((namespace, name))
        if listener is not None:
            listener()

    @contextmanager
    def notify_on_enqueue(self, namespace: str, name: str, listener: Callable[[], None]) -> Iterator[None]:
        """Call the listener at each enqueue within the context, even while the loop does not wait."""
        self._listeners[namespace, name] = listener
        try:
            yield
        finally:
            if (
                self._listeners.get((namespace, name)) is listener
            ):  # not the listener of a new resource with the same name
                del self._listeners[namespace, name]

    def forget(self, namespace: str, name: str, event: asyncio.Event) -> bool:
        """Drop the flag. Return False if a new resource with the same name has registered its own."""
        is_last = self._events.get((namespace, name)) is event
        if is_last:
            del self._events[namespace, name]
        return is_last

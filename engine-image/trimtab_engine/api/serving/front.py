"""What answers on --port: one API server in the first process (single.py), or several in their own (several.py).

life.py, which leads the engine's life, treats both alike.
"""

import asyncio
from typing import Protocol

from trimtab_engine.messages import CoreFailed


class Front(Protocol):
    """What answers on --port."""

    idle: asyncio.Event
    """Set while no generation request is being answered."""

    @property
    def num_http_requests(self) -> int:
        """Generation requests that are being answered."""

    @property
    def num_arrivals(self) -> int:
        """Requests that have come so far, but for probes and scrapes."""

    async def start(self) -> None:
        """Answer probes from now on. Raises EngineDead when there can be no process."""

    async def load(self) -> None:
        """Return when all accept requests. Raises ConfigError. Cancelled when the core fails first."""

    def begin_leaving(self) -> None:
        """Be ready no more, and serve who comes all the same."""

    def begin_drain(self) -> None:
        """Accept nothing new."""

    def forget_media(self) -> None:
        """Forget images and videos, here and in the cores."""

    async def settle(self) -> None:
        """Return when num_http_requests is that of now."""

    def abort_all(self) -> None:
        """End what still runs."""

    def fail(self, failure: CoreFailed) -> None:
        """The engine serves no more: who waits gets an error, who comes gets 503."""

    async def close(self, seconds: int) -> None:
        """Write what is being written for up to `seconds`, and end."""

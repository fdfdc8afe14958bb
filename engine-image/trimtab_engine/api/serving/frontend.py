"""Interface of the servers on --port: one API server in the first process (single_server.py), or several processes
(server_pool.py).

lifecycle.py, which controls the engine's lifecycle, uses only this interface.
"""

import asyncio
from typing import Protocol

from trimtab_engine.messages.lifecycle import CoreFailed


class ServerFrontend(Protocol):
    """Servers on --port."""

    idle: asyncio.Event
    """Set while no generation request is in progress."""

    @property
    def num_http_requests(self) -> int:
        """Generation requests in progress."""

    @property
    def num_arrivals(self) -> int:
        """Requests received so far, except probes and scrapes."""

    async def start(self) -> None:
        """Start to answer probes. Raises EngineDead if a process cannot start."""

    async def load(self) -> None:
        """Return when all servers accept requests. Raises ConfigError. Cancelled if the core fails first."""

    def become_not_ready(self) -> None:
        """Become not ready, but serve requests that still arrive."""

    def begin_drain(self) -> None:
        """Reject new requests."""

    def drop_media_cache(self) -> None:
        """Drop cached images and videos, here and in the cores."""

    async def settle(self) -> None:
        """Return when num_http_requests is current."""

    def abort_all(self) -> None:
        """Abort all running requests."""

    def fail(self, failure: CoreFailed) -> None:
        """Handle a failed engine: pending requests get an error, new ones 503."""

    async def close(self, seconds: int) -> None:
        """Finish responses in progress for up to `seconds`, then exit."""

"""One HTTP application on one listening socket in the running event loop: uvicorn without its signal handling."""

import asyncio
import contextlib
import errno
import socket
import sys
from collections.abc import Callable, Iterator
from functools import partial

import uvicorn
from fastapi import FastAPI

from trimtab_engine.api.http.connections import ConnectionLimits
from trimtab_engine.api.http.log_limit import limit_repeated_warnings
from trimtab_engine.api.http.protocol import BoundedHeadProtocol
from trimtab_engine.errors import ConfigError
from trimtab_engine.ipc.network import family_of, in_url

SWITCH_SECONDS = 0.001
"""Interval after which a thread must give up Python's global lock. By default 5 ms, for which each read, write and
accepted connection of the event loop waits while a thread serializes a long response."""
CLOSE_SECONDS = 3  # for responses in progress when the server closes
BACKLOG = 2048


class HttpServer:
    """HTTP server, running from start() to close()."""

    def __init__(self, app: FastAPI, bound: socket.socket, limits: ConnectionLimits) -> None:
        self._socket = bound
        self._limits = limits
        self._server = _Uvicorn(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=CLOSE_SECONDS,
                server_header=False,
                http=partial(BoundedHeadProtocol, limits=limits),  # type: ignore[arg-type]  # called like a class
            )
        )
        self._task: asyncio.Task[None] | None = None
        self._sweep: asyncio.Task[None] | None = None

    def start(self) -> None:
        limit_repeated_warnings()
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        self._sweep = asyncio.create_task(self._limits.sweep_forever())

    async def close(self, seconds: int = CLOSE_SECONDS) -> None:
        """Stop accepting connections, wait up to `seconds` for responses in progress, and close."""
        self._server.config.timeout_graceful_shutdown = seconds
        self._server.should_exit = True
        if self._task is not None and self._sweep is not None:
            await asyncio.gather(self._task, return_exceptions=True)
            self._sweep.cancel()


class _Uvicorn(uvicorn.Server):
    """uvicorn without drain and signal handling, which the engine does itself."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(host: str, port: int, flag: str) -> socket.socket:
    """Return a listening socket.

    Raises:
        ConfigError: The address cannot be bound.
    """
    bound = socket.socket(family_of(host), socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        remedy = f"set another {flag}"
        if error.errno == errno.EADDRNOTAVAIL:
            remedy = "this machine has no such address; remove --host to listen on all addresses"
        elif isinstance(error, socket.gaierror):
            remedy = "--host must be a name or an address of this machine without a port, such as 127.0.0.1"
        elif error.errno == errno.EACCES:
            remedy = f"ports below 1024 require root; {remedy}"
        raise ConfigError(f"cannot listen on {in_url(host)}:{port}: {error.strerror}; {remedy}") from None
    bound.setblocking(False)
    return bound


def share_global_lock() -> None:
    """Let the event loop get the global lock sooner from other threads."""
    sys.setswitchinterval(SWITCH_SECONDS)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    import uvloop

    return uvloop.new_event_loop

"""One HTTP application on one listening socket, inside the running event loop: uvicorn without its signal handling."""

import asyncio
import contextlib
import errno
import socket
from collections.abc import Callable, Iterator

import uvicorn
from fastapi import FastAPI

from trimtab_engine.api.http.protocol import BoundedHeadProtocol
from trimtab_engine.errors import ConfigError
from trimtab_engine.ipc.network import family_of, in_url

CLOSE_SECONDS = 3  # for answers that are being written when the server closes
BACKLOG = 2048


class HttpServer:
    """Serves from start() to close()."""

    def __init__(self, app: FastAPI, bound: socket.socket) -> None:
        self._socket = bound
        self._server = _Uvicorn(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=CLOSE_SECONDS,
                server_header=False,
                http=BoundedHeadProtocol,
            )
        )
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))

    async def close(self, seconds: int = CLOSE_SECONDS) -> None:
        """Accept nothing new, give what is being answered `seconds`, and end."""
        self._server.config.timeout_graceful_shutdown = seconds
        self._server.should_exit = True
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)


class _Uvicorn(uvicorn.Server):
    """The drain is ours, and so are the signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(host: str, port: int, flag: str) -> socket.socket:
    """A listening socket. Raises ConfigError when there can be none."""
    bound = socket.socket(family_of(host), socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        remedy = f"choose another {flag}"
        if error.errno == errno.EADDRNOTAVAIL:
            remedy = "this machine has no such address; leave --host out to listen on all that it has"
        elif isinstance(error, socket.gaierror):
            remedy = "--host is a name or an address of this machine and has no port in it, such as 127.0.0.1"
        elif error.errno == errno.EACCES:
            remedy = f"ports below 1024 are root's; {remedy}"
        raise ConfigError(f"cannot listen on {in_url(host)}:{port}: {error.strerror}; {remedy}") from None
    bound.setblocking(False)
    return bound


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    import uvloop

    return uvloop.new_event_loop

"""Server on --port during a model download: probes, and 503 for everything else.

The actual server needs the model at construction, so it starts after the download; meanwhile the probes report the
progress.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer

from trimtab_engine.api.http.errors import ApiError
from trimtab_engine.api.http.server import bind
from trimtab_engine.ipc.network import family_of
from trimtab_engine.sources.progress import Progress

STAGE = "download"
RETRY_SECONDS = 10
IDLE_SECONDS = 5.0  # timeout of a silent client
CLOSE_POLL_SECONDS = 0.1


class DownloadState:
    """Latest download progress, shared with the probe handler."""

    def __init__(self) -> None:
        self._progress = Progress("the model", 0, 0)

    def update(self, progress: Progress) -> None:
        self._progress = progress

    def answer(self, path: str) -> tuple[int, str, str]:
        """Return status, content type and body of one response."""
        progress = self._progress
        if path == "/livez":
            return HTTPStatus.OK, "text/plain; charset=utf-8", "ok"
        if path == "/startupz":
            body = {"stage": STAGE, "percent": round(progress.percent, 1), "message": progress.sentence}
            return HTTPStatus.SERVICE_UNAVAILABLE, "application/json", json.dumps(body)
        reason = f"the engine is downloading the model: {progress.sentence}"
        if path == "/readyz":
            return HTTPStatus.SERVICE_UNAVAILABLE, "application/json", json.dumps({"reason": reason})
        return HTTPStatus.SERVICE_UNAVAILABLE, "application/json", json.dumps(ApiError(503, reason).body)


@contextmanager
def serve_probes(host: str, port: int) -> Iterator[tuple[DownloadState, int]]:
    """Serve probes until the block ends. Yields the state to update, and the port. Raises ConfigError if the port is in
    use.
    """
    state = DownloadState()

    class Handler(BaseHTTPRequestHandler):
        timeout = IDLE_SECONDS

        def do_GET(self) -> None:
            status, kind, text = state.answer(self.path.partition("?")[0])
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Connection", "close")
            if status == HTTPStatus.SERVICE_UNAVAILABLE:
                self.send_header("Retry-After", str(RETRY_SECONDS))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)
            self.close_connection = True

        do_HEAD = do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None:
            """Do not log probes."""

    class Server(HTTPServer):
        address_family = family_of(host)

        def handle_error(self, request: object, client_address: object) -> None:
            """Ignore clients that disconnect."""

    bound = bind(host, port, "--port")
    bound.setblocking(True)
    server = Server(("", 0), Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = bound
    thread = threading.Thread(target=server.serve_forever, args=(CLOSE_POLL_SECONDS,), name="probes", daemon=True)
    thread.start()
    try:
        yield state, int(bound.getsockname()[1])
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

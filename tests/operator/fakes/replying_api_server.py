"""An API server with fixed replies for the commands of `trimtab`, and the kubeconfig of a user of it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

import yaml

Reply = tuple[int, Any]
NOT_FOUND: Reply = (404, {"kind": "Status", "message": "not found"})


class ReceivedRequest(NamedTuple):
    """A request that the server has received."""

    method: str
    path: str
    query: dict[str, list[str]]
    body: Any


class ReplyingApiServer:
    """Replies by method and path: status and body, or a function that returns both. A body that is text is sent as is.

    Other paths are not found.
    """

    def __init__(self, kubeconfig: Path) -> None:
        self.kubeconfig = kubeconfig
        """File with the context `mine` and the namespace team-a, written by `served`."""
        self.replies: dict[str, Reply | Callable[[], Reply]] = {}
        self.requests: list[ReceivedRequest] = []

    @contextmanager
    def served(self) -> Iterator[None]:
        """Serve on loopback."""
        server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "mine",
            "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
            "users": [{"name": "u", "user": {}}],
            "contexts": [{"name": "mine", "context": {"cluster": "c", "user": "u", "namespace": "team-a"}}],
        }
        self.kubeconfig.write_text(yaml.safe_dump(config))
        try:
            yield
        finally:
            server.shutdown()
            thread.join()
            server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        replies, requests = self.replies, self.requests

        class Handler(BaseHTTPRequestHandler):
            def _reply(self) -> None:
                parts = urlsplit(self.path)
                sent = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                body = json.loads(sent) if sent else None
                requests.append(ReceivedRequest(self.command, parts.path, parse_qs(parts.query), body))
                reply = replies.get(f"{self.command} {parts.path}", NOT_FOUND)
                status, found = reply() if callable(reply) else reply
                data = found.encode() if isinstance(found, str) else json.dumps(found).encode()
                self.send_response(status)
                self.send_header("Content-Type", "text/plain" if isinstance(found, str) else "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_PATCH = _reply

            def log_message(self, *_: Any) -> None:
                """Keep the output of tests clean."""

        return Handler

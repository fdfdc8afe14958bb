"""A router in a process of its own, and engines in threads."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

DEADLINE_SECONDS = 30.0
ROUTER = Path(__file__).parents[3] / "router"
TOKEN = "token"


class SlowEngine(BaseHTTPRequestHandler):
    """Answers completions after `seconds` of the request's body."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        fields = json.loads(self.rfile.read(int(self.headers["content-length"])))
        time.sleep(fields.get("seconds", 0))
        self.send_response(200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@contextmanager
def engine_in_thread(handler: type[BaseHTTPRequestHandler] = SlowEngine) -> Iterator[int]:
    """Yield the port of an engine."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Router:
    """A running router process."""

    def __init__(self, log: Path, *flags: str) -> None:
        self.log = log
        digest = hashlib.sha256(TOKEN.encode()).hexdigest()
        own = ["--host=127.0.0.1", "--port=0", "--admin-port=0", f"--admin-token-sha256={digest}"]
        with log.open("wb") as stream:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "trimtab_router", *own, *flags],
                stdout=stream,
                stderr=stream,
                env=os.environ | {"PYTHONPATH": str(ROUTER)},
            )
        found = self.wait_for(lambda: re.search(r"listening on port (\d+), admin port (\d+)", log.read_text()))
        self.port, self.admin_port = int(found[1]), int(found[2])
        self.wait_for(lambda: self.call("GET", "/readyz")[0] == 200)

    def wait_for(self, condition: Callable[[], object]) -> re.Match[str]:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not (found := condition()):
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.01)
        return found  # type: ignore[return-value]

    def call(self, method: str, path: str, body: str | None = None) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.admin_port, timeout=DEADLINE_SECONDS)
        connection.request(method, path, body, {"Authorization": f"Bearer {TOKEN}"})
        response = connection.getresponse()
        found = response.status, response.read().decode()
        connection.close()
        return found

    def post(self, seconds: float = 0.0) -> int:
        return self.ask(seconds)[0]

    def ask(self, seconds: float = 0.0) -> tuple[int, str | None]:
        """Return status and replica of a completion that takes this many seconds."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_SECONDS)
        connection.request("POST", "/v1/completions", json.dumps({"prompt": "a", "seconds": seconds}))
        response = connection.getresponse()
        response.read()
        connection.close()
        return response.status, response.headers["x-trimtab-replica"]

    def workers(self) -> list[int]:
        pid = self.process.pid
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def end(self) -> None:
        for worker in self.workers() if self.process.poll() is None else []:
            os.kill(worker, signal.SIGKILL)
        self.process.kill()
        self.process.wait()

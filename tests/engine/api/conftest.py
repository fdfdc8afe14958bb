"""A real server process on the stub core."""

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

DEADLINE_SECONDS = 120.0  # generous: machines are slow when much is built on them


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(slots=True)
class Server:
    """A running server process and clients of its two ports."""

    process: subprocess.Popen[bytes]
    port: int
    admin_port: int
    log: Path
    http: httpx.Client = field(init=False)
    admin: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=DEADLINE_SECONDS)
        self.admin = httpx.Client(base_url=f"http://127.0.0.1:{self.admin_port}", timeout=DEADLINE_SECONDS)

    def status(self, path: str) -> int | None:
        try:
            return self.http.get(path).status_code
        except httpx.TransportError:
            return None

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Look until it is so; fails after DEADLINE_SECONDS."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"waited for {what}: {self.log.read_text()[-1000:]}"
            time.sleep(0.01)

    def wait_until_ready(self) -> "Server":
        self.wait_for(lambda: self.status("/readyz") == 200 or self.process.poll() is not None, "readiness")
        assert self.process.poll() is None, self.log.read_text()[-1000:]
        return self

    def core_state(self, **headers: str) -> dict[str, Any]:
        state: dict[str, Any] = self.admin.get("/admin/v1/memory", headers=headers).json()
        return state

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples of this name that carry these labels."""
        from prometheus_client.parser import text_string_to_metric_families

        samples = [
            sample
            for family in text_string_to_metric_families(self.http.get("/metrics").text)
            for sample in family.samples
        ]
        return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())

    def end(self) -> None:
        self.http.close()
        self.admin.close()
        self.process.terminate()  # twice: what still runs is aborted at once
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


Start = Callable[..., Server]


@pytest.fixture(scope="module")
def start_server(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Start servers; all of them end with the module."""
    servers: list[Server] = []

    def start(*flags: str, model: Path | None = None, wait: bool = True) -> Server:
        """`trimtab-engine serve` with these flags, on ports of its own; by default ready when it returns."""
        port, admin_port = free_port(), free_port()
        log = tmp_path_factory.mktemp("server") / "log"
        command = [
            sys.executable,
            str(Path(__file__).with_name("serve_stub.py")),
            "serve",
            str(model or tokenizer_folder),
        ]
        command += ["--host", "127.0.0.1", "--port", str(port), "--admin-port", str(admin_port), "--device", "cpu"]
        with log.open("wb") as stream:
            process = subprocess.Popen([*command, "--served-model-name", "stub", "alias", *flags], stderr=stream)
        servers.append(Server(process, port, admin_port, log))
        return servers[-1].wait_until_ready() if wait else servers[-1]

    yield start
    for server in servers:
        server.end()


@pytest.fixture(scope="module")
def server(start_server: Start) -> Server:
    """One ready server for the module."""
    server: Server = start_server()
    return server

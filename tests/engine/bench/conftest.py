"""A server for benchmark tests: the tiny model with random weights, on free loopback ports."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

DEADLINE_SECONDS = 120.0


@dataclass(frozen=True)
class Ports:
    """Ports of a server that may still be loading."""

    url: str
    admin_url: str
    log: Path

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while httpx.get(f"{self.url}/readyz", timeout=60).status_code != 200:
            assert time.monotonic() < deadline, self.log.read_text()[-1000:]
            time.sleep(0.05)


StartServer = Callable[..., AbstractContextManager[Ports]]
"""Called with a folder for the log and flags of serve; the server ends with the block."""


@pytest.fixture(scope="session")
def start_server(tiny_model: Path) -> StartServer:
    @contextmanager
    def start(folder: Path, *flags: str) -> Iterator[Ports]:
        log = folder / "log"
        command = [sys.executable, "-m", "trimtab_engine.cli", "serve", str(tiny_model), "--served-model-name", "tiny"]
        command += ["--load-format", "dummy", "--device", "cpu", "--cpu-threads", "1"]
        command += ["--host", "127.0.0.1", "--port", "0", "--admin-port", "0", *flags]
        with log.open("wb") as stream:
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
            process = subprocess.Popen(command, stderr=stream, env=environment)
        try:
            deadline = time.monotonic() + DEADLINE_SECONDS
            while len(found := re.findall(r"listens on 127\.0\.0\.1 port (\d+)\n", log.read_text())) < 2:
                assert time.monotonic() < deadline, log.read_text()[-1000:]
                time.sleep(0.01)
            yield Ports(f"http://127.0.0.1:{found[0]}", f"http://127.0.0.1:{found[1]}", log)
        finally:
            process.terminate()
            process.wait(DEADLINE_SECONDS)

    return start

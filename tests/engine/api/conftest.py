"""Real server processes, on the stub core and on real cores."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import forked_processes
import httpx
import pytest
import torch
from safetensors.torch import save_file
from trimtab_engine.bench.local_server import end_at_once
from trimtab_engine.ipc.network import ReservedPorts
from trimtab_engine.models.checkpoint import expected_shapes
from trimtab_engine.models.registry import parse_model_config

DEADLINE_SECONDS = 120.0  # generous, for busy machines
REAL_DEADLINE_SECONDS = 180.0  # several processes each load torch


FOUR_SLOTS = ("--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--device-memory-bytes", "4Gi")
PROMPTS = [f"{word} is what they said " * (1 + number % 3) for number, word in enumerate("abcdefghijkl")]
MOE_CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}


@dataclass(slots=True)
class Server:
    """A running server process, with clients of its two ports."""

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
        """Poll until the condition holds; fail after DEADLINE_SECONDS."""
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
        """Return the sum of the samples of this name with these labels."""
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
        end_at_once(self.process)


Start = Callable[..., Server]


@contextmanager
def _servers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Yield a function that starts servers; all of them stop at the end of the block."""
    servers: list[Server] = []
    ports = ReservedPorts("127.0.0.1")  # reserved until its server listens

    def start(*flags: str, model: Path = model, wait: bool = True) -> Server:
        """Run `trimtab-engine serve` with these flags, on reserved ports; returns when ready unless `wait` is False."""
        port, admin_port = ports.take(), ports.take()
        log = tmp_path_factory.mktemp("server") / "log"
        command = [sys.executable, str(Path(__file__).with_name("serve_stub.py")), "serve", str(model)]
        command += ["--host", "127.0.0.1", "--port", str(port), "--admin-port", str(admin_port), "--device", "cpu"]
        with log.open("wb") as stream:
            process = subprocess.Popen([*command, "--served-model-name", "stub", "alias", *flags], stderr=stream)
        servers.append(Server(process, port, admin_port, log))
        return servers[-1].wait_until_ready() if wait else servers[-1]

    try:
        yield start
    finally:
        for server in servers:
            server.end()
        ports.release()


@pytest.fixture
def start_server(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Start servers that stop at the end of the test, so that idle ones take no CPU from later tests."""
    with _servers(tokenizer_folder, tmp_path_factory) as start:
        yield start


@pytest.fixture(scope="module")
def start_shared_server(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Start servers that stop at the end of the module."""
    with _servers(tokenizer_folder, tmp_path_factory) as start:
        yield start


@pytest.fixture(scope="module")
def server(start_shared_server: Start) -> Server:
    """Return a ready server shared by the module."""
    server: Server = start_shared_server()
    return server


class RealEngine:
    """A running `trimtab-engine serve` with real cores, on ports chosen by the kernel. Without weights in the folder
    they are random. In a test with `forked` all of its processes are forks.
    """

    def __init__(self, model: Path, log: Path, *flags: str) -> None:
        self.log = log
        self._clients: list[httpx.Client] = []
        command = [*serve_command(model), "--served-model-name", "tiny", "--shutdown-timeout", "10"]
        command += ["--host", "127.0.0.1", "--port", "0", "--admin-port", "0", *flags]
        with log.open("wb") as stream:
            self.process = start_program(command, stream)
        try:
            self.wait_for(lambda: len(self._ports()) == 2, "two listening ports")
            self._clients += [
                httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=REAL_DEADLINE_SECONDS)
                for port in self._ports()
            ]
            self.http, self.admin = self._clients
            self.wait_for(self._is_ready, "readiness")
        except BaseException:  # no other code knows the process yet
            self.end()
            raise

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + REAL_DEADLINE_SECONDS
        while not condition():
            text = self.log.read_text()[-1000:]
            assert self.process.poll() is None, f"ended while waiting for {what}: {text}"
            assert time.monotonic() < deadline, f"waited for {what}: {text}"
            time.sleep(0.01)

    def _ports(self) -> list[str]:
        return re.findall(r"listens on 127\.0\.0\.1 port (\d+)\n", self.log.read_text())

    def _is_ready(self) -> bool:
        try:
            return self.http.get("/readyz").status_code == 200
        except httpx.TransportError:  # the process has just ended, which the caller notices
            return False

    def layout(self) -> dict[str, Any]:
        layout: dict[str, Any] = self.admin.get("/admin/v1/layout").json()
        return layout

    def memory(self) -> dict[str, Any]:
        ledger: dict[str, Any] = self.admin.get("/admin/v1/memory").json()
        return ledger

    def post(self, prompt: str | list[str], max_tokens: int = 20, rank: str | None = None) -> httpx.Response:
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        headers = {} if rank is None else {"X-data-parallel-rank": rank}
        return self.http.post("/v1/completions", json=body, headers=headers)

    def texts(self) -> dict[str, str]:
        """Return the text of every prompt, all requested at once."""
        answers: dict[str, str] = {}

        def ask(prompt: str) -> None:
            answers[prompt] = self.post(prompt).json()["choices"][0]["text"]

        threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in PROMPTS]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(REAL_DEADLINE_SECONDS)
        return answers

    def metric(self, name: str) -> dict[str, float]:
        """Return a family's values by engine."""
        lines = self.http.get("/metrics").text.splitlines()
        found = [line for line in lines if line.startswith(name + "{")]
        return {re.findall(r'engine="(\d+)"', line)[0]: float(line.split()[-1]) for line in found}

    def end(self) -> None:
        for client in self._clients:
            client.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def start_program(command: list[str], log: BinaryIO) -> "subprocess.Popen[bytes]":
    """Start a program with its output in `log`."""
    if forked_processes.SOCKET_VARIABLE in os.environ:
        process: subprocess.Popen[bytes] = forked_processes.popen(tuple(command), stderr=log)
        return process
    return subprocess.Popen(command, stderr=log)


def serve_command(model: Path) -> list[str]:
    """Return the command and the flags that every node of a real engine needs."""
    command = [sys.executable, "-m", "trimtab_engine.cli", "serve", str(model), "--device", "cpu"]
    command += ["--cpu-threads", "1", "--max-model-len", "256", "--num-gpu-blocks-override", "40"]
    return command if any(model.glob("*.safetensors")) else [*command, "--load-format", "dummy"]


@pytest.fixture(scope="session")
def real_engine() -> type[RealEngine]:
    """Return the class; the caller must stop its engines."""
    return RealEngine


@pytest.fixture(scope="session")
def node_command() -> Callable[[Path], list[str]]:
    """Return the command line of a worker node, without the layout flags."""
    return serve_command


@pytest.fixture(scope="session")
def program() -> Callable[[list[str], BinaryIO], "subprocess.Popen[bytes]"]:
    """Return a function that starts a program with its output in a file."""
    return start_program


@pytest.fixture(scope="session")
def tiny_moe(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a MoE model with random weights large enough for the experts to matter."""
    folder = tmp_path_factory.mktemp("mixture")
    for file in tiny_model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text()) | MOE_CONFIG
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for name, shape in expected_shapes(parse_model_config(config, {}, "config.json")).items():
        noise = torch.randn(shape, generator=generator) * (0.3 if len(shape) > 1 else 0.1)
        tensors[name] = noise + 1.0 if "norm" in name else noise
    save_file(tensors, folder / "model.safetensors")
    return folder


Serve = Callable[..., RealEngine]


@pytest.fixture
def serve(tiny_model: Path, tmp_path: Path) -> Iterator[Serve]:
    """Start engines with four sequence slots; they stop at the end of the test."""
    engines: list[RealEngine] = []

    def start(*flags: str, model: Path | None = None) -> RealEngine:
        log = tmp_path / f"log-{len(engines)}"
        engines.append(RealEngine(model or tiny_model, log, *FOUR_SLOTS, *flags))
        return engines[-1]

    yield start
    for engine in engines:
        engine.end()


def texts_of_one_rank(model: Path, log: Path) -> dict[str, str]:
    engine = RealEngine(model, log, *FOUR_SLOTS)
    try:
        return engine.texts()
    finally:
        engine.end()


@pytest.fixture(scope="session")
def expected(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the text of one rank, by prompt."""
    return texts_of_one_rank(tiny_model, tmp_path_factory.mktemp("one") / "log")


@pytest.fixture(scope="session")
def expected_of_moe(tiny_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return texts_of_one_rank(tiny_moe, tmp_path_factory.mktemp("one-mixture") / "log")

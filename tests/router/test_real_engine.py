"""The installed router in front of real engines: the official client, state streams, drain, a killed replica."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from devtools import model

DEADLINE_SECONDS = 180.0
ADMIN_TOKEN, STATE_TOKEN, ROUTER_TOKEN = "admin", "state", "router"
REPOSITORY = Path(__file__).parents[2]
SYSTEM = "You are a helpful assistant for a company that sells garden tools. " * 12

pytestmark = pytest.mark.model


def digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


class Program:
    """A running server with its log."""

    def __init__(self, command: list[str], log: Path, ports: str) -> None:
        self.log, self._ports = log, ports
        path = os.pathsep.join(str(REPOSITORY / each) for each in ("router", "engine-image", "kernels", "modelspec"))
        with log.open("wb") as stream:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *command],
                stdout=stream,
                stderr=stream,
                env=os.environ | {"PYTHONPATH": path, "TRITON_INTERPRET": "0"},
            )

    def wait_for(self, condition: Callable[[], Any], text: str) -> Any:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not (found := condition()):
            assert self.process.poll() is None, f"ended while waiting for {text}: {self.log.read_text()[-2000:]}"
            assert time.monotonic() < deadline, f"waited for {text}: {self.log.read_text()[-2000:]}"
            time.sleep(0.02)
        return found

    def ports(self) -> list[int]:
        """Return the ports of its log."""

        def read() -> list[int] | None:
            found = [int(port) for port in re.findall(self._ports, self.log.read_text())]
            return found if len(found) == 2 else None

        ports: list[int] = self.wait_for(read, "two ports")
        return ports

    def is_ready(self, port: int) -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{port}/readyz").status_code == 200
        except httpx.TransportError:
            return False

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def start_engine(folder: Path) -> Program:
    command = ["trimtab_engine.cli", "serve", str(model.folder()), "--device", "cpu", "--cpu-threads", "1"]
    command += ["--max-model-len", "2048", "--max-num-seqs", "8", "--device-memory-bytes", "3Gi"]
    command += ["--served-model-name", "smol", "--host", "127.0.0.1", "--port", "0", "--admin-port", "0"]
    command += ["--admin-token-sha256", digest(ADMIN_TOKEN), "--state-token-sha256", digest(STATE_TOKEN)]
    return Program(command, folder / "engine.log", r"listens on [\d.]+ port (\d+)\n")


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Program]]:
    if not model.is_ready():
        pytest.skip("the model is not in the cache (make model)")
    programs = [start_engine(tmp_path_factory.mktemp("engine")) for _ in range(2)]
    try:
        for program in programs:
            port = program.ports()[0]
            program.wait_for(lambda: program.is_ready(port), "readiness")  # noqa: B023
        yield programs
    finally:
        for program in programs:
            program.end()


class Router:
    """A running router."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.port, self.admin_port = program.ports()
        program.wait_for(lambda: program.is_ready(self.admin_port), "readiness")
        self.admin = httpx.Client(
            base_url=f"http://127.0.0.1:{self.admin_port}", headers={"Authorization": f"Bearer {ROUTER_TOKEN}"}
        )

    def metric(self, pattern: str) -> float:
        text = self.admin.get("/metrics").text
        return sum(float(value) for value in re.findall(rf"^trimtab_router_{pattern} (\S+)$", text, re.MULTILINE))


@pytest.fixture(scope="module")
def router(engines: list[Program], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    command = ["trimtab_router", "--host", "127.0.0.1", "--port", "0", "--admin-port", "0"]
    command += ["--admin-token-sha256", digest(ROUTER_TOKEN), "--served-model", "smol"]
    for engine in engines:
        port, admin_port = engine.ports()
        command += ["--endpoint", f"http://127.0.0.1:{port}?admin={admin_port}"]
    program = Program(command, tmp_path_factory.mktemp("router") / "router.log", r"port (\d+)")
    try:
        router = Router(program)
        assert router.admin.put("/admin/v1/state-token", json={"token": STATE_TOKEN}).status_code == 204
        program.wait_for(lambda: router.metric(r"state_age_seconds\{.*\}") > 0, "the streams")
        yield router
        router.admin.close()
    finally:
        program.end()


@pytest.fixture
def client(router: Router) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{router.port}/v1", api_key="key", max_retries=0) as client:
        yield client


def chat(client: openai.OpenAI, question: str, **fields: Any) -> Any:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    given: dict[str, Any] = {"model": "smol", "messages": messages, "max_tokens": 12, "temperature": 0} | fields
    return client.chat.completions.with_raw_response.create(**given)


def test_client_gets_the_engine_answer_streamed_and_whole(client: openai.OpenAI, engines: list[Program]) -> None:
    url = f"http://127.0.0.1:{engines[0].ports()[0]}/v1"
    with openai.OpenAI(base_url=url, api_key="key") as direct:
        expected = chat(direct, "Which spade?").parse().choices[0].message.content
    assert chat(client, "Which spade?").parse().choices[0].message.content == expected
    stream = chat(client, "Which spade?", stream=True, stream_options={"include_usage": True}).parse()
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected
    assert chunks[-1].usage.completion_tokens > 0
    assert [each.id for each in client.models.list()] == ["smol"]


def test_errors_of_the_engine_pass_through(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        chat(client, "hello", temperature=-1)
    with pytest.raises(openai.NotFoundError):
        client.get("/nothing", cast_to=object)


def test_same_prefix_goes_to_the_same_replica(client: openai.OpenAI, router: Router) -> None:
    topics = ["roses", "lawn mowers", "compost", "hedges"]
    first = {}
    for topic in topics:
        headers = {"x-trimtab-why": "1"}
        answer = chat(client, "Tell me. " * 60 + topic, extra_headers=headers)
        first[topic] = answer.headers["x-trimtab-replica"]
    time.sleep(6)  # the router's own expectation has ended: only the engine's keys count
    for topic in topics:
        answer = chat(client, "Tell me. " * 60 + topic, extra_headers={"x-trimtab-why": "1"})
        why = answer.headers["x-trimtab-why"]
        assert answer.headers["x-trimtab-replica"] == first[topic], why
        assert int(re.search(r"best=\S+ .*?cached=(\d+)", why)[1]) > 0, why  # type: ignore[index]
        assert answer.parse().usage.prompt_tokens_details.cached_tokens > 0
    assert router.metric("cached_tokens_predicted_total") > 0
    assert router.metric("cached_tokens_actual_total") > 0


def test_client_that_leaves_aborts_the_engine_request(client: openai.OpenAI, engines: list[Program]) -> None:
    def running() -> int:
        loads = [httpx.get(f"http://127.0.0.1:{each.ports()[0]}/load").json()["server_load"] for each in engines]
        return sum(loads)

    stream = chat(client, "Count to a thousand.", stream=True, max_tokens=1500, extra_body={"ignore_eos": True}).parse()
    next(iter(stream))
    assert running() == 1
    stream.close()
    engines[0].wait_for(lambda: running() == 0, "the abort")


def test_demand_is_reported_with_the_token_only(router: Router) -> None:
    assert httpx.get(f"http://127.0.0.1:{router.admin_port}/admin/v1/demand").status_code == 401
    demand = router.admin.get("/admin/v1/demand").json()
    assert demand["held"] == 0
    assert demand["arrived"] > 0
    assert demand["arrived_prompt_tokens"] > demand["arrived"]


def test_killed_replica_loses_no_request_without_a_first_byte(
    engines: list[Program], tmp_path: Path, client: openai.OpenAI
) -> None:
    """The last test of this module: it kills a replica."""
    port = client.base_url.port
    body = {"model": "smol", "prompt": "hello", "max_tokens": 200, "ignore_eos": True}
    requests = [
        subprocess.Popen(
            [
                *("curl", "-s", "-o", str(tmp_path / str(number)), "-w", "%{http_code}"),
                *("-H", "content-type: application/json", "-d", json.dumps(body)),
                f"http://127.0.0.1:{port}/v1/completions",
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(8)
    ]
    time.sleep(0.5)
    engines[0].process.send_signal(signal.SIGKILL)
    assert [request.communicate(timeout=DEADLINE_SECONDS)[0] for request in requests] == ["200"] * 8

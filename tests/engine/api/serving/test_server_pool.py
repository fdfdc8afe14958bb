"""Several API servers with one engine core: every request is answered, counts are complete, one failure stops all."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import waiting

END_SECONDS = 60.0  # for everything to end after one process was killed: a second, and a machine may be busy
REQUEST_TIMEOUT_SECONDS = 120.0  # for everything to exit after a kill: usually a second, more on a busy machine
NUM_SERVERS = 4
COUNT = ("--api-server-count", str(NUM_SERVERS))
SLOW = {"prompt": "!slowab", "max_tokens": 200}


def children(pid: int) -> dict[int, str]:
    """Return process IDs and command lines of a process' children."""
    found = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with contextlib.suppress(OSError):
            found[int(child)] = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def api_servers(server: Any) -> list[int]:
    return [pid for pid, command in children(server.process.pid).items() if "api.serving.server_process" in command]


def core(server: Any) -> int:
    (pid,) = [pid for pid, command in children(server.process.pid).items() if "stub_core" in command]
    return pid


def on_new_connections(server: Any, num: int, ask: Callable[[httpx.Client], Any]) -> list[Any]:
    """Return the responses of `num` concurrent clients, each on its own connection, so that all servers get some."""
    answers: list[Any] = []

    def one() -> None:
        with httpx.Client(base_url=server.http.base_url, timeout=REQUEST_TIMEOUT_SECONDS) as client:
            answers.append(ask(client))

    threads = [threading.Thread(target=one) for _ in range(num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(REQUEST_TIMEOUT_SECONDS)
    return answers


@contextlib.contextmanager
def running_requests(server: Any, num: int, **fields: Any) -> Iterator[list[Any]]:
    """Run `num` slow requests at once; their responses (or exceptions) are in the list after the block."""
    results: list[Any] = []

    def one() -> None:
        try:
            with httpx.Client(base_url=server.http.base_url, timeout=REQUEST_TIMEOUT_SECONDS) as client:
                results.append(client.post("/v1/completions", json={**SLOW, **fields}))
        except httpx.TransportError as error:
            results.append(error)

    threads = [threading.Thread(target=one) for _ in range(num)]
    for thread in threads:
        thread.start()
    try:
        server.wait_for(lambda: server.metric("vllm:num_requests_running") >= num, "the requests to run")
        yield results
    finally:
        for thread in threads:
            thread.join(REQUEST_TIMEOUT_SECONDS)


@pytest.fixture(scope="module")
def scaled(start_shared_server: Any) -> Any:
    return start_shared_server(*COUNT)


def test_server_count_starts_servers_and_one_core(scaled: Any) -> None:
    assert len(api_servers(scaled)) == NUM_SERVERS
    assert core(scaled)


def test_every_server_responds_and_every_scrape_is_complete(scaled: Any) -> None:
    def complete(client: httpx.Client) -> str:
        body = {"prompt": "abc", "max_tokens": 5, "n": 2}
        return str(client.post("/v1/completions", json=body).json()["choices"][1]["text"])

    before = scaled.metric("vllm:request_success_total", finished_reason="length")
    assert on_new_connections(scaled, 32, complete) == ["abcab"] * 32
    texts = on_new_connections(scaled, 16, lambda client: client.get("/metrics").text)
    for text in texts:
        lines = [line for line in text.splitlines() if line.startswith("vllm:request_success_total{")]
        counted = [line.split()[-1] for line in lines if 'finished_reason="length"' in line]
        assert [float(number) - before for number in counted] == [64]
    assert scaled.metric("vllm:time_to_first_token_seconds_count") == 64
    assert scaled.metric("vllm:inter_token_latency_seconds_count") == 4 * 64
    assert scaled.metric("vllm:request_params_n_count") == 32


def test_stream_and_admin_call_work(scaled: Any) -> None:
    answer = scaled.http.post("/v1/completions", json={"prompt": "ab", "max_tokens": 4, "stream": True})
    assert answer.text.endswith("data: [DONE]\n\n")
    assert scaled.core_state()["running"] == 0


def test_load_covers_all_servers(scaled: Any) -> None:
    def loads() -> set[int]:
        return {answer["server_load"] for answer in on_new_connections(scaled, 4, lambda c: c.get("/load").json())}

    lines: list[Iterator[str]] = []  # kept, because a stream ends with its reader
    with contextlib.ExitStack() as streams:
        for _ in range(6):
            client = streams.enter_context(httpx.Client(base_url=scaled.http.base_url, timeout=REQUEST_TIMEOUT_SECONDS))
            answer = streams.enter_context(client.stream("POST", "/v1/completions", json={**SLOW, "stream": True}))
            lines.append(answer.iter_lines())
            next(lines[-1])
        scaled.wait_for(lambda: loads() == {6}, "all six to be counted")
    scaled.wait_for(lambda: loads() == {0}, "all six to be gone")


def test_core_kill_fails_requests_and_stops_all(start_server: Any) -> None:
    server = start_server(*COUNT)
    processes = [server.process.pid, *children(server.process.pid)]
    with running_requests(server, 8) as results:
        os.kill(core(server), signal.SIGKILL)
        server.wait_for(lambda: server.status("/readyz") in (503, None), "readiness to fail")
    assert {result.status_code for result in results} == {500}
    assert server.process.wait(END_SECONDS) == 1
    waiting.until_gone(processes)
    assert "the engine core ended unexpectedly (killed by signal 9)" in server.log.read_text()
    assert "Traceback" not in server.log.read_text()


def test_server_kill_stops_all(start_server: Any) -> None:
    server = start_server(*COUNT)
    processes = [server.process.pid, *children(server.process.pid)]
    with running_requests(server, 8) as results:
        os.kill(api_servers(server)[2], signal.SIGKILL)
    codes = [getattr(result, "status_code", None) for result in results]
    assert set(codes) <= {500, None}  # None: connections of the killed server
    assert server.process.wait(END_SECONDS) == 1
    waiting.until_gone(processes)
    assert "API server 3 ended unexpectedly (killed by signal 9)" in server.log.read_text()


def test_first_process_kill_leaves_no_process(start_server: Any) -> None:
    server = start_server(*COUNT)
    others = list(children(server.process.pid))
    assert len(others) == NUM_SERVERS + 1
    server.process.kill()
    server.process.wait(END_SECONDS)
    waiting.until_gone(others)


def test_sigterm_drains_all_servers(start_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB_STEP_MILLISECONDS", "80")  # long enough to observe the drain
    server = start_server(*COUNT, "--shutdown-timeout", "100")
    with running_requests(server, 8, prompt="ab", max_tokens=150) as results:
        server.process.send_signal(signal.SIGTERM)
        server.wait_for(
            lambda: all("draining" in text for text in on_new_connections(server, 8, lambda c: c.get("/readyz").text)),
            "the drain to show",
        )
        refused = on_new_connections(server, 8, lambda client: client.post("/v1/completions", json={"prompt": "a"}))
        assert {(answer.status_code, "retry-after" in answer.headers) for answer in refused} == {(503, True)}
        assert set(on_new_connections(server, 8, lambda client: client.get("/livez").status_code)) == {200}
    assert {result.json()["usage"]["completion_tokens"] for result in results} == {150}
    assert server.process.wait(2 * END_SECONDS) == 0


def test_drain_timeout_aborts_on_all_servers(start_server: Any) -> None:
    server = start_server(*COUNT, "--shutdown-timeout", "0.3")
    with running_requests(server, 6) as results:
        server.process.send_signal(signal.SIGTERM)
    assert {result.json()["choices"][0]["finish_reason"] for result in results} == {"abort"}
    assert server.process.wait(END_SECONDS) == 0


def test_admin_drain_affects_every_server(start_server: Any) -> None:
    server = start_server(*COUNT)
    assert server.admin.post("/admin/v1/drain", json={"deadline_seconds": 5}).status_code == 200
    server.wait_for(
        lambda: set(on_new_connections(server, 8, lambda client: client.get("/readyz").status_code)) == {503},
        "the drain to show",
    )


def test_unreadable_tokenizer_stops_all(start_server: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    server = start_server(*COUNT, model=tmp_path, wait=False)
    assert server.process.wait(END_SECONDS) == 2
    assert server.log.read_text().count(f"no tokenizer in {tmp_path}") == 1


def test_loading_servers_all_serve_probes(start_server: Any) -> None:
    server = start_server(*COUNT, "--seed", "777", wait=False)
    server.wait_for(lambda: server.status("/livez") == 200, "the first answer")
    server.wait_for(
        lambda: set(on_new_connections(server, 8, lambda c: c.get("/startupz").json()["stage"])) == {"weights"},
        "progress on all",
    )
    assert server.status("/readyz") == 503
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(END_SECONDS) == 0

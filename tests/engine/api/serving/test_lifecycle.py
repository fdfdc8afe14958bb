"""Lifecycle of the server process: loading, disconnects, core failure, draining, keys."""

import http.client
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

END_SECONDS = 60.0  # for the process to exit: usually seconds, more on a busy machine
REQUEST_TIMEOUT_SECONDS = 120.0  # for a response on a busy machine
OPENAI_ROUTES = (
    ("POST", "/v1/completions", b'{"prompt": "a", "max_tokens": 1}'),
    ("POST", "/v1/chat/completions", b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}'),
    ("GET", "/v1/models", b""),
    ("GET", "/v1/models/stub", b""),
    ("POST", "/tokenize", b'{"prompt": "a"}'),
    ("POST", "/detokenize", b'{"tokens": [97]}'),
)
COMPLETION = b'{"prompt": "ab", "max_tokens": 1}'
QUIET_SECONDS = 1.0  # without requests, after which a terminating engine exits
SILENCE_SECONDS = 4
TRAFFIC_SECONDS = 3.0  # requests continue for this time after SIGTERM: three times QUIET_SECONDS
SLOW = {"prompt": "!slowab", "max_tokens": 200}


@contextmanager
def running_request(server: Any, **fields: Any) -> Iterator[dict[str, Any]]:
    """Run a request in a thread; its result is in the dictionary after the block."""
    result: dict[str, Any] = {}

    def ask() -> None:
        try:
            with httpx.Client(base_url=server.http.base_url, timeout=REQUEST_TIMEOUT_SECONDS) as client:
                result["response"] = client.post("/v1/completions", json={**SLOW, **fields})
        except httpx.TransportError as error:
            result["error"] = error

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        server.wait_for(lambda: server.metric("vllm:num_requests_running") >= 1, "the request to run")
        yield result
    finally:
        thread.join(REQUEST_TIMEOUT_SECONDS)


@pytest.mark.parametrize("stream", [False, True])
def test_client_disconnect_frees_sequences(server: Any, stream: bool) -> None:
    before = server.core_state()["aborted"]
    body = json.dumps({**SLOW, "n": 2, "stream": stream})
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=REQUEST_TIMEOUT_SECONDS)
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    server.wait_for(lambda: server.core_state()["running"] == 2, "both sequences to run")
    connection.close()
    server.wait_for(lambda: server.core_state()["aborted"] == before + 2, "both sequences to be aborted")
    assert server.core_state()["running"] == 0
    server.wait_for(
        lambda: server.metric("vllm:request_success_total", finished_reason="abort") >= before + 2, "both to be counted"
    )


def test_loading_engine_serves_probes_and_503(start_server: Any) -> None:
    server = start_server("--seed", "777", wait=False)
    server.wait_for(lambda: server.status("/livez") == 200, "the first answer")
    server.wait_for(lambda: server.http.get("/startupz").json()["stage"] == "weights", "progress")
    startup = server.http.get("/startupz")
    assert (startup.status_code, startup.json()) == (503, {"stage": "weights", "percent": 40.0})
    assert server.status("/readyz") == server.status("/health") == 503
    assert "loading" in server.http.get("/readyz").json()["reason"]
    for method, path, body in OPENAI_ROUTES:
        for content in (body, b"{", b'{"model": "another"}'):
            response = server.http.request(method, path, content=content)
            assert (response.status_code, response.headers.get("retry-after")) == (503, "5"), path
            assert "the engine is loading" in response.json()["error"]["message"]
    assert server.admin.get("/admin/v1/config").status_code == 503
    assert server.status("/metrics") == 200
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(END_SECONDS) == 0


@pytest.mark.parametrize("num_servers", ["1", "2"])
def test_requests_during_startup_are_refused_503_or_served(start_server: Any, num_servers: str) -> None:
    """One connection per request, without a pause, from before the port is open until the first completion."""
    server = start_server("--api-server-count", num_servers, wait=False)
    url = f"http://127.0.0.1:{server.port}/v1/completions"
    deadline = time.monotonic() + 120.0
    status = None
    while status != 200:
        assert time.monotonic() < deadline, server.log.read_text()[-1000:]
        try:
            answer = httpx.post(url, json={"prompt": "ab", "max_tokens": 1}, timeout=REQUEST_TIMEOUT_SECONDS)
        except httpx.ConnectError:
            continue
        status = answer.status_code
        assert "x-request-id" in answer.headers
        assert status == 200 or (status == 503 and "the engine is loading" in answer.json()["error"]["message"])


def test_failed_core_start_exits_with_its_message_and_code(start_server: Any) -> None:
    server = start_server("--seed", "666", wait=False)
    assert server.process.wait(END_SECONDS) == 2
    assert "failure set by the stub; use another seed" in server.log.read_text()
    assert "Traceback" not in server.log.read_text()


def test_unreadable_tokenizer_exits(start_server: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    server = start_server(model=tmp_path, wait=False)
    assert server.process.wait(END_SECONDS) == 2
    assert f"no tokenizer in {tmp_path}: tokenizer.json is missing" in server.log.read_text()


def test_invalid_chat_template_exits_with_one_line(start_server: Any) -> None:
    server = start_server("--chat-template", "{% for %}", wait=False)
    assert server.process.wait(END_SECONDS) == 2
    assert "the chat template of --chat-template: invalid Jinja in line 1" in server.log.read_text().splitlines()[-1]


@pytest.mark.parametrize("stream", [False, True])
def test_core_failure_fails_requests_and_exits(start_server: Any, stream: bool) -> None:
    server = start_server()
    with running_request(server, stream=stream) as result:
        answer = server.http.post("/v1/completions", json={"prompt": "!die"})
        assert answer.status_code == 500
        assert server.status("/livez") in (503, None)
    response = result["response"]
    if stream:
        assert '"error"' in response.text
        assert response.text.endswith("data: [DONE]\n\n")
    else:
        assert response.status_code == 500
    assert server.process.wait(END_SECONDS) == 1
    assert "ended unexpectedly" in server.log.read_text()


def request_on_new_connection(server: Any) -> tuple[int, str | None] | None:
    """Return status and `Connection` header of a response; None if the port is closed."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=REQUEST_TIMEOUT_SECONDS)
    try:
        connection.request("POST", "/v1/completions", COMPLETION, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        return answer.status, answer.headers["connection"]
    except OSError:
        return None
    finally:
        connection.close()


def drains(server: Any) -> bool:
    return "draining" in server.http.get("/readyz").text


@pytest.mark.parametrize("flags", [[], ["--api-server-count", "2"]])
def test_requests_after_sigterm_are_served_until_traffic_stops(start_server: Any, flags: list[str]) -> None:
    """A node's proxy may learn of an engine's shutdown seconds later than the engine."""
    server = start_server("--shutdown-timeout", "20", *flags)
    answers = [request_on_new_connection(server)]
    readiness: set[int | None] = set()
    server.process.send_signal(signal.SIGTERM)
    until = time.monotonic() + TRAFFIC_SECONDS
    while (asked_at := time.monotonic()) < until:
        answers.append(request_on_new_connection(server))
        readiness.add(server.status("/readyz"))
        if time.monotonic() - asked_at > QUIET_SECONDS / 2:
            answers.pop()  # a busy machine may have had a pause without arrivals
            break
    else:
        assert answers[-1] == (200, "close")
        assert 503 in readiness
    assert set(answers) <= {(200, None), (200, "close")}
    assert server.process.wait(END_SECONDS) == 0


def test_endless_traffic_does_not_prevent_shutdown(start_server: Any) -> None:
    """Requests are served for half of the shutdown timeout, then rejected."""
    server = start_server("--shutdown-timeout", "2")
    server.process.send_signal(signal.SIGTERM)
    answers: list[tuple[int, str | None] | None] = []
    while not answers or answers[-1] is not None:
        answers.append(request_on_new_connection(server))
    assert set(answers) <= {(200, None), (200, "close"), (503, "close"), None}
    assert answers == sorted(answers, key=lambda answer: answer[0] if answer is not None else 600)
    assert server.process.wait(END_SECONDS) == 0


def test_sigterm_lets_running_requests_finish(start_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB_STEP_MILLISECONDS", "25")  # long enough to observe the running request
    server = start_server("--shutdown-timeout", "60")
    with running_request(server, prompt="ab", max_tokens=200) as result:
        server.process.send_signal(signal.SIGTERM)
    assert result["response"].json()["usage"]["completion_tokens"] == 200
    assert server.process.wait(END_SECONDS) == 0


def test_drain_after_traffic_stops_rejects_new_and_finishes_running(start_server: Any) -> None:
    server = start_server("--shutdown-timeout", "250")
    with running_request(server) as result:
        server.process.send_signal(signal.SIGTERM)
        server.wait_for(lambda: drains(server), "the drain to show")
        assert server.status("/livez") == 200
        refused = server.http.post("/v1/completions", json={"prompt": "a"})
        assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
        assert server.metric("vllm:num_requests_running") == 1
        server.process.send_signal(signal.SIGTERM)  # ends the endless request
    assert result["response"].status_code == 200
    assert server.process.wait(END_SECONDS) == 0


@pytest.mark.parametrize("flags", [[], ["--api-server-count", "2"]])
def test_keepalive_connections_close_with_the_drain(start_server: Any, flags: list[str]) -> None:
    """A Service without the pod only redirects new connections, not open ones."""
    server = start_server("--shutdown-timeout", "250", *flags)
    completion = {"prompt": "a", "max_tokens": 1}
    assert server.http.post("/v1/completions", json=completion).headers.get("connection") != "close"
    with running_request(server) as result:
        server.process.send_signal(signal.SIGTERM)

        def is_closed(answer: httpx.Response) -> bool:
            return bool(answer.headers.get("connection") == "close")

        server.wait_for(lambda: is_closed(server.http.get("/livez")), "probes to close")
        server.wait_for(lambda: is_closed(server.http.post("/v1/completions", json=completion)), "requests to close")
        server.process.send_signal(signal.SIGTERM)  # ends the endless request
    assert result["response"].headers["connection"] == "close"
    assert server.process.wait(END_SECONDS) == 0


def test_ctrl_c_drains_and_sets_exit_code(start_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal signals its whole foreground process group; a server's processes are not in it."""
    monkeypatch.setenv("STUB_STEP_MILLISECONDS", "50")  # long enough to observe the drain
    server = start_server("--shutdown-timeout", "100")
    assert os.getpgid(core_pid(server)) != os.getpgid(server.process.pid)
    with running_request(server, prompt="ab", max_tokens=100) as result:
        server.process.send_signal(signal.SIGINT)
        server.wait_for(lambda: server.status("/readyz") == 503, "readiness to fail")
        assert drains(server), "Ctrl-C does not wait for endpoint updates"
    assert result["response"].json()["usage"]["completion_tokens"] == 100
    assert server.process.wait(END_SECONDS) == 130
    assert "Traceback" not in server.log.read_text()


def test_requests_beyond_shutdown_timeout_are_aborted(start_server: Any) -> None:
    server = start_server("--shutdown-timeout", "0.3")
    with running_request(server) as result:
        server.process.send_signal(signal.SIGTERM)
    assert result["response"].json()["choices"][0]["finish_reason"] == "abort"
    assert server.process.wait(END_SECONDS) == 0


def test_second_signal_exits_at_once(start_server: Any) -> None:
    server = start_server("--shutdown-timeout", "250")
    with running_request(server):
        server.process.send_signal(signal.SIGTERM)
        server.wait_for(lambda: server.status("/readyz") == 503, "the drain to show")
        server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(END_SECONDS) == 0


@pytest.mark.parametrize("flags", [[], ["--api-server-count", "2"]])
def test_hanging_core_fails_readyz_then_livez(start_server: Any, flags: list[str]) -> None:
    server = start_server("--core-silence-timeout", str(SILENCE_SECONDS), *flags)
    core = core_pid(server)
    server.wait_for(lambda: server.metric("trimtab_core_silence_seconds") < 2.5, "a heartbeat, one per second")
    os.kill(core, signal.SIGSTOP)
    try:
        server.wait_for(lambda: server.status("/readyz") == 503, "readiness to fail")
        livez = server.status("/livez")
        assert livez == 200 or server.metric("trimtab_core_silence_seconds") >= 2 * SILENCE_SECONDS - 1
        assert "engine core 0 has been silent for" in server.http.get("/readyz").json()["reason"]
        refused = server.http.post("/v1/completions", json={"prompt": "a"})
        assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
        assert server.admin.get("/admin/v1/memory").status_code == 503
        assert server.metric("trimtab_core_silence_seconds") > SILENCE_SECONDS - 1
        server.wait_for(lambda: server.status("/livez") == 503, "liveness to fail")
    finally:
        os.kill(core, signal.SIGCONT)
    server.wait_for(lambda: server.status("/readyz") == server.status("/livez") == 200, "heartbeats to resume")
    assert server.http.post("/v1/completions", json={"prompt": "ab", "max_tokens": 1}).status_code == 200


def core_pid(server: Any) -> int:
    """Return the process ID of the stub core that the server has started."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = int((process / "stat").read_text().rsplit(")", 1)[1].split()[1])
            if parent == server.process.pid and b"stub_core" in (process / "cmdline").read_bytes():
                return int(process.name)
    raise AssertionError("there is no core")


@pytest.mark.parametrize("guards_metrics", [False, True])
def test_api_keys_protect_all_but_probes_and_metrics(start_server: Any, guards_metrics: bool) -> None:
    server = start_server("--api-key", "k1", *(["--api-key-for-metrics"] if guards_metrics else []))
    with_key = {"Authorization": "Bearer k1"}
    guarded = [*OPENAI_ROUTES, ("GET", "/version", b""), ("GET", "/openapi.json", b""), ("GET", "/nothing", b"")]
    for method, path, body in guarded:
        assert server.http.request(method, path, content=body).status_code == 401, path
        assert server.http.request(method, path, content=body, headers=with_key).status_code != 401, path
    for path in ("/livez", "/readyz", "/startupz", "/health", "/ping"):
        assert server.status(path) == 200
    for path in ("/metrics", "/load"):
        assert server.status(path) == (401 if guards_metrics else 200)
        assert server.http.get(path, headers=with_key).status_code == 200


def test_any_of_several_keys_is_accepted(start_server: Any) -> None:
    server = start_server("--api-key", "k1", "k2")
    body = {"prompt": "a", "max_tokens": 1}
    for header, status in (("Bearer k2", 200), ("Bearer k", 401), ("k1", 401), ("Basic k1", 401)):
        headers = {"Authorization": header}
        assert server.http.post("/v1/completions", json=body, headers=headers).status_code == status
        assert server.http.get("/v1/models", headers=headers).status_code == status
    assert server.http.get("/v1/models").json()["error"]["type"] == "authentication_error"
    assert server.status("/readyz") == server.status("/metrics") == 200


@pytest.mark.parametrize("flags", [[], ["--api-server-count", "2"]])
def test_full_queue_is_503_with_retry_after_and_counted(start_server: Any, flags: list[str]) -> None:
    server = start_server("--max-num-seqs", "1", "--max-num-queued-reqs", "1", *flags)
    with running_request(server), running_request(server):
        server.wait_for(lambda: server.core_state()["running"] == 2, "both requests")

        def request() -> httpx.Response:  # on a separate connection
            return httpx.post(
                f"{server.http.base_url}/v1/completions", json={"prompt": "ab"}, timeout=REQUEST_TIMEOUT_SECONDS
            )

        server.wait_for(  # every server knows the queue
            lambda: {request().status_code for _ in range(4)} == {503}, "refusals"
        )
        refused = request()
        assert server.metric("vllm:admission_rejections_total", reason="max_num_queued_reqs") >= 5
        server.process.send_signal(signal.SIGTERM)
        server.wait_for(lambda: "draining" in server.log.read_text(), "the first signal")  # signals may be merged
        server.process.send_signal(signal.SIGTERM)
    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "1"
    assert refused.json()["error"]["type"] == "service_unavailable"
    assert "max_num_queued_reqs is 1" in refused.json()["error"]["message"]


@pytest.mark.parametrize(("seed", "mode", "status"), [("888", "wait", 503), ("889", "keep", 200)])
def test_paused_engine_is_not_ready_and_accepts_only_with_keep(
    start_server: Any, seed: str, mode: str, status: int
) -> None:
    server = start_server("--seed", seed, wait=False)
    server.wait_for(lambda: server.status("/startupz") == 200, "the load")
    answer = server.http.get("/readyz")
    assert answer.status_code == server.status("/health") == 503
    assert f"paused with mode {mode}" in answer.json()["reason"]
    assert server.status("/livez") == 200
    assert server.http.post("/v1/completions", json={"prompt": "a"}).status_code == status


@pytest.mark.parametrize("path", ["/metrics", "/health", "/livez", "/readyz", "/startupz", "/ping", "/v1/models"])
def test_probes_and_metrics_support_head(server: Any, path: str) -> None:
    answer = server.http.head(path)
    assert (answer.status_code, answer.content) == (200, b"")

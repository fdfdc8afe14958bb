"""The board's server: JSON of a recorded deployment, and rejected requests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer
from trimtab_operator.board.recorder import Recorder, keep_decisions
from trimtab_operator.board.server import build_application, serve_board
from trimtab_operator.tuner.moves import Decision, Expectation, Measure, Move, Reason
from trimtab_operator.tuner.parameters import Parameter

NOW = 2e9
MOVE = Move(
    Reason.CHUNKS_TOO_LARGE,
    Parameter.MAX_NUM_BATCHED_TOKENS,
    2048,
    1024,
    {"violated": 0.2},
    (Expectation(Measure.ITL_P95, 0.09, 0.05, 0.04, 0.06),),
)
MADE = Decision("d-1", NOW - 60, MOVE, "Lowered <b>it</b>.", "achieved: 51 ms")


@pytest.fixture
async def client() -> AsyncIterator[TestClient[Any, Any]]:
    recorder = Recorder()
    record = recorder.find_or_add(("team-a", "chat"), "u")
    assert record is not None
    condition = {"type": "Ready", "status": "False", "reason": "Starting", "message": "1 of 2 replicas starts"}
    record.status = {"phase": "Starting", "ready": "1/2", "conditions": [condition]}
    record.timeline.add(NOW, {})
    keep_decisions(record, [Decision("d-0", NOW - 99, MOVE, "Earlier."), MADE])
    async with TestClient(TestServer(build_application(recorder, lambda: NOW))) as found:
        yield found


async def get_json(client: TestClient[Any, Any], path: str) -> Any:
    async with client.get(path) as response:
        assert response.status == 200
        return await response.json()


async def test_list_shows_state_and_problem(client: TestClient[Any, Any]) -> None:
    (entry,) = (await get_json(client, "/api/deployments"))["deployments"]
    assert (entry["namespace"], entry["name"], entry["ready"]) == ("team-a", "chat", "1/2")
    assert entry["problem"] == "1 of 2 replicas starts"


async def test_decisions_have_prediction_and_outcome(client: TestClient[Any, Any]) -> None:
    found = await get_json(client, "/api/deployments/team-a/chat")
    newest, older = found["decisions"]
    assert (newest["id"], older["id"]) == ("d-1", "d-0")
    assert newest["predictions"] == ["ITL p95 from 90 ms to 50 ms (between 40 ms and 60 ms)"]
    assert (newest["from"], newest["to"], newest["outcome"]) == (2048, 1024, "achieved: 51 ms")


@pytest.mark.parametrize(("query", "step", "count"), [("", 15, 240), ("?range=day", 600, 144)])
async def test_range_selects_the_resolution(client: TestClient[Any, Any], query: str, step: int, count: int) -> None:
    found = await get_json(client, f"/api/deployments/team-a/chat{query}")
    assert (found["step_seconds"], len(found["times"]), found["since"]) == (step, count, NOW)


@pytest.mark.parametrize("path", ["/api/deployments/team-b/chat", "/api/secrets", "/../recorder.py", "/board.py"])
async def test_unknown_paths_are_not_found(client: TestClient[Any, Any], path: str) -> None:
    async with client.get(path) as response:
        assert response.status == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
async def test_board_is_read_only(client: TestClient[Any, Any], method: str) -> None:
    for path in ("/", "/api/deployments", "/api/deployments/team-a/chat"):
        async with client.request(method, path) as response:
            assert response.status == 405


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8082", "localhost.evil.example:1", "10.0.0.1:8082", ""])
async def test_other_host_names_are_rejected(client: TestClient[Any, Any], host: str) -> None:
    for path in ("/", "/api/deployments"):
        async with client.get(path, headers={"Host": host}) as response:
            assert response.status == 403
            assert "deployments" not in await response.text()


@pytest.mark.parametrize("host", ["localhost", "localhost:9000", "127.0.0.1:1", "[::1]:8082", "[::1]"])
async def test_loopback_host_names_are_served(client: TestClient[Any, Any], host: str) -> None:
    async with client.get("/api/deployments", headers={"Host": host}) as response:
        assert response.status == 200


@pytest.mark.parametrize("path", ["/", "/board.js", "/board.css", "/api/deployments", "/missing"])
async def test_every_response_has_security_headers(client: TestClient[Any, Any], path: str) -> None:
    async with client.get(path) as response:
        policy = response.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        assert "Access-Control-Allow-Origin" not in response.headers


async def test_used_port_does_not_stop_the_operator(caplog: pytest.LogCaptureFixture) -> None:
    first = await serve_board(0, Recorder(), lambda: NOW)
    assert first is not None
    try:
        address, port = first.addresses[0]
        assert address == "127.0.0.1"
        assert await serve_board(port, Recorder(), lambda: NOW) is None
        assert "--board-port" in caplog.text
    finally:
        await first.cleanup()

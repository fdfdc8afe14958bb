"""Admin API: authentication, calls that reach the core, and error format."""

import hashlib
from typing import Any

import pytest
from trimtab_engine.api.http.path_errors import ADMIN_PORT, PUBLIC_PORT

TOKEN = "operator-secret"


@pytest.fixture(scope="module")
def guarded(start_shared_server: Any) -> Any:
    return start_shared_server("--admin-token-sha256", hashlib.sha256(TOKEN.encode()).hexdigest())


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (f"Bearer {TOKEN}", 200),
        (f"bearer {TOKEN}", 200),
        (None, 401),
        ("Bearer wrong", 401),
        (TOKEN, 401),
        (f"Basic {TOKEN}", 401),
        (f"Bearer {hashlib.sha256(TOKEN.encode()).hexdigest()}", 401),  # the hash is not a token
    ],
)
def test_every_call_requires_the_token(guarded: Any, header: str | None, status: int) -> None:
    headers = {"Authorization": header} if header else {}
    calls = [("GET", "config"), ("PATCH", "config"), ("GET", "memory"), ("GET", "layout")]
    answers = [guarded.admin.request(method, f"/admin/v1/{path}", headers=headers, json={}) for method, path in calls]
    assert {answer.status_code for answer in answers} == {status}
    if status == 401:
        assert all(set(answer.json()) == {"message"} for answer in answers)


def test_drain_without_token_has_no_effect(guarded: Any) -> None:
    assert guarded.admin.post("/admin/v1/drain", json={"deadline_seconds": 1}).status_code == 401
    assert guarded.status("/readyz") == 200


def test_the_admin_api_is_not_on_the_public_port(server: Any) -> None:
    answers = server.http.get("/admin/v1/config"), server.admin.get("/v1/models")
    assert [answer.status_code for answer in answers] == [404, 404]
    assert "on the server's admin port (--admin-port)" in answers[0].json()["error"]["message"]
    assert "on the server's public port (--port)" in answers[1].json()["message"]


def test_each_port_names_paths_of_the_other(server: Any) -> None:
    for client, other in ((server.http, PUBLIC_PORT), (server.admin, ADMIN_PORT)):
        paths = client.get("/openapi.json").json()["paths"]
        assert [path for path in paths if not other.has(path)] == []


def test_unknown_path_or_method_error_suggests_alternative(server: Any) -> None:
    answer = server.http.post("/chat/completions", json={})
    assert answer.status_code == 404
    assert answer.json()["error"]["message"].endswith("did you mean /v1/chat/completions?")
    answer = server.http.get("/v1/chat/completions")
    assert answer.status_code == 405
    assert answer.json()["error"]["message"] == "/v1/chat/completions does not support GET; use POST"
    assert server.admin.get("/admin/v1/confg").json()["message"].endswith("did you mean /admin/v1/config?")


@pytest.mark.parametrize(
    ("path", "headers", "if_match", "dry_run"),
    [
        ("config", {}, None, False),
        ("config?dry_run=1", {"If-Match": "3"}, 3, True),
        ("config?dry_run=true", {"If-Match": '"7"'}, 7, True),
        ("config?dry_run=0", {"If-Match": "*"}, None, False),
    ],
)
def test_patch_reaches_core_with_preconditions(
    server: Any, path: str, headers: dict[str, str], if_match: int | None, dry_run: bool
) -> None:
    answer = server.admin.patch(f"/admin/v1/{path}", json={"max_num_seqs": 4}, headers=headers)
    assert answer.status_code == 200
    assert answer.json()["body"] == {"values": {"max_num_seqs": 4}, "if_match": if_match, "dry_run": dry_run}


def test_finished_requests_are_reported_once(server: Any) -> None:
    before = server.admin.get("/admin/v1/requests").json()["next"]
    body = {"model": "stub", "prompt": "hello", "max_tokens": 3}
    assert server.http.post("/v1/completions", json=body).status_code == 200
    answer = server.admin.get(f"/admin/v1/requests?after={before}").json()
    (row,) = answer["finished"]
    values = dict(zip(answer["columns"]["finished"], row, strict=True))
    assert values["output_tokens"] == 3
    assert 0 <= values["ttft_seconds"] <= values["e2e_seconds"] <= values["age_seconds"]
    assert "hello" not in str(answer["finished"])
    assert server.admin.get(f"/admin/v1/requests?after={answer['next']}").json()["finished"] == []


@pytest.mark.parametrize("query", ["after=-1", "after=x", "after=1e3", "afer=1"])
def test_invalid_request_number_is_400(server: Any, query: str) -> None:
    assert server.admin.get(f"/admin/v1/requests?{query}").status_code == 400


def test_number_beyond_64_bits_is_checked_by_core(server: Any) -> None:
    answer = server.admin.patch("/admin/v1/config", json={"max_num_seqs": 10**30})
    assert answer.json()["body"]["values"] == {"max_num_seqs": 2**63 - 1}


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ({"Origin": "https://evil.example"}, "Origin: this port does not answer web pages"),
        ({"Origin": "null"}, "Origin"),
        ({"Origin": "http://127.0.0.1:3000"}, "Origin"),
        ({"Sec-Fetch-Site": "cross-site", "Content-Type": "text/plain"}, "Sec-Fetch-Site"),
        ({"Host": "rebound.example"}, "Host: rebound.example is not this machine's loopback address"),
        ({"Host": "rebound.example:8001"}, "Host"),
        ({"Host": "127.0.0.1.rebound.example"}, "Host"),
        ({"Host": "10.0.0.7:8001"}, "Host"),
        ({"Host": "[2001:db8::1]:8001"}, "Host"),
    ],
)
def test_web_page_is_rejected_without_effect(server: Any, headers: dict[str, str], message: str) -> None:
    for method, path in (("POST", "/pause"), ("POST", "/admin/v1/drain"), ("PATCH", "/admin/v1/config")):
        answer = server.admin.request(method, path, headers=headers, content='{"deadline_seconds": 1}')
        assert answer.status_code == 403
        assert message in answer.json()["message"]
    assert server.http.get("/readyz").status_code == 200


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.1:8001", "localhost:8001", "LOCALHOST", "[::1]:8001", "127.3.2.1"]
)
def test_program_of_this_machine_is_answered(server: Any, host: str) -> None:
    assert server.admin.get("/admin/v1/config", headers={"Host": host}).status_code == 200


def test_guarded_port_is_open_to_other_hosts_with_the_token(guarded: Any) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}", "Host": "10.0.0.7:8001"}
    assert guarded.admin.get("/admin/v1/config", headers=headers).status_code == 200


def test_rejection_of_core_is_returned(server: Any) -> None:
    assert server.admin.patch("/admin/v1/config", json={"a": 1}).status_code == 422


@pytest.mark.parametrize(
    ("path", "headers", "content"),
    [
        ("config", {}, b"{"),
        ("config", {}, b'{"\\ud800": 1}'),
        ("config", {}, b"[" * 60_000),
        ("config", {}, b'{"gpu_memory_utilization": NaN}'),
        ("config", {}, b'{"max_num_seqs": 1e999}'),
        ("config", {"If-Match": "new"}, b"{}"),
        ("config", {"If-Match": "9" * 40}, b"{}"),
        ("config?dry_run=maybe", {}, b"{}"),
        ("config?dryrun=1", {}, b"{}"),
    ],
)
def test_malformed_patch_is_400(server: Any, path: str, headers: dict[str, str], content: bytes) -> None:
    answer = server.admin.patch(f"/admin/v1/{path}", content=content, headers=headers)
    assert answer.status_code == 400, answer.text
    assert answer.json()["message"]


def test_oversized_body_is_413_with_flat_error(server: Any) -> None:
    answer = server.admin.patch("/admin/v1/config", content=b" " * (65 << 10))
    assert (answer.status_code, set(answer.json())) == (413, {"message"})


@pytest.mark.parametrize(
    "body", [{}, [], {"deadline_seconds": -1}, {"deadline_seconds": "5"}, {"deadline_seconds": True}]
)
def test_malformed_drain_is_400_without_drain(server: Any, body: Any) -> None:
    assert server.admin.post("/admin/v1/drain", json=body).status_code == 400
    assert server.status("/readyz") == 200


def test_drain_rejects_new_requests_and_is_repeatable(start_server: Any) -> None:
    server = start_server()
    for _ in range(2):
        answer = server.admin.post("/admin/v1/drain", json={"deadline_seconds": 5})
        assert (answer.status_code, answer.json()["body"]) == (200, {"deadline_seconds": 5.0})
    assert server.status("/readyz") == 503
    assert server.http.post("/v1/completions", json={"prompt": "a"}).status_code == 503
    assert server.status("/livez") == 200

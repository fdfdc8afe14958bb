"""Pause, sleep and cache resets over HTTP: both path styles, calls that reach the core, rejected calls."""

from typing import Any

import pytest


def test_both_path_styles_reach_the_core(server: Any) -> None:
    for path, method, body in (
        ("/pause", "pause", {"mode": "abort"}),  # vLLM's default
        ("/pause?mode=keep", "pause", {"mode": "keep"}),
        ("/resume", "resume", {}),
        ("/sleep", "sleep", {"level": 1, "mode": "abort"}),
        ("/sleep?level=2&mode=wait", "sleep", {"level": 2, "mode": "wait"}),
        ("/wake_up", "wake_up", {"tags": ["weights", "kv_cache", "scheduling"]}),
        ("/wake_up?tags=weights&tags=kv_cache", "wake_up", {"tags": ["weights", "kv_cache"]}),
        ("/reset_prefix_cache", "reset_prefix_cache", {"reset_running_requests": False}),
        ("/reset_prefix_cache?reset_running_requests=true", "reset_prefix_cache", {"reset_running_requests": True}),
    ):
        for prefix in ("", "/admin/v1"):
            answer = server.admin.post(prefix + path)
            assert answer.status_code == 200, answer.text
            assert (answer.json()["method"], answer.json()["body"]) == (method, body)


@pytest.mark.parametrize(
    ("name", "sent", "received"),
    [
        ("pause", {"mode": "wait"}, {"mode": "wait"}),
        ("sleep", {"level": 0, "mode": "keep"}, {"level": 0, "mode": "keep"}),
        ("wake_up", {"tags": ["scheduling"]}, {"tags": ["scheduling"]}),
        ("reset_prefix_cache", {"reset_running_requests": True}, {"reset_running_requests": True}),
    ],
)
def test_json_body_equals_query_parameters(
    server: Any, name: str, sent: dict[str, Any], received: dict[str, Any]
) -> None:
    answer = server.admin.post(f"/admin/v1/{name}", json=sent)
    assert (answer.status_code, answer.json()["body"]) == (200, received)


def test_engine_state_is_reported(server: Any) -> None:
    for path in ("/is_paused", "/is_sleeping", "/admin/v1/is_paused", "/admin/v1/is_sleeping"):
        assert server.admin.get(path).json()["method"] == "lifecycle"


@pytest.mark.parametrize(
    ("path", "sent", "message"),
    [
        ("pause", {"mode": "stop"}, "mode is stop; must be abort, wait or keep"),
        ("pause", {"mode": 3}, "mode is 3"),
        ("pause", {"level": 1}, "unknown parameter level; allowed: mode"),
        ("pause", [], "must be a JSON object"),
        ("resume", {"now": True}, "unknown parameter now; this call has no parameters"),
        ("sleep", {"level": 3}, "level is 3; must be 0, 1 or 2"),
        ("sleep", {"level": True}, "level is True"),
        ("sleep", {"level": "x" * 10_000}, "must be 0, 1 or 2"),
        ("wake_up", {"tags": ["disk"]}, "tags: unknown tag disk; must be a list of weights, kv_cache, scheduling"),
        ("wake_up", {"tags": "weights"}, "tags: unknown tag weights; must be a list"),
        ("reset_prefix_cache", {"reset_running_requests": "maybe"}, "must be true or false"),
    ],
)
def test_invalid_call_is_400_and_not_forwarded(server: Any, path: str, sent: Any, message: str) -> None:
    answer = server.admin.post(f"/admin/v1/{path}", json=sent)
    assert answer.status_code == 400
    assert message in answer.json()["message"]
    assert len(answer.text) < 1000


def test_public_port_has_no_lifecycle_routes(server: Any) -> None:
    for path in ("/pause", "/resume", "/sleep", "/wake_up", "/reset_prefix_cache", "/admin/v1/sleep"):
        assert server.http.post(path).status_code == 404
    for path in ("/is_paused", "/is_sleeping"):
        assert server.http.get(path).status_code == 404


def test_admin_token_protects_lifecycle_routes(start_server: Any) -> None:
    guarded = start_server("--admin-token-sha256", "a" * 64)
    assert guarded.admin.post("/sleep").status_code == 401
    assert guarded.admin.get("/is_sleeping").status_code == 401

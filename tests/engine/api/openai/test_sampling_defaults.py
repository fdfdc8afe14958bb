"""Sampling defaults of a model in requests, and the options of a server that browsers and secrets need."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

if TYPE_CHECKING:
    from tests.engine.api.conftest import Server

ORIGIN = "https://chat.example"
PREFLIGHT = {
    "Origin": ORIGIN,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization",
}


@pytest.fixture(scope="module")
def guarded(tokenizer_folder: Path, start_shared_server: Callable[..., Server], tmp_path_factory: Any) -> Server:
    """A server of a model with sampling defaults, with keys in a file and in the environment."""
    folder = tmp_path_factory.mktemp("model")
    for file in tokenizer_folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    defaults = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_new_tokens": 12}
    (folder / "generation_config.json").write_text(json.dumps(defaults))
    keys = folder / "keys"
    keys.write_text("first-key\n\nsecond-key\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_API_KEY", "third-key")
        return start_shared_server(
            "--api-key-file", str(keys), "--override-generation-config", '{"top_k": 30}', model=folder
        )


def rendered(server: Server, **fields: Any) -> dict[str, Any]:
    """Return the sampling parameters that a request gets."""
    headers = {"Authorization": "Bearer first-key"}
    answer = server.http.post("/v1/completions/render", json={"prompt": "ab", **fields}, headers=headers).json()
    found: dict[str, Any] = (answer[0] if isinstance(answer, list) else answer)["sampling_params"]
    return found


def test_requests_get_the_model_s_defaults(guarded: Server) -> None:
    params = rendered(guarded)
    assert {name: params[name] for name in ("temperature", "top_p", "top_k", "max_tokens")} == {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 30,
        "max_tokens": 12,
    }


def test_fields_of_a_request_precede_the_defaults(guarded: Server) -> None:
    params = rendered(guarded, temperature=0, top_p=1, top_k=0, max_tokens=5)
    assert (params["temperature"], params["top_p"], params["top_k"], params["max_tokens"]) == (0, 1, 0, 5)
    assert rendered(guarded, max_tokens=100)["max_tokens"] == 12, "max_new_tokens limits every request"


def test_defaults_are_logged_and_in_the_model_card(guarded: Server) -> None:
    assert "sampling defaults of the model: temperature 0.6, top_p 0.95, top_k 30" in guarded.log.read_text()
    card = guarded.http.get("/v1/models", headers={"Authorization": "Bearer first-key"}).json()["data"][0]
    assert card["default_sampling_params"]["temperature"] == 0.6


def test_top_p_of_0_is_accepted(guarded: Server) -> None:
    assert 0 < rendered(guarded, top_p=0)["top_p"] < 1e-3


@pytest.mark.parametrize("key", ["first-key", "second-key", "third-key"])
def test_keys_of_file_and_environment_are_accepted(guarded: Server, key: str) -> None:
    assert guarded.http.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200


def test_other_keys_are_rejected(guarded: Server) -> None:
    assert guarded.http.get("/v1/models", headers={"Authorization": "Bearer fourth-key"}).status_code == 401


def test_preflight_needs_no_key(guarded: Server) -> None:
    answer = guarded.http.options("/v1/chat/completions", headers=PREFLIGHT)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "*"
    assert "authorization" in answer.headers["access-control-allow-headers"]


def test_responses_and_errors_name_the_allowed_origin(guarded: Server) -> None:
    for headers in ({}, {"Authorization": "Bearer first-key"}):
        answer = guarded.http.get("/v1/models", headers={"Origin": ORIGIN, **headers})
        assert answer.headers["access-control-allow-origin"] == "*"


def test_origins_can_be_limited(start_server: Callable[..., Server]) -> None:
    server = start_server("--allowed-origins", json.dumps([ORIGIN]), "--allow-credentials")

    def allowed(origin: str) -> str | None:
        answer: httpx.Response = server.http.get("/v1/models", headers={"Origin": origin})
        origins: str | None = answer.headers.get("access-control-allow-origin")
        return origins

    assert (allowed(ORIGIN), allowed("https://evil.example")) == (ORIGIN, None)


def test_model_list_with_a_slash_is_the_model_list(guarded: Server) -> None:
    headers = {"Authorization": "Bearer first-key"}
    assert (
        guarded.http.get("/v1/models/", headers=headers).json()
        == guarded.http.get("/v1/models", headers=headers).json()
    )


def test_log_level_and_url_are_in_the_log(start_server: Callable[..., Server]) -> None:
    server = start_server("--log-level", "info")
    assert f"ready: serving stub, alias at http://127.0.0.1:{server.port}/v1" in server.log.read_text()
    assert "listens on" not in start_server("--log-level", "warning").log.read_text()

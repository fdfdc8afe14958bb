"""Responses of the port during the model download."""

import http.client
import json

import pytest
from trimtab_engine.api.serving.download_server import DownloadState, serve_probes
from trimtab_engine.errors import ConfigError
from trimtab_engine.sources.progress import Progress

PROGRESS = Progress("hf://a/b", 12 * 10**9, 28 * 10**9, 10**9 / 8)
SENTENCE = "Downloading 43 %, 12.0 GB of 28.0 GB, 2 min left"


def make_state() -> DownloadState:
    state = DownloadState()
    state.update(PROGRESS)
    return state


def test_startupz_reports_stage_percent_and_message() -> None:
    status, _, body = make_state().answer("/startupz")
    assert status == 503
    assert json.loads(body) == {"stage": "download", "percent": 42.9, "message": SENTENCE}


def test_startupz_before_progress_reports_model_request() -> None:
    assert json.loads(DownloadState().answer("/startupz")[2])["message"] == "Asking for the model"


def test_livez_is_ok_and_readyz_is_503() -> None:
    assert make_state().answer("/livez")[0] == 200
    status, _, body = make_state().answer("/readyz")
    assert status == 503
    assert SENTENCE in json.loads(body)["reason"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/metrics", "/nonsense"])
def test_other_paths_are_503_with_retry_after(path: str) -> None:
    status, _, body = make_state().answer(path)
    assert status == 503
    assert SENTENCE in json.loads(body)["error"]["message"]


def test_port_responds_at_once_and_is_free_afterwards() -> None:
    from trimtab_engine.api.http.server import bind

    with serve_probes("127.0.0.1", 0) as (state, port):
        state.update(PROGRESS)
        for method, wanted in (("GET", SENTENCE), ("POST", SENTENCE), ("HEAD", "")):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            connection.request(method, "/readyz")
            answer = connection.getresponse()
            assert answer.status == 503
            assert answer.getheader("Retry-After") == "10"
            assert wanted in answer.read().decode()
            connection.close()
        with pytest.raises(ConfigError, match="--port"), serve_probes("127.0.0.1", port):
            pass
    bind("127.0.0.1", port, "--port").close()

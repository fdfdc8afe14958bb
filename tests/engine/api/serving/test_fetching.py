"""What the port says while the model is being downloaded."""

import http.client
import json

import pytest
from trimtab_engine.api.serving.fetching import FetchState, answering
from trimtab_engine.errors import ConfigError
from trimtab_engine.sources.progress import Progress

PROGRESS = Progress("hf://a/b", 12 * 10**9, 28 * 10**9, 10**9 / 8)
SENTENCE = "Downloading 43 %, 12.0 GB of 28.0 GB, 2 min left"


def a_state() -> FetchState:
    state = FetchState()
    state.note(PROGRESS)
    return state


def test_start_up_names_the_stage_its_share_and_the_sentence() -> None:
    status, _, body = a_state().answer("/startupz")
    assert status == 503
    assert json.loads(body) == {"stage": "download", "percent": 42.9, "message": SENTENCE}


def test_before_anything_is_known_the_hub_is_asked() -> None:
    assert json.loads(FetchState().answer("/startupz")[2])["message"] == "Asking for the model"


def test_the_pod_lives_and_is_not_ready() -> None:
    assert a_state().answer("/livez")[0] == 200
    status, _, body = a_state().answer("/readyz")
    assert status == 503
    assert SENTENCE in json.loads(body)["reason"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/metrics", "/nonsense"])
def test_everything_else_is_told_to_come_back(path: str) -> None:
    status, _, body = a_state().answer(path)
    assert status == 503
    assert SENTENCE in json.loads(body)["error"]["message"]


def test_the_port_answers_from_the_first_moment_and_is_free_afterwards() -> None:
    from trimtab_engine.api.http.server import bind

    with answering("127.0.0.1", 0) as (state, port):
        state.note(PROGRESS)
        for method, wanted in (("GET", SENTENCE), ("POST", SENTENCE), ("HEAD", "")):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            connection.request(method, "/readyz")
            answer = connection.getresponse()
            assert answer.status == 503
            assert answer.getheader("Retry-After") == "10"
            assert wanted in answer.read().decode()
            connection.close()
        with pytest.raises(ConfigError, match="--port"), answering("127.0.0.1", port):
            pass
    bind("127.0.0.1", port, "--port").close()

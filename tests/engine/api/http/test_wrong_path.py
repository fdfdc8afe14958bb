"""A path that is none here: who asks is told where it is."""

import pytest
from trimtab_engine.api.http.wrong_path import ADMIN_PORT, PUBLIC_PORT, why_no_method, why_no_path

PUBLIC_PATHS = ["/v1/chat/completions", "/v1/models", "/v1/models/{name:path}", "/health", "/tokenize"]


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/admin/v1/config", "/admin/v1/config is on the server's admin port, that of its --admin-port"),
        ("/sleep", "/sleep is on the server's admin port"),
        ("/chat/completions", "there is no /chat/completions here; did you mean /v1/chat/completions?"),
        ("/v1/v1/chat/completions", "did you mean /v1/chat/completions?"),  # a base URL that ends in /v1 twice
        ("/v1/chat/completion", "did you mean /v1/chat/completions?"),
        ("/sleepy", "there is no /sleepy here"),
        (
            "/",
            "there is no / here; there are /v1/chat/completions, /v1/models, /health, /tokenize",
        ),
        ("/v1", "there is no /v1 here; there are /v1/chat/completions, /v1/models"),
        ("/v1/", "there is no /v1/ here; there are /v1/chat/completions, /v1/models"),
        ("/v1/models/", "there is no /v1/models/ here; did you mean /v1/models?"),
    ],
)
def test_a_path_of_the_other_port_or_spelt_otherwise_is_named(path: str, said: str) -> None:
    assert said in why_no_path(path, PUBLIC_PATHS, ADMIN_PORT)


def test_the_admin_port_names_the_public_one() -> None:
    said = "/v1/models is on the server's public port, that of its --port, and not on this one"
    assert why_no_path("/v1/models", ["/admin/v1/config"], PUBLIC_PORT) == said


def test_a_method_that_a_path_does_not_take_is_told_which_it_takes() -> None:
    said = "/admin/v1/config is not there for POST; it takes GET or PATCH"
    assert why_no_method("POST", "/admin/v1/config", ["GET", "PATCH"]) == said
    assert why_no_method("POST", "/v1/models/x", []) == "/v1/models/x is not there for POST"

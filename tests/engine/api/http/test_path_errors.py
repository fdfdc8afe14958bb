"""Unknown paths: the error names the right port, path or method."""

import pytest
from trimtab_engine.api.http.path_errors import (
    ADMIN_PORT,
    PUBLIC_PORT,
    unknown_path_message,
    unsupported_method_message,
)

PUBLIC_PATHS = ["/v1/chat/completions", "/v1/models", "/v1/models/{name:path}", "/health", "/tokenize"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/admin/v1/config", "/admin/v1/config is on the server's admin port (--admin-port)"),
        ("/sleep", "/sleep is on the server's admin port"),
        ("/chat/completions", "unknown path /chat/completions; did you mean /v1/chat/completions?"),
        ("/v1/v1/chat/completions", "did you mean /v1/chat/completions?"),  # a base URL that ends in /v1 twice
        ("/v1/chat/completion", "did you mean /v1/chat/completions?"),
        ("/sleepy", "unknown path /sleepy"),
        (
            "/",
            "unknown path /; available: /v1/chat/completions, /v1/models, /health, /tokenize",
        ),
        ("/v1", "unknown path /v1; available: /v1/chat/completions, /v1/models"),
        ("/v1/", "unknown path /v1/; available: /v1/chat/completions, /v1/models"),
        ("/v1/models/", "unknown path /v1/models/; did you mean /v1/models?"),
    ],
)
def test_unknown_path_error_names_other_port_or_spelling(path: str, message: str) -> None:
    assert message in unknown_path_message(path, PUBLIC_PATHS, ADMIN_PORT)


def test_admin_port_names_public_port() -> None:
    message = "/v1/models is on the server's public port (--port), not on this port"
    assert unknown_path_message("/v1/models", ["/admin/v1/config"], PUBLIC_PORT) == message


def test_unsupported_method_error_lists_methods() -> None:
    message = "/admin/v1/config does not support POST; use GET or PATCH"
    assert unsupported_method_message("POST", "/admin/v1/config", ["GET", "PATCH"]) == message
    assert unsupported_method_message("POST", "/v1/models/x", []) == "/v1/models/x does not support POST"

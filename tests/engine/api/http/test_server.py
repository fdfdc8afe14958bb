"""Who may listen: the second engine on a port is told so, and the first one keeps it."""

import socket

import pytest
from trimtab_engine.api.http.server import bind
from trimtab_engine.errors import ConfigError


@pytest.mark.parametrize("flag", ["--port", "--admin-port"])
def test_a_port_that_another_engine_has_is_named_and_stays_with_it(flag: str) -> None:
    with bind("127.0.0.1", 0, flag) as first:
        port = first.getsockname()[1]
        for host in ("127.0.0.1", "0.0.0.0"):
            with pytest.raises(ConfigError, match=f"{port}: Address already in use; choose another {flag}"):
                bind(host, port, flag)
        with socket.create_connection(("127.0.0.1", port), timeout=30):
            pass

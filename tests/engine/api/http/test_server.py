"""Listening: a second engine on a port fails, and the first one keeps the port."""

import socket

import pytest
from trimtab_engine.api.http.server import bind
from trimtab_engine.errors import ConfigError


@pytest.mark.parametrize("flag", ["--port", "--admin-port"])
def test_port_in_use_is_named_and_stays_with_its_owner(flag: str) -> None:
    with bind("127.0.0.1", 0, flag) as first:
        port = first.getsockname()[1]
        for host in ("127.0.0.1", "0.0.0.0"):
            with pytest.raises(ConfigError, match=f"{port}: Address already in use; set another {flag}"):
                bind(host, port, flag)
        with socket.create_connection(("127.0.0.1", port), timeout=30):
            pass

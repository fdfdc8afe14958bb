"""A node's own address, by whichever family leads to the others, and how it is written."""

import socket

import pytest
from trimtab_engine.errors import ConfigError
from trimtab_engine.ipc import network
from trimtab_engine.ipc.network import (
    ReservedPorts,
    any_address,
    family_of,
    in_url,
    interface_of,
    is_ipv6_url,
    own_address,
)

needs_ipv6 = pytest.mark.skipif(interface_of("::1") is None, reason="this machine has IPv6 switched off")


def test_ipv6_address_is_bracketed_in_url() -> None:
    assert (in_url("fd00::7"), in_url("10.0.0.7"), in_url("node-0")) == ("[fd00::7]", "10.0.0.7", "node-0")
    assert is_ipv6_url(f"tcp://{in_url('fd00::7')}:29500")
    assert not is_ipv6_url("tcp://10.0.0.7:29500")
    assert not is_ipv6_url("ipc:///tmp/x/to-0-0")
    assert (family_of("fd00::7"), family_of("10.0.0.7")) == (socket.AF_INET6, socket.AF_INET)


@pytest.mark.parametrize("loopback", ["127.0.0.1", pytest.param("::1", marks=needs_ipv6)])
def test_loopback_address_interface_and_ports(loopback: str) -> None:
    assert own_address(loopback, 9) == loopback
    assert interface_of(loopback) == "lo"
    ports = ReservedPorts(loopback)
    with socket.socket(family_of(loopback)) as other, pytest.raises(OSError, match="in use"):
        other.bind((loopback, ports.take()))
    ports.release()


def test_a_host_that_does_not_exist_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(ConfigError, match="--master-addr elsewhere cannot be reached: Name or service not known"):
        own_address("elsewhere", 9)


def test_foreign_address_has_no_interface() -> None:
    assert interface_of("192.0.2.1") is None
    assert interface_of("2001:db8::1") is None


@pytest.mark.parametrize(
    ("families", "listens_on"),
    [
        ({socket.AF_INET, socket.AF_INET6}, "0.0.0.0"),  # others may have IPv6 switched off
        ({socket.AF_INET6}, "::"),
        ({socket.AF_INET}, "0.0.0.0"),
        (set(), "0.0.0.0"),  # a laptop without a network
    ],
)
def test_any_address_uses_ipv6_without_ipv4(
    families: set[int], listens_on: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "_own_address_towards", lambda family, _: "own" if family in families else None)
    assert any_address() == listens_on

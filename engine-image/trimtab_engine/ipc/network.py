"""This node among others: its address towards them, the interface that has it, and ports on it; IPv4 and IPv6."""

import fcntl
import socket
import struct
from pathlib import Path

from trimtab_engine.errors import ConfigError

SIOCGIFADDR = 0x8915  # linux/sockios.h: the address of an interface
INTERFACE_NAME_BYTES = 256
ADDRESS_BYTES = slice(20, 24)  # of struct ifreq: sin_addr
IPV6_ADDRESSES = Path("/proc/net/if_inet6")  # lines of: address in hex, four numbers, interface
DOCUMENTATION_ADDRESSES = {
    socket.AF_INET: "192.0.2.1",
    socket.AF_INET6: "2001:db8::1",
}  # documentation addresses (RFC 5737 and 3849)
ANY_IPV4, ANY = "0.0.0.0", "::"


def family_of(address: str) -> socket.AddressFamily:
    """Return the socket family of a numeric address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def in_url(address: str) -> str:
    """Return the host in URL form: an IPv6 address in brackets."""
    return f"[{address}]" if ":" in address else address


def is_on_network(url: str) -> bool:
    """Return True if a ZMQ address is reachable from other nodes: processes of one node use socket files."""
    return url.startswith("tcp://")


def is_ipv6_url(url: str) -> bool:
    """Return True if `tcp://ADDRESS:PORT` uses IPv6, which ZMQ must enable explicitly."""
    return "://[" in url


def any_address() -> str:
    """Return the address that accepts all connections. `::` accepts both families; `0.0.0.0` is used only on a machine
    without IPv6.
    """
    reached = {
        family
        for family, host in DOCUMENTATION_ADDRESSES.items()
        if _own_address_towards(family, (host, 9)) is not None
    }
    return ANY if reached == {socket.AF_INET6} else ANY_IPV4


def _own_address_towards(family: socket.AddressFamily, address: tuple[object, ...]) -> str | None:
    """This machine's end of the route there (nothing is sent); None when there is none."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def own_address(host: str, port: int) -> str:
    """Return the address under which other nodes reach this one: that of the route to `host`, by IPv4 where it has
    both. Raises ConfigError when there is none.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise ConfigError(f"--master-addr {host} cannot be reached: {error.strerror or error}") from error
    for family, _, _, _, address in sorted(found, key=lambda entry: entry[0] != socket.AF_INET):
        own = _own_address_towards(family, address)
        if own is not None:
            return own
    raise ConfigError(f"--master-addr {host} cannot be reached: there is no route to it")


def interface_of(address: str) -> str | None:
    """Return the name of the interface with this address, such as eth0. None if there is none."""
    wanted = socket.inet_pton(family_of(address), address)
    if family_of(address) == socket.AF_INET6:
        lines = IPV6_ADDRESSES.read_text().splitlines() if IPV6_ADDRESSES.exists() else []
        return next((line.split()[-1] for line in lines if line.split()[0] == wanted.hex()), None)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack(f"{INTERFACE_NAME_BYTES}s", name.encode()))
            except OSError:  # an interface without an address
                continue
            if answer[ADDRESS_BYTES] == wanted:
                return name
    return None


class ReservedPorts:
    """Ports on one address that are reserved in the kernel until released: bound sockets that do not listen. Users
    listen on a reserved port with SO_REUSEADDR, as ZMQ and servers do.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._held: list[socket.socket] = []

    def take(self) -> int:
        held = socket.socket(family_of(self.address), socket.SOCK_STREAM)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((self.address, 0))
        self._held.append(held)
        return int(held.getsockname()[1])

    def release(self) -> None:
        for held in self._held:
            held.close()
        self._held.clear()

    def __enter__(self) -> "ReservedPorts":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

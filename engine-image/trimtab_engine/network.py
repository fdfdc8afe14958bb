"""This node among others: its address towards them, the interface that has it, and ports on it."""

import fcntl
import socket
import struct

from trimtab_engine.errors import ConfigError

SIOCGIFADDR = 0x8915  # linux/sockios.h: the address of an interface
INTERFACE_NAME_BYTES = 256
ADDRESS_BYTES = slice(20, 24)  # of struct ifreq: sin_addr


def own_address(host: str, port: int) -> str:
    """The address under which other nodes reach this one: that of the route to `host` (nothing is sent). Raises
    ConfigError when there is none."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(f"--master-addr {host} cannot be reached: {error.strerror or error}") from error


def interface_of(address: str) -> str | None:
    """The name of the interface with this address, such as eth0; None when there is none."""
    wanted = socket.inet_aton(address)
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
    """Ports on one address that the kernel gives to nobody else until they are released: sockets that are bound and do
    not listen. Whoever was told of a port listens on it with SO_REUSEADDR, as ZMQ and servers do."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._held: list[socket.socket] = []

    def take(self) -> int:
        held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((self.address, 0))
        self._held.append(held)
        return int(held.getsockname()[1])

    def release(self) -> None:
        for held in self._held:
            held.close()
        self._held.clear()

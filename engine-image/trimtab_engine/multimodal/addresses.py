"""Which addresses belong to the public internet. Whatever a name resolves to, nothing else is connected to: not this
machine, not its neighbours, not a cloud's metadata. Pure.
"""

import ipaddress

NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
"""What a network without IPv4 writes for it: the last 32 bits are the address that is meant (RFC 6052)."""
IPv4_BITS = (1 << 32) - 1


def is_public(address: str) -> bool:
    """Whether this numeric address is somebody's on the internet. One that carries another address is judged by that;
    False for what is no address."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(found, ipaddress.IPv6Address):
        inner = _inner(found)
        if inner is not None:
            return is_public(str(inner))
        if found.scope_id is not None or found.is_site_local or found.is_reserved:
            return False
    return found.is_global and not found.is_multicast and not found.is_reserved


def _inner(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """The IPv4 address to which this one leads: mapped, by 6to4, by Teredo or by NAT64."""
    if address in NAT64:
        return ipaddress.IPv4Address(int(address) & IPv4_BITS)
    return address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)

"""Check that addresses are on the public internet. Media is fetched only from such addresses, never from this machine,
its network, or a cloud's metadata service. Pure.
"""

import ipaddress

NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
"""NAT64 prefix of networks without IPv4: the last 32 bits are the real address (RFC 6052)."""
IPv4_BITS = (1 << 32) - 1


def is_public(address: str) -> bool:
    """Return True if this numeric address is on the public internet. An address that embeds another one is checked by
    the embedded one; False if it is not an address.
    """
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

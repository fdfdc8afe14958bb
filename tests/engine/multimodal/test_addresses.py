"""Public and private addresses, in any spelling and with embedded addresses."""

import pytest
from trimtab_engine.multimodal.addresses import is_public


@pytest.mark.parametrize(
    "address",
    ["8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808", "2002:808:808::1"],
)
def test_the_internet_s_addresses_are_public(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "127.255.255.254",
        "0.0.0.0",
        "0.1.2.3",
        "10.0.0.1",
        "172.16.0.1",
        "192.168.1.1",
        "100.64.0.1",  # a carrier's own
        "169.254.169.254",  # a cloud's metadata
        "192.0.2.1",
        "198.18.0.1",
        "224.0.0.1",
        "240.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "::127.0.0.1",
        "::ffff:127.0.0.1",
        "::ffff:10.0.0.1",
        "64:ff9b::7f00:1",  # 127.0.0.1 via NAT64
        "64:ff9b:1::1",
        "2002:7f00:1::1",  # 127.0.0.1 by 6to4
        "2002:a9fe:a9fe::1",
        "2001:0:4136:e378:8000:63bf:80ff:fffe",  # 127.0.0.1 by Teredo
        "fc00::1",
        "fd12:3456::1",
        "fe80::1",
        "fe80::1%eth0",
        "fec0::1",
        "ff02::1",
        "2001:db8::1",
        "localhost",
        "",
        "0x7f.1",
    ],
)
def test_all_others_are_not(address: str) -> None:
    assert not is_public(address)

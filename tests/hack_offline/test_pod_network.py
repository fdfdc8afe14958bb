"""The CNI configuration of a node without its own pod network."""

from __future__ import annotations

import json

from offline.pod_network import configuration


def test_bridge_has_node_range_and_no_masquerade() -> None:
    bridge, portmap = json.loads(configuration("10.245.1.0/24"))["plugins"]
    assert bridge["ipam"]["ranges"] == [[{"subnet": "10.245.1.0/24"}]]
    assert not bridge["ipMasq"]
    assert bridge["hairpinMode"]
    assert portmap["type"] == "portmap"

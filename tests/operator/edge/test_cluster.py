"""What the door to the API server takes for the resource's own."""

from __future__ import annotations

from typing import Any

import pytest
from trimtab_operator.edge.cluster import is_of_workload


@pytest.mark.parametrize(
    ("owner", "is_ours"),
    [
        ({"kind": "StatefulSet", "name": "m-g0", "controller": True, "uid": "u-g0"}, True),
        ({"kind": "StatefulSet", "name": "m-g0", "controller": True, "uid": "made up"}, False),
        ({"kind": "StatefulSet", "name": "m-g0", "controller": True}, False),
        ({"kind": "StatefulSet", "name": "m-g12-w", "controller": True, "uid": "gone"}, True),  # its pod still drains
        ({"kind": "Job", "name": "m-facts", "controller": True, "uid": "u-facts"}, True),
        ({"kind": "Job", "name": "m-facts", "controller": True, "uid": "made up"}, False),
        ({"kind": "StatefulSet", "name": "m-g0", "controller": False, "uid": "u-g0"}, False),
        ({"kind": "StatefulSet", "name": "other-g0", "controller": True}, False),
        ({"kind": "ReplicaSet", "name": "m-g0", "controller": True}, False),
        (None, False),  # anybody may give a pod our labels
    ],
)
def test_a_pod_is_known_by_its_controllers_uid_and_not_by_its_labels(
    owner: dict[str, Any] | None, is_ours: bool
) -> None:
    pod = {"metadata": {"name": "m-g0-0", "ownerReferences": [owner] if owner else []}}
    assert is_of_workload(pod, "m", {"m-g0": "u-g0", "m-facts": "u-facts"}) is is_ours

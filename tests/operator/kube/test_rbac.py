"""Missing permissions are parsed with verb, kind and namespace; other 403 responses are not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from kubernetes.aio.client.exceptions import ApiException
from trimtab_operator.kube.rbac import MissingPermission, missing_permission, server_message

USER = 'User "system:serviceaccount:trimtab-system:trimtab"'
IN_APPS = 'in API group "apps" in the namespace "team-a"'


def refused(message: str, status: int = 403) -> ApiException:
    error = ApiException(status=status, reason="Forbidden")
    error.body = json.dumps({"kind": "Status", "message": message, "reason": "Forbidden", "code": status})
    return error


@pytest.mark.parametrize(
    ("message", "right", "told"),
    [
        (
            f'x is forbidden: {USER} cannot create resource "statefulsets" {IN_APPS}',
            MissingPermission("create", "statefulsets", "apps", "team-a"),
            "create statefulsets.apps in namespace team-a",
        ),
        (
            f'nodes is forbidden: {USER} cannot list resource "nodes" in API group "" at the cluster scope',
            MissingPermission("list", "nodes", "", None),
            "list nodes in the whole cluster",
        ),
        (
            f'm is forbidden: {USER} cannot patch resource "i/status" in API group "g" in the namespace "n": no',
            MissingPermission("patch", "i/status", "g", "n"),
            "patch i/status.g in namespace n",
        ),
    ],
)
def test_missing_permission_is_parsed(message: str, right: MissingPermission, told: str) -> None:
    found = missing_permission(refused(message))
    assert found == right
    assert str(found) == told


@pytest.mark.parametrize(
    "error",
    [
        refused("pods is forbidden: exceeded quota: q, requested: pods=1, used: pods=4, limited: pods=4"),
        refused("admission webhook denied the request: no"),
        refused('x cannot get resource "pods" in API group ""', status=500),
        ApiException(status=403),
        OSError("no route"),
    ],
)
def test_other_403_is_no_missing_permission(error: Exception) -> None:
    assert missing_permission(error) is None


@pytest.mark.parametrize("body", [None, "", "{", "[]", "7", '{"message": 7}', b"\xff", "[" * 100_000])
def test_server_message_of_other_errors_is_none(body: Any) -> None:
    error = ApiException(status=403)
    error.body = body
    assert server_message(error) is None

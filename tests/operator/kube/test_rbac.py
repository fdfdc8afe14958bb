"""A right that is missing is told by its verb, kind and namespace; other refusals with 403 are no matter of rights."""

from __future__ import annotations

import json
from typing import Any

import pytest
from kubernetes.aio.client.exceptions import ApiException
from trimtab_operator.kube.rbac import Right, missing_right, server_words

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
            Right("create", "statefulsets", "apps", "team-a"),
            "create statefulsets.apps in namespace team-a",
        ),
        (
            f'nodes is forbidden: {USER} cannot list resource "nodes" in API group "" at the cluster scope',
            Right("list", "nodes", "", None),
            "list nodes in the whole cluster",
        ),
        (
            f'm is forbidden: {USER} cannot patch resource "i/status" in API group "g" in the namespace "n": no',
            Right("patch", "i/status", "g", "n"),
            "patch i/status.g in namespace n",
        ),
    ],
)
def test_a_missing_right_is_named(message: str, right: Right, told: str) -> None:
    found = missing_right(refused(message))
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
def test_quotas_policies_and_other_errors_are_not_about_rights(error: Exception) -> None:
    assert missing_right(error) is None


@pytest.mark.parametrize("body", [None, "", "{", "[]", "7", '{"message": 7}', b"\xff", "[" * 100_000])
def test_what_is_no_answer_of_an_api_server_has_no_words(body: Any) -> None:
    error = ApiException(status=403)
    error.body = body
    assert server_words(error) is None

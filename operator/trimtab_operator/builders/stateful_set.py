"""The leader StatefulSet of one replica group: one pod that comes back under the same name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from trimtab_operator.builders.labels import REVISION_LABEL, common_labels, group_name, group_selector
from trimtab_operator.builders.overlay import lay_over
from trimtab_operator.builders.pod import pod_spec
from trimtab_operator.spec import InferenceDeployment

REVISION_LENGTH = 10  # hex digits: 40 bits tell the few revisions of one resource apart


def pod_template(deployment: InferenceDeployment, *, admin_token_sha256: str) -> dict[str, Any]:
    """The pod template that all groups share; the group's own labels are added by `leader_stateful_set`."""
    rendered = {
        "metadata": {"labels": common_labels(deployment)},
        "spec": pod_spec(deployment, admin_token_sha256=admin_token_sha256),
    }
    return lay_over(rendered, deployment)


def revision_of(template: Mapping[str, Any]) -> str:
    """Hash of a pod template: equal templates, equal revision."""
    text = json.dumps(template, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:REVISION_LENGTH]


def leader_stateful_set(deployment: InferenceDeployment, ordinal: int, template: Mapping[str, Any]) -> dict[str, Any]:
    """The group's StatefulSet. Parallel, so that a pod that never became ready is replaced by a better template."""
    selector = group_selector(deployment, ordinal)
    revision = revision_of(template)
    own = {**selector, REVISION_LABEL: revision}
    metadata = template["metadata"]
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {
            "name": group_name(deployment, ordinal),
            "namespace": deployment.namespace,
            "labels": {**common_labels(deployment), **own},
        },
        "spec": {
            "replicas": 1,
            "serviceName": group_name(deployment, ordinal),
            "podManagementPolicy": "Parallel",
            "updateStrategy": {"type": "RollingUpdate"},
            "revisionHistoryLimit": 2,
            "selector": {"matchLabels": selector},
            "template": {
                "metadata": {**metadata, "labels": {**metadata["labels"], **own}},
                "spec": template["spec"],
            },
        },
    }

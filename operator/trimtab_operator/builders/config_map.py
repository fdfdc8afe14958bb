"""The ConfigMap NAME-tuning: what tuning remembers across restarts of the operator. It is rebuilt if lost."""

from __future__ import annotations

from typing import Any

from trimtab_operator.builders.labels import common_labels, tuning_config_map_name
from trimtab_operator.spec import InferenceDeployment

STATE_KEY = "state.json"


def tuning_config_map(deployment: InferenceDeployment, state: str) -> dict[str, Any]:
    """`state` is the tuner's own text."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": tuning_config_map_name(deployment),
            "namespace": deployment.namespace,
            "labels": common_labels(deployment),
        },
        "data": {STATE_KEY: state},
    }

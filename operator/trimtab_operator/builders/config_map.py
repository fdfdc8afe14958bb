"""The ConfigMaps: what the operator remembers of one resource across its own restarts. All are rebuilt if lost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trimtab_operator.builders.labels import (
    FACTS_COMPONENT,
    common_labels,
    facts_name,
    rollout_config_map_name,
    tuning_config_map_name,
)
from trimtab_operator.resource.spec import InferenceDeployment

STATE_KEY = "state.json"
ROLLOUT_KEY = "rollout.json"


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


def facts_config_map(deployment: InferenceDeployment, data: Mapping[str, str]) -> dict[str, Any]:
    """What is known of the model, or why nothing is."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": facts_name(deployment),
            "namespace": deployment.namespace,
            "labels": {**common_labels(deployment), "app.kubernetes.io/component": FACTS_COMPONENT},
        },
        "data": dict(data),
    }


def rollout_config_map(deployment: InferenceDeployment, state: str) -> dict[str, Any]:
    """The last form that worked, and what became of a change; `state` is the text of rollout/rollback.py."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": rollout_config_map_name(deployment),
            "namespace": deployment.namespace,
            "labels": common_labels(deployment),
        },
        "data": {ROLLOUT_KEY: state},
    }

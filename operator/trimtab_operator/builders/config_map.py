"""ConfigMaps with the operator's state of one resource across restarts. All are rebuilt if lost."""

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
    """Return the ConfigMap of the tuner's state; `state` is its signed text."""
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
    """Return the ConfigMap with the model's facts, or with the reason why they are unknown."""
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
    """Return the ConfigMap with the last known-good revision and the rollout attempt; see rollout/rollback.py."""
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

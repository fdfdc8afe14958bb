"""Start timeout of an engine: from the spec, or from the time to read its model. Pure.

There are two timeouts. After the operator's (`start_seconds`), a change whose first replica is not Ready is rolled
back. After the kubelet's (`probe_seconds`), a container that has not started is restarted. The second must not be
shorter, and does not depend on spec.rollout.startTimeout, because a changed probe would replace the pods.
"""

from __future__ import annotations

import math

from trimtab_operator.resource.quantity import parse_seconds
from trimtab_operator.resource.spec import InferenceDeployment

READ_BYTES_PER_SECOND = 100e6  # network or storage of 1 Gbit/s; set startTimeout for slower ones
STARTUP_OVERHEAD_SECONDS = 1800.0  # node scale-up, an image of 20 GB, kernel compilation, graph capture
MAX_START_TIMEOUT_SECONDS = 7200.0  # maximum of startTimeout


def start_seconds(deployment: InferenceDeployment) -> float:
    """Return the maximum seconds from the drain of the old replica until the first replica of a change is Ready."""
    written = deployment.spec.rollout.start_timeout
    return _default_start_seconds(deployment) if written is None else parse_seconds(written)


def describe_start_timeout(deployment: InferenceDeployment) -> str:
    """Return the start timeout as text: as written in the spec, or with its derivation."""
    written = deployment.spec.rollout.start_timeout
    if written is not None:
        return written
    minutes = f"{_default_start_seconds(deployment) / 60:.0f}m"
    if not deployment.weights_bytes:
        return minutes
    return f"{minutes} (for a model of {deployment.weights_bytes / 1e9:.1f} GB; spec.rollout.startTimeout)"


def probe_seconds(deployment: InferenceDeployment) -> float:
    """Return the seconds after which the kubelet restarts a container that has not started."""
    return max(MAX_START_TIMEOUT_SECONDS, _default_start_seconds(deployment))


def _default_start_seconds(deployment: InferenceDeployment) -> float:
    """Return the default start timeout in seconds, rounded up to minutes."""
    reading = (deployment.weights_bytes or 0) / READ_BYTES_PER_SECOND
    return 60.0 * math.ceil((STARTUP_OVERHEAD_SECONDS + reading) / 60.0)

"""How long an engine may take to start: what its owner says, or what reading its model takes. Pure.

Two clocks run. The operator's (`start_seconds`) takes a change back whose first replica is not Ready in time. The
kubelet's (`probe_seconds`) ends a container that is not up, and begins it anew; it must not tick faster than the first,
and does not follow what is written there, as another number in a pod is another pod.
"""

from __future__ import annotations

import math

from trimtab_operator.resource.quantity import parse_seconds
from trimtab_operator.resource.spec import InferenceDeployment

READ_BYTES_PER_SECOND = 100e6  # a network, or a claim, of 1 Gbit/s: slower ones are written into startTimeout
AROUND_SECONDS = 1800.0  # all but reading: a node that comes, an image of 20 GB, kernels compiled, graphs captured
MAX_WRITTEN_SECONDS = 7200.0  # startTimeout at most


def start_seconds(deployment: InferenceDeployment) -> float:
    """How long the first replica of a change may take until it is Ready, once the old one has drained."""
    written = deployment.spec.rollout.start_timeout
    return _by_the_model(deployment) if written is None else parse_seconds(written)


def start_words(deployment: InferenceDeployment) -> str:
    """The same for people: as it was written, or where it comes from."""
    written = deployment.spec.rollout.start_timeout
    if written is not None:
        return written
    minutes = f"{_by_the_model(deployment) / 60:.0f}m"
    if not deployment.weights_bytes:
        return minutes
    return f"{minutes} (for a model of {deployment.weights_bytes / 1e9:.1f} GB; spec.rollout.startTimeout)"


def probe_seconds(deployment: InferenceDeployment) -> float:
    """How long a kubelet waits for an engine before it begins the container anew."""
    return max(MAX_WRITTEN_SECONDS, _by_the_model(deployment))


def _by_the_model(deployment: InferenceDeployment) -> float:
    """Whole minutes: nobody reads seconds out of hours."""
    reading = (deployment.weights_bytes or 0) / READ_BYTES_PER_SECOND
    return 60.0 * math.ceil((AROUND_SECONDS + reading) / 60.0)

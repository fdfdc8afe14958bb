"""GPUStack's ModelDeploymentScaler with the algorithm Proportional on QueueDepth, which is an HPA of its own.

Source: docs/modules/model-deployment/scaling of the GPUStack Operator v0.11.2: every 15 s; running and waiting requests
per replica against `target`, 8 in the page's example; tolerance 0.1. Assumed, because the page's section on pacing was
not available: the defaults of an HPA.
"""

from __future__ import annotations

from trimtab_simulator.policies.hpa import Hpa, total
from trimtab_simulator.policies.signals import in_flight


def gpustack(target: float) -> Hpa:
    """Return the scaler."""
    return Hpa("gpustack", total(in_flight, target))

"""Environment of processes that compute with torch. Cheap to import: the core starts before anything else is loaded."""

import os

CORE_ENVIRONMENT = {"GOMP_SPINCOUNT": "1000"}
"""Rounds that the model's threads spin before they sleep, where the container sets nothing. By default they spin so
long that decode all but stops when other processes want the same CPUs; this costs about an eighth when none do.
"""


def core_environment() -> dict[str, str]:
    """Return the engine core's environment: this process's, and core-specific defaults."""
    return {**CORE_ENVIRONMENT, **os.environ}


def set_core_environment() -> None:
    """Set the same for an engine in this process. It has an effect only before torch is first imported."""
    for name, value in CORE_ENVIRONMENT.items():
        os.environ.setdefault(name, value)

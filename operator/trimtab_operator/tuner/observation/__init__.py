"""Observation: the validated recent history of all replicas.

`interval` has one replica's work between two samples, `track` follows a replica over samples, `faults` names invalid
metrics, `observation` combines all replicas.
"""

from trimtab_operator.tuner.observation.faults import Finding
from trimtab_operator.tuner.observation.interval import Interval, total_of
from trimtab_operator.tuner.observation.observation import OBSERVATION_VERSION, Observation, ReplicaObservation, observe
from trimtab_operator.tuner.observation.track import Track

__all__ = [
    "OBSERVATION_VERSION",
    "Finding",
    "Interval",
    "Observation",
    "ReplicaObservation",
    "Track",
    "observe",
    "total_of",
]

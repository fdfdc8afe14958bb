"""Observation: what the looks at all replicas say together, over time, and what of it can be believed.

`interval` has what one replica did between two looks, `track` follows a replica from look to look, `faults` names what
cannot be believed, `latency` reads histograms and single requests, `observation` has the whole.
"""

from trimtab_operator.tuner.observation.faults import Finding
from trimtab_operator.tuner.observation.interval import Interval, total_of
from trimtab_operator.tuner.observation.observation import OBSERVATION_VERSION, Observation, Seen, observe
from trimtab_operator.tuner.observation.track import Track

__all__ = ["OBSERVATION_VERSION", "Finding", "Interval", "Observation", "Seen", "Track", "observe", "total_of"]

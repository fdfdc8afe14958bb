"""Model of an engine's step times, learned while it serves.

`regression` has the Bayesian regression, `step_time` the model.
"""

from trimtab_operator.tuner.model.step_time import Fit, StepTime

__all__ = ["Fit", "StepTime"]

"""What an engine's steps take, learned while it serves.

`regression` is the arithmetic of learning, `step_time` the model.
"""

from trimtab_operator.tuner.model.step_time import Fit, StepTime

__all__ = ["Fit", "StepTime"]

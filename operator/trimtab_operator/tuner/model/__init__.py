"""What an engine's steps take, learned while it serves.

`prior` guesses from the model's shape and the GPU, `regression` is the arithmetic of learning, `step_time` the model.
"""

from trimtab_operator.tuner.model.prior import Device, Shape, prior_cost
from trimtab_operator.tuner.model.step_time import Fit, StepTime

__all__ = ["Device", "Fit", "Shape", "StepTime", "prior_cost"]

"""Foresight: what users of a candidate configuration would feel, and how much load it holds."""

from trimtab_operator.tuner.prediction.capacity import Foresight
from trimtab_operator.tuner.prediction.prediction import Candidate, Found, Load, Prediction, predict

__all__ = ["Candidate", "Foresight", "Found", "Load", "Prediction", "predict"]

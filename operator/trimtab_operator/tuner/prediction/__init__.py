"""Predictions: latency and attainment of a candidate configuration, and the load that it holds."""

from trimtab_operator.tuner.prediction.capacity import Predictor
from trimtab_operator.tuner.prediction.prediction import Candidate, InFlightRequest, Load, Prediction, predict

__all__ = ["Candidate", "InFlightRequest", "Load", "Prediction", "Predictor", "predict"]

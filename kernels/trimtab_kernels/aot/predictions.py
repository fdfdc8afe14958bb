"""What is expected of the kernels on an H200, written before any was measured: the bars are the project's own."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prediction:
    """One row: what is measured, the share that is asked for, and what is expected with the reason."""

    what: str
    bar: str
    prediction: str


PREDICTIONS: tuple[Prediction, ...] = ()

"""What the simulator refuses: each error says what is wrong, where, and what to do about it."""

from __future__ import annotations


class SimulatorError(Exception):
    """Anything that a user of the simulator can put right."""


class BadTrace(SimulatorError):
    """A trace file that cannot be read as a whole: the file, the line and the reason."""


class BadRequest(SimulatorError):
    """Flags or values that do not go together."""


class BadCalibration(SimulatorError):
    """A calibration file that cannot be read."""

"""Errors of the simulator: each names the problem, its place, and the fix."""

from __future__ import annotations


class SimulatorError(Exception):
    """An error that the user can fix."""


class BadTrace(SimulatorError):
    """A trace file that cannot be read: file, line and reason."""


class BadRequest(SimulatorError):
    """Invalid or contradicting flags or values."""


class BadCalibration(SimulatorError):
    """A calibration file that cannot be read."""

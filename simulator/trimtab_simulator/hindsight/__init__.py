"""Optima with the trace known beforehand: fixed values, targets of the baselines, and the oracle."""

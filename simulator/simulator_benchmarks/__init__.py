"""Measurements of the tuner in simulation: scenarios on recorded traces, result tables and ablations. Not packaged."""

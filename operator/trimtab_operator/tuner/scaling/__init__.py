"""Scaling: how many replicas are needed, how fast that may change, and what was learned of scaling in too early."""

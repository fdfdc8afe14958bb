"""Measurements of the operator at scale, run by developers (docs/results/operator-scale.md)."""

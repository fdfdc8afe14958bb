"""Scaling policies: Trimtab's tuner, baselines by their published rules, and fixed values. One file per rule."""

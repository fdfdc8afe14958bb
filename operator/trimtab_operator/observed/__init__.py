"""Observed state of a resource's replica groups, pods and engines, as values."""

"""Replica scaling: the number of replicas that the load needs, and the rates and hold times of changes."""

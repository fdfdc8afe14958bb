"""One pure file per kind of child. Equal deployments give equal manifests: no clock, no randomness, no environment.

Manifests carry no owner and no field manager: `cluster.py` adds both.
"""

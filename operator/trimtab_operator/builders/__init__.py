"""Builders of child manifests, one module per kind. Pure: equal deployments give equal manifests.

Manifests have no owner and no field manager; `kube/client.py` adds both.
"""

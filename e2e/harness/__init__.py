"""Shared code of the e2e scenarios and the demo: kubectl, waiting with diagnostics, installation, port-forwards, load.

Everything here uses a real cluster through the same tools that a user has.
"""

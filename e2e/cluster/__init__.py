"""One command that brings a real Kubernetes cluster up, builds the images for it, and takes it down again.

Run it as `python3 e2e/cluster up`; it needs nothing but Python's standard library, so it works before the project's
virtual environment exists.
"""

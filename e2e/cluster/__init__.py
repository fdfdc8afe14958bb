"""A command that creates a kind cluster, builds and loads the images for it, and deletes it again.

Run `python3 e2e/cluster up`. It needs only Python's standard library, so it works before the project's virtual
environment exists.
"""

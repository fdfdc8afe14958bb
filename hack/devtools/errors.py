"""The errors of the cluster tool: each says what failed, where, and what to do; cli.py gives them exit codes."""

from __future__ import annotations


class ClusterError(Exception):
    """Something did not work: exit code 1."""


class UsageError(Exception):
    """The command line or an environment variable asks for what cannot be: exit code 2."""

"""Errors of the development tools. Each message has the problem and the remedy; command_line.py sets exit codes."""

from __future__ import annotations


class ClusterError(Exception):
    """An operation failed: exit code 1."""


class UsageError(Exception):
    """The command line or an environment variable is invalid: exit code 2."""

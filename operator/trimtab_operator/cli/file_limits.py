"""Limit of open files, and so of connections, of the operator's process."""

from __future__ import annotations

import resource

MAX_OPEN_FILES = 1 << 16  # used if the hard limit is unlimited


def allow_open_files() -> int:
    """Raise the soft limit of open files to the hard limit. Return the new soft limit."""
    # One connection per engine stays open between ticks; the usual soft limit of 1024 is too low for 1,000 engines.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return soft

"""How many files, and so connections, the operator's process may have open."""

from __future__ import annotations

import resource

MOST = 1 << 16  # where there is no limit


def allow_open_files() -> int:
    """Let the process open as many as it ever may; how many that is. A connection to each of a thousand engines is
    kept from tick to tick, and 1024 files are the usual limit that a process may raise by itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return soft

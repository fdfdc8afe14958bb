"""Limit of open files, and so of connections, of a process and its children."""

import resource

MAX_OPEN_FILES = 1 << 16  # used if the hard limit is unlimited; more would slow down the start of child processes


def raise_open_file_limit() -> int:
    """Raise the soft limit of open files to the hard limit. Return the limit in force.

    Container runtimes often start processes with a soft limit of 1,024, which is fewer than an engine has streams.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return MAX_OPEN_FILES if soft == resource.RLIM_INFINITY else soft

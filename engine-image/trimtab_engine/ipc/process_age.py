"""Age of this process, and its age when its program began: the first two points of the start-up clock."""

import os
import time
from pathlib import Path

START_TIME_FIELD = 21  # of /proc/PID/stat, from 0 (proc_pid_stat(5)); its unit is clock ticks since boot


def process_age() -> float:
    """Return the seconds since this process was created. A program that executes another one keeps its age."""
    stat = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace")
    fields = stat[stat.rindex(")") + 2 :].split()  # the name before it may contain spaces and parentheses
    created = int(fields[START_TIME_FIELD - 2]) / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - created)


PROGRAM_AGE_SECONDS = process_age()
"""Age of this process when its program imported this module, which command.py does first."""

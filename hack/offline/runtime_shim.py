"""An OCI runtime that wraps runc on machines without CAP_SYS_RESOURCE.

There runc rejects privileged containers ("unable to apply caps: operation not permitted") and negative OOM scores.
dockerd uses this file as its runtime, which removes both from the container's configuration and executes runc. It runs
from a copy in the cache, so it imports nothing of this project.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

CAPABILITY = "CAP_SYS_RESOURCE"
CAPABILITY_BIT = 24  # of the masks in /proc/self/status (linux/capability.h)


def is_needed(status: str) -> bool:
    """Return True if the text of /proc/self/status shows that CAP_SYS_RESOURCE is not available."""
    for line in status.splitlines():
        name, _, value = line.partition(":")
        if name == "CapBnd":
            return not int(value, 16) >> CAPABILITY_BIT & 1
    return False


def fit(process: dict[str, Any]) -> None:
    """Remove the capability and negative OOM scores from an OCI process object, in place."""
    for names in (process.get("capabilities") or {}).values():
        if CAPABILITY in names:
            names.remove(CAPABILITY)
    if process.get("oomScoreAdj", 0) < 0:
        process["oomScoreAdj"] = 0


def option(arguments: list[str], name: str) -> str | None:
    """Return the value of `--name VALUE` or `--name=VALUE`, or None if absent."""
    for position, argument in enumerate(arguments):
        if argument == name and position + 1 < len(arguments):
            return arguments[position + 1]
        if argument.startswith(f"{name}="):
            return argument.partition("=")[2]
    return None


def rewrite(arguments: list[str]) -> None:
    """Edit the file that runc reads: the bundle's config.json, or the process file of `runc exec`."""
    bundle, process_file = option(arguments, "--bundle"), option(arguments, "--process")
    if bundle is not None:
        path = Path(bundle, "config.json")
        config = json.loads(path.read_text())
        fit(config["process"])
        path.write_text(json.dumps(config))
    if process_file is not None:
        path = Path(process_file)
        process = json.loads(path.read_text())
        fit(process)
        path.write_text(json.dumps(process))


def main(arguments: list[str]) -> None:
    rewrite(arguments)
    runc = shutil.which("runc") or "/usr/sbin/runc"
    os.execv(runc, [runc, *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])

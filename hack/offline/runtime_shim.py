"""An OCI runtime that runs runc with what this machine can give.

Where CAP_SYS_RESOURCE is missing, runc refuses every privileged container ("unable to apply caps: operation not
permitted") and every lowered OOM score. dockerd then gets this file as its runtime: it takes both out of what Docker
asks for and hands over to runc. It runs by itself, from a copy in the cache, so it imports nothing of this project.
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
    """Whether /proc/self/status (its text) shows that CAP_SYS_RESOURCE cannot be had."""
    for line in status.splitlines():
        name, _, value = line.partition(":")
        if name == "CapBnd":
            return not int(value, 16) >> CAPABILITY_BIT & 1
    return False


def fit(process: dict[str, Any]) -> None:
    """Change an OCI process object in place: without the capability, and no OOM score below 0."""
    for names in (process.get("capabilities") or {}).values():
        if CAPABILITY in names:
            names.remove(CAPABILITY)
    if process.get("oomScoreAdj", 0) < 0:
        process["oomScoreAdj"] = 0


def option(arguments: list[str], name: str) -> str | None:
    """The value of `--name VALUE` or `--name=VALUE`; None when it is not there."""
    for position, argument in enumerate(arguments):
        if argument == name and position + 1 < len(arguments):
            return arguments[position + 1]
        if argument.startswith(f"{name}="):
            return argument.partition("=")[2]
    return None


def rewrite(arguments: list[str]) -> None:
    """Edit the file that runc will read: the bundle's config.json, or the process file of `runc exec`."""
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

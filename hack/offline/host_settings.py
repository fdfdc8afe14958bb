"""Host settings that a cluster changes: saved before, and restored after the last cluster is deleted.

The kubelet sets three sysctls. A Docker daemon enables packet forwarding, sets the firewall's FORWARD policy to DROP
and leaves its chains when it stops.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import shlex
import shutil
from pathlib import Path

from devtools.cache_root import cache_root
from devtools.errors import ClusterError
from devtools.process import output_of, run
from devtools.progress import log_line

KUBELET_SYSCTLS = {"vm.overcommit_memory": "1", "kernel.panic": "10", "kernel.panic_on_oops": "1"}
DOCKER_SYSCTLS = {"net.ipv4.ip_forward": "1"}
LOG = "host-settings"


def _file() -> Path:
    return cache_root() / "host-settings.json"


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _path(sysctl: str) -> Path:
    return Path("/proc/sys", *sysctl.split("."))


def save() -> None:
    """Save the settings unless they are already saved: a second cluster must not save the first one's values."""
    if _saved() is not None:
        return
    sysctls = {}
    for name in (*KUBELET_SYSCTLS, *DOCKER_SYSCTLS):
        with contextlib.suppress(OSError):
            sysctls[name] = _path(name).read_text().strip()
    settings = {"boot": _boot(), "sysctls": sysctls, "forward": forward_policy(_firewall("filter"))}
    _file().parent.mkdir(parents=True, exist_ok=True)
    _file().write_text(json.dumps(settings, indent=1) + "\n")


def _saved() -> dict[str, object] | None:
    """Return the settings saved since this machine booted, or None."""
    try:
        settings: dict[str, object] = json.loads(_file().read_text())
    except (OSError, ValueError):
        return None
    return settings if settings.get("boot") == _boot() else None


def restore(*, docker_stopped: bool) -> None:
    """Restore settings that still have the cluster's value; Docker's only if its daemon was stopped."""
    settings = _saved()
    if settings is None:
        return
    before = settings.get("sysctls")
    for name, value in changed(before if isinstance(before, dict) else {}, docker_stopped=docker_stopped).items():
        with contextlib.suppress(OSError):
            _path(name).write_text(value)
            log_line(f"host: {name} restored to {value}")
    if docker_stopped:
        for table in ("filter", "nat"):
            for arguments in docker_leftovers(_firewall(table)):
                with contextlib.suppress(ClusterError):
                    run(["iptables", "-w", "-t", table, *arguments], log=LOG)
        if settings.get("forward") == "ACCEPT":
            run(["iptables", "-w", "-P", "FORWARD", "ACCEPT"], log=LOG)
    _file().unlink(missing_ok=True)


def changed(before: dict[str, str], *, docker_stopped: bool) -> dict[str, str]:
    """Return the previous values of sysctls that still have the value set by a cluster."""
    cluster_values = KUBELET_SYSCTLS | (DOCKER_SYSCTLS if docker_stopped else {})
    found = {}
    for name, value in before.items():
        with contextlib.suppress(OSError):
            if name in cluster_values and value != cluster_values[name] == _path(name).read_text().strip():
                found[name] = value
    return found


def _firewall(table: str) -> str:
    """Return iptables-save's output for one table, or an empty string without iptables."""
    if shutil.which("iptables-save") is None:
        return ""
    try:
        return output_of(["iptables-save", "-t", table])
    except ClusterError:
        return ""


def forward_policy(saved: str) -> str:
    """Return the policy of the FORWARD chain; ACCEPT on machines without iptables."""
    for line in saved.splitlines():
        if line.startswith(":FORWARD "):
            return line.split()[1]
    return "ACCEPT"


def docker_leftovers(saved: str) -> list[list[str]]:
    """Return iptables arguments that remove a Docker daemon's rules and then its chains from a table."""
    chains = [line[1:].split()[0] for line in saved.splitlines() if line.startswith(":DOCKER")]
    rules = [shlex.split(line) for line in saved.splitlines() if line.startswith("-A ")]
    own = [rule for rule in rules if rule[1] not in chains and _is_dockers(rule, chains)]
    removals = [["-D", *rule[1:]] for rule in own]
    return [*removals, *(["-F", chain] for chain in chains), *(["-X", chain] for chain in chains)]


def _is_dockers(rule: list[str], chains: list[str]) -> bool:
    """Return True if a rule jumps to one of Docker's chains or matches its default bridge."""
    return any(
        (option == "-j" and value in chains) or (option in ("-i", "-o") and value == "docker0")
        for option, value in itertools.pairwise(rule)
    )


def not_restored() -> list[str]:
    """Return a line for each setting that differs from its value before the first cluster."""
    settings = _saved()
    before = settings.get("sysctls") if settings is not None else None
    found = changed(before if isinstance(before, dict) else {}, docker_stopped=True)
    return [f"setting: {name} was {value}" for name, value in found.items()]

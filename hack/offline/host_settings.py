"""What a cluster changes on the machine it runs on, remembered before and put back when the last cluster is gone.

The kubelet sets three sysctls; a Docker daemon turns packet forwarding on, makes the firewall drop what it does not
know and leaves its chains behind when it ends.
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


def remember() -> None:
    """Write the settings down, once: a second cluster must not take the first one's settings for the machine's own."""
    if _remembered() is not None:
        return
    sysctls = {}
    for name in (*KUBELET_SYSCTLS, *DOCKER_SYSCTLS):
        with contextlib.suppress(OSError):
            sysctls[name] = _path(name).read_text().strip()
    settings = {"boot": _boot(), "sysctls": sysctls, "forward": forward_policy(_firewall("filter"))}
    _file().parent.mkdir(parents=True, exist_ok=True)
    _file().write_text(json.dumps(settings, indent=1) + "\n")


def _remembered() -> dict[str, object] | None:
    """What was written down since this machine started."""
    try:
        settings: dict[str, object] = json.loads(_file().read_text())
    except (OSError, ValueError):
        return None
    return settings if settings.get("boot") == _boot() else None


def put_back(*, docker_stopped: bool) -> None:
    """Put back what still has the value that a cluster gave it; what Docker changes only once our daemon has ended."""
    settings = _remembered()
    if settings is None:
        return
    before = settings.get("sysctls")
    for name, value in changed(before if isinstance(before, dict) else {}, docker_stopped=docker_stopped).items():
        with contextlib.suppress(OSError):
            _path(name).write_text(value)
            log_line(f"host: {name} is {value} again")
    if docker_stopped:
        for table in ("filter", "nat"):
            for arguments in docker_leftovers(_firewall(table)):
                with contextlib.suppress(ClusterError):
                    run(["iptables", "-w", "-t", table, *arguments], log=LOG)
        if settings.get("forward") == "ACCEPT":
            run(["iptables", "-w", "-P", "FORWARD", "ACCEPT"], log=LOG)
    _file().unlink(missing_ok=True)


def changed(before: dict[str, str], *, docker_stopped: bool) -> dict[str, str]:
    """The sysctls that now have a cluster's value and had another: name to the value from before."""
    given = KUBELET_SYSCTLS | (DOCKER_SYSCTLS if docker_stopped else {})
    found = {}
    for name, value in before.items():
        with contextlib.suppress(OSError):
            if name in given and value != given[name] and _path(name).read_text().strip() == given[name]:
                found[name] = value
    return found


def _firewall(table: str) -> str:
    """iptables-save's words for one table; none where there is no iptables."""
    if shutil.which("iptables-save") is None:
        return ""
    try:
        return output_of(["iptables-save", "-t", table])
    except ClusterError:
        return ""


def forward_policy(saved: str) -> str:
    """What the firewall does with a forwarded packet that no rule knows; a machine without iptables accepts it."""
    for line in saved.splitlines():
        if line.startswith(":FORWARD "):
            return line.split()[1]
    return "ACCEPT"


def docker_leftovers(saved: str) -> list[list[str]]:
    """The iptables arguments that remove what a Docker daemon has left in one table: its rules, then its chains."""
    chains = [line[1:].split()[0] for line in saved.splitlines() if line.startswith(":DOCKER")]
    rules = [shlex.split(line) for line in saved.splitlines() if line.startswith("-A ")]
    own = [rule for rule in rules if rule[1] not in chains and _is_dockers(rule, chains)]
    removals = [["-D", *rule[1:]] for rule in own]
    return [*removals, *(["-F", chain] for chain in chains), *(["-X", chain] for chain in chains)]


def _is_dockers(rule: list[str], chains: list[str]) -> bool:
    """Whether a rule leads into one of Docker's chains or is about its own bridge; others went with their networks."""
    return any(
        (option == "-j" and value in chains) or (option in ("-i", "-o") and value == "docker0")
        for option, value in itertools.pairwise(rule)
    )


def not_put_back() -> list[str]:
    """A line for each setting that is not as it was before the first cluster."""
    settings = _remembered()
    before = settings.get("sysctls") if settings is not None else None
    found = changed(before if isinstance(before, dict) else {}, docker_stopped=True)
    return [f"setting: {name} was {value}" for name, value in found.items()]

"""Debian packages: installed as root, or downloaded and unpacked without installation.

The machine's apt lists are not changed: other suites and source packages use a private list in the cache, with the
archive that the machine is configured for.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from devtools.cache import entry, key_of, locked
from devtools.errors import ClusterError
from devtools.process import output_of, run

KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
BASE_SUITE = "bookworm"  # its source package of Kubernetes is complete; later suites only have kubectl
TOOLS_SUITE = "trixie"  # the first suite with a kind package, which also runs on bookworm


def require_debian(purpose: str, *, as_root: bool = True) -> None:
    """Raise ClusterError with alternatives unless this is Debian on x86-64 (and the user is root)."""
    if platform.machine() != "x86_64":
        raise ClusterError(f"{purpose}: local builds need x86-64 (this is {platform.machine()}); {ALTERNATIVES}")
    if not Path("/etc/debian_version").exists() or shutil.which("apt-get") is None:
        raise ClusterError(f"{purpose} needs Debian (apt-get); {ALTERNATIVES}")
    if as_root and os.geteuid() != 0:
        raise ClusterError(f"{purpose} needs root; run as root, or {ALTERNATIVES}")


ALTERNATIVES = (
    "use a machine whose Docker reaches an image registry, set KIND_NODE_IMAGE to a node image, "
    "or use an existing cluster with CLUSTER=current"
)


def archive_url() -> str:
    """Return the URL of the Debian archive that this machine's apt uses."""
    lines = output_of(["apt-get", "indextargets", "--format", "$(REPO_URI) $(LABEL) $(COMPONENT)"]).splitlines()
    for line in lines:
        url, _, rest = line.partition(" ")
        if rest.split() == ["Debian", "main"]:
            return url
    raise ClusterError(
        "no Debian archive found: `apt-get indextargets` lists none with label Debian and component main; "
        "run `apt-get update` and check /etc/apt/sources.list.d"
    )


def private_apt() -> list[str]:
    """Return apt options for the private lists, which are downloaded once (30 MB)."""

    def make(folder: Path) -> None:
        for part in ("lists/partial", "cache/archives/partial"):
            (folder / part).mkdir(parents=True)
        url, signed = archive_url(), f"[signed-by={KEYRING}]"
        (folder / "sources.list").write_text(
            f"deb {signed} {url} {BASE_SUITE} main\n"
            f"deb-src {signed} {url} {BASE_SUITE} main\n"
            f"deb {signed} {url} {TOOLS_SUITE} main\n"
        )
        run(["apt-get", *_options(folder), "update"], log="apt")

    require_debian("Fetching Debian's packages", as_root=False)
    return _options(entry(f"apt-{key_of(BASE_SUITE, TOOLS_SUITE)}", make))


def _options(folder: Path) -> list[str]:
    settings = {
        "Dir::Etc::sourcelist": folder / "sources.list",
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::State::lists": folder / "lists",
        "Dir::Cache": folder / "cache",
        "APT::Sandbox::User": "root",  # the user _apt has no access to root's home, which contains the cache
    }
    return [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]


def fetch(arguments: Sequence[str], folder: Path, *, log: str) -> None:
    """Run apt-get with the private lists in `folder`. After a failure the lists are updated once and it is retried."""
    options = private_apt()
    try:
        run(["apt-get", *options, *arguments], log=log, folder=folder)
    except ClusterError:
        with locked("apt-update"):
            run(["apt-get", *options, "update"], log=log)
        run(["apt-get", *options, *arguments], log=log, folder=folder)


def install(packages: Sequence[str]) -> None:
    """Install missing packages with the machine's apt. RUNLEVEL=1 keeps init scripts from starting services."""
    with locked("apt-install"):
        missing = [package for package in packages if not is_installed(package)]
        if not missing:
            return
        require_debian(f"Installing {' '.join(missing)}")
        environment = {"DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
        command = ["apt-get", "install", "-y", "--no-install-recommends", *missing]
        try:
            run(command, log="apt", environment=environment)
        except ClusterError:  # lists may be missing or outdated: update them and retry once
            run(["apt-get", "update"], log="apt")
            run(command, log="apt", environment=environment)


def is_installed(package: str) -> bool:
    done = subprocess.run(
        ["dpkg-query", "-W", "-f", "${db:Status-Status}", package], capture_output=True, text=True, check=False
    )
    return done.returncode == 0 and done.stdout.strip() == "installed"


def unpack(package: str, folder: Path, *, suite: str = BASE_SUITE) -> None:
    """Download `package` from `suite` and unpack its files into `folder`, without installing it."""
    scratch = folder / ".deb"
    scratch.mkdir(parents=True)
    fetch(["download", f"{package}/{suite}"], scratch, log="apt")
    for archive in scratch.glob("*.deb"):
        run(["dpkg", "-x", archive, folder], log="apt")
    shutil.rmtree(scratch)


def program(package: str) -> Path:
    """Return the program with the package's name, unpacked into the cache."""
    folder = entry(f"tools/{package}", lambda making: unpack(package, making))
    return folder / "usr" / "bin" / package


def bootstrap(folder: Path, packages: Sequence[str], *, log: str) -> None:
    """Create a minimal Debian root file system with `packages` in `folder`."""
    install(["debootstrap"])
    run(
        ["debootstrap", "--variant=minbase", f"--include={','.join(packages)}", BASE_SUITE, folder, archive_url()],
        log=log,
    )

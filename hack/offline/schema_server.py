"""A current apiextensions API server, to validate the CRD, its schema and its CEL rules.

Debian's unstable suite has the Go packages of a current Kubernetes as libraries, including `apiextensions`, a server
for only CustomResourceDefinitions and their resources. The machine's packages and its Go are not changed; everything
is unpacked in the cache and removed after the two binaries are built.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from devtools.cache import entry, key_of, remove_tree, scratch_folder
from devtools.cache_root import cache_root
from devtools.errors import ClusterError
from devtools.process import output_of, run
from devtools.progress import stage

from . import debian

SUITE = "sid"
LIBRARY = "golang-k8s-apiextensions-apiserver-dev"
PROGRAM = "k8s.io/apiextensions-apiserver"
FETCH_SECONDS = 40.0  # 330 MB in 320 packages
BUILD_SECONDS = 200.0  # on two idle cores


def installed_versions() -> list[Path]:
    """Return the folders of built servers, one per Kubernetes version, oldest first."""
    return sorted((cache_root() / "schema-server").glob("v*"), key=lambda folder: folder.stat().st_mtime)


def server() -> Path:
    """Return the folder with `apiextensions-apiserver` and `etcd`: the newest existing one, or built now.

    Raises:
        ClusterError: this is not Debian on x86-64, or the suite's packages cannot be installed together.
    """
    there = installed_versions()
    if there:
        return there[-1]
    debian.require_debian("Building a current API server for CRDs", as_root=False)
    options = _private_apt(scratch_folder("schema-server"))
    planned = output_of(["apt-get", *options, "install", "--simulate", LIBRARY, "golang-go", "etcd-server"])
    packages = dict(_planned(line) for line in planned.splitlines() if line.startswith("Inst "))
    version = packages[LIBRARY].partition("-")[0]
    name = f"schema-server/v1{version.removeprefix('0')}-{key_of(*(f'{k}={v}' for k, v in sorted(packages.items())))}"
    return entry(name, lambda folder: _build(folder, options, sorted(packages)))


def _planned(line: str) -> tuple[str, str]:
    """Parse `Inst NAME (VERSION …)` of apt's simulation."""
    _, name, version = line.split()[:3]
    return name, version.lstrip("(")


def _private_apt(scratch: Path) -> list[str]:
    """Return apt options for only this suite and an empty package status, so that a plan lists all dependencies."""
    for part in ("lists/partial", "cache/archives/partial", "debs"):
        (scratch / part).mkdir(parents=True)
    (scratch / "status").touch()
    (scratch / "sources.list").write_text(f"deb [signed-by={debian.KEYRING}] {debian.archive_url()} {SUITE} main\n")
    settings = {
        "Dir::Etc::sourcelist": scratch / "sources.list",
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::State::lists": scratch / "lists",
        "Dir::State::status": scratch / "status",
        "Dir::Cache": scratch / "cache",
        "APT::Sandbox::User": "root",
        "APT::Install-Recommends": "false",
    }
    options = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
    run(["apt-get", *options, "update"], log="schema-server")
    return options


def _build(folder: Path, options: list[str], packages: list[str]) -> None:
    scratch = cache_root() / "scratch" / "schema-server"
    root = scratch / "root"
    with stage("schema server: Go and its libraries", FETCH_SECONDS):
        wanted = [name for name in packages if name.startswith(("golang", "etcd-server"))]
        run(["apt-get", *options, "download", *wanted], log="schema-server", folder=scratch / "debs")
        for archive in sorted((scratch / "debs").glob("*.deb")):
            run(["dpkg", "-x", archive, root], log="schema-server")
    go_root = _whole_go(root)
    environment = {
        "GO111MODULE": "off",
        "GOPATH": str(root / "usr/share/gocode"),
        "GOROOT": str(go_root),
        "GOCACHE": str(scratch / "gocache"),
        "GOTOOLCHAIN": "local",
        "CGO_ENABLED": "0",
    }
    with stage("schema server: building it", BUILD_SECONDS):
        output = folder / "apiextensions-apiserver"
        command: list[str | Path] = [go_root / "bin/go", "build", "-ldflags=-s -w", "-o", output, PROGRAM]
        run(command, log="schema-server", folder=root, environment=environment)
    shutil.copy2(root / "usr/bin/etcd", folder / "etcd")
    remove_tree(scratch)


def _whole_go(root: Path) -> Path:
    """Return Go's root. The package splits it into two folders with links to their installed locations."""
    go_root = next(iter(sorted((root / "usr/lib").glob("go-*"))), None)
    if go_root is None:
        raise ClusterError(f"the packages of {SUITE} have no Go below {root / 'usr/lib'}")
    shared = root / "usr/share" / go_root.name
    for part in shared.iterdir():
        link = go_root / part.name
        if link.is_symlink():
            link.unlink()
        if not link.exists():
            link.symlink_to(part)
    return go_root

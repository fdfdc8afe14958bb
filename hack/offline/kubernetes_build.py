"""Kubernetes binaries built from Debian's source package: the longest stage, done once and cached.

Debian 12 has the complete source of Kubernetes 1.20.2 with vendored modules, and a Go version that builds it.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from devtools.cache import entry, key_of, remove_tree, scratch_folder
from devtools.cache_root import cache_root
from devtools.errors import ClusterError
from devtools.process import run
from devtools.progress import stage

from . import debian

VERSION = "v1.20.2"
GO_ROOT = Path("/usr/lib/go-1.19")
BINARIES = (
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kube-proxy",
    "kubelet",
    "kubeadm",
    "kubectl",
)
PACKAGES = (
    "golang-1.19-go",
    "golang-github-modern-go-reflect2-dev",
    "gcc",
    "libc6-dev",
    "rsync",
    "make",
    "dpkg-dev",
    "jq",
)
# The vendored reflect2 1.0.1 corrupts memory under Go 1.18 and later: the API server dies of SIGSEGV in mapiterinit
# after some minutes. Debian's package has 1.0.2.
REFLECT2 = "github.com/modern-go/reflect2"
BUILD_ENVIRONMENT = {
    "GO111MODULE": "off",
    "KUBE_GIT_VERSION": VERSION,
    "KUBE_GIT_TREE_STATE": "archive",
    "KUBE_GIT_COMMIT": "faecb196815e248d3ecfb03c680a4507229c2a56",  # the commit of v1.20.2
    "SOURCE_DATE_EPOCH": "1610600000",
    # Static like the others: with cgo nearly all shared packages would be compiled again for the kubelet.
    "KUBE_STATIC_OVERRIDES": "kubelet",
}
# kind's nodes need neither cloud providers nor dockershim: a quarter less is compiled without them.
TAGS = "providerless,dockerless"
GENERATE_SECONDS = 70.0  # on two cores, like the next
BUILD_SECONDS = 300.0


def entry_name() -> str:
    """Return the binaries' cache entry. Its hash covers all inputs, so it can be moved to another cache."""
    recipe = key_of(VERSION, *BINARIES, REFLECT2, TAGS, *(f"{k}={v}" for k, v in BUILD_ENVIRONMENT.items()))
    return f"kubernetes/{VERSION}-{recipe}"


def is_built() -> bool:
    """Return True if the binaries are in the cache."""
    return (cache_root() / entry_name()).exists()


def binaries() -> Path:
    """Return the folder of the seven binaries, built if missing."""
    return entry(entry_name(), _build)


def _build(folder: Path) -> None:
    scratch = scratch_folder("kubernetes")
    with stage("kubernetes: source and compiler", 45):
        debian.install(PACKAGES)
        debian.fetch(["source", "--download-only", "kubernetes"], scratch, log="kubernetes")
        description = next(iter(scratch.glob("*.dsc")), None)
        if description is None:
            raise ClusterError(f"apt fetched no .dsc of the kubernetes source package into {scratch}")
        source = scratch / "src"
        run(["dpkg-source", "-x", description, source], log="kubernetes", folder=scratch)
        _replace_reflect2(source / "vendor" / REFLECT2)
    environment = {**BUILD_ENVIRONMENT, "GOCACHE": str(scratch / "gocache"), "PATH": _path_with_go()}
    with stage("kubernetes: generating code", GENERATE_SECONDS):
        run(["make", "generated_files"], log="kubernetes", folder=source, environment=environment)
    with stage("kubernetes: building the binaries", BUILD_SECONDS):
        what = " ".join(f"cmd/{name}" for name in BINARIES)
        run(
            ["make", f"WHAT={what}", "GOLDFLAGS=-s -w", f"GOFLAGS=-tags={TAGS}"],
            log="kubernetes",
            folder=source,
            environment=environment,
        )
    for name in BINARIES:
        shutil.copy2(source / "_output/local/bin/linux/amd64" / name, folder / name)
    remove_tree(scratch)


def _path_with_go() -> str:
    return f"{GO_ROOT}/bin:{os.environ['PATH']}"


def _replace_reflect2(vendored: Path) -> None:
    packaged = Path("/usr/share/gocode/src") / REFLECT2
    for old in [*vendored.glob("*.go"), *vendored.glob("*.s")]:
        old.unlink()
    for new in [*packaged.glob("*.go"), *packaged.glob("*.s")]:
        if not new.name.endswith("_test.go"):
            shutil.copy2(new, vendored / new.name)

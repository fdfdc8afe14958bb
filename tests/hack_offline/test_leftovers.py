"""Detection of leftovers: processes and mounts that use this checkout's folders, and firewall rules."""

from __future__ import annotations

from offline.host_settings import docker_leftovers, forward_policy
from offline.leftovers import Process, ancestors, matching, mounts

ROOTS = ("/home/a/.cache/trimtab", "/src/trimtab")
PYTHON = "/usr/bin/python3.11"

SAVED = """\
*filter
:INPUT ACCEPT [0:0]
:FORWARD DROP [12:720]
:DOCKER - [0:0]
:DOCKER-USER - [0:0]
-A FORWARD -j DOCKER-USER
-A FORWARD -o docker0 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A FORWARD -i virbr0 -j ACCEPT
-A DOCKER-USER -j RETURN
COMMIT
"""


def test_matching_finds_processes_with_our_paths() -> None:
    shim = Process(7, 1, ("containerd-shim", "-address", "/home/a/.cache/trimtab/docker/exec/c.sock"), "/usr/bin/shim")
    engine = Process(8, 1, ("/src/trimtab/.venv/bin/python", "-m", "x"), PYTHON)
    other = Process(9, 1, ("/src/other/.venv/bin/python",), PYTHON)
    assert matching([shim, engine, other], ROOTS, frozenset()) == [shim, engine]


def test_matching_ignores_folders_with_same_prefix() -> None:
    other = Process(7, 1, ("bash", "/src/trimtab-tools/watch.sh", "--root=/src/trimtab2"), "/bin/bash")
    named = Process(8, 1, ("kind", "--config=/src/trimtab", "x:/src/trimtab:ro"), "/bin/kind")
    assert matching([other, named], ROOTS, frozenset()) == [named]


def test_caller_and_its_ancestors_are_excluded() -> None:
    line = [Process(1, 0, ("init",), "/init"), Process(5, 1, ("bash", "/src/trimtab/.ci/run"), "/bin/bash")]
    line.append(Process(6, 5, ("python3", "/src/trimtab/e2e/cluster"), PYTHON))
    left = Process(7, 1, ("kind", "/src/trimtab"), "/usr/bin/kind")
    assert ancestors([*line, left], 6) == frozenset({1, 5, 6})
    assert matching([*line, left], ROOTS, ancestors([*line, left], 6)) == [left]


def test_mounts_below_our_folders_are_found() -> None:
    table = (
        "overlay /home/a/.cache/trimtab/docker/data/x overlay rw 0 0\nproc /proc proc rw 0 0\nx /src/trimtab-2/y z\n"
    )
    assert mounts(table, ROOTS) == ["mount: /home/a/.cache/trimtab/docker/data/x"]


def test_docker_leftovers_removes_only_dockers_rules() -> None:
    assert docker_leftovers(SAVED) == [
        ["-D", "FORWARD", "-j", "DOCKER-USER"],
        ["-D", "FORWARD", "-o", "docker0", "-m", "conntrack", "--ctstate", "RELATED,ESTABLISHED", "-j", "ACCEPT"],
        ["-F", "DOCKER"],
        ["-F", "DOCKER-USER"],
        ["-X", "DOCKER"],
        ["-X", "DOCKER-USER"],
    ]


def test_forward_policy_defaults_to_accept() -> None:
    assert forward_policy(SAVED) == "DROP"
    assert forward_policy("") == "ACCEPT"

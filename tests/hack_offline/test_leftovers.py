"""What counts as left over: what runs our files or names our folders, and nobody else's work."""

from __future__ import annotations

from offline.host_settings import docker_leftovers, forward_policy
from offline.leftovers import Process, belonging, mounts, own_line

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


def test_processes_that_run_or_name_our_files_are_ours() -> None:
    shim = Process(7, 1, ("containerd-shim", "-address", "/home/a/.cache/trimtab/docker/exec/c.sock"), "/usr/bin/shim")
    engine = Process(8, 1, ("/src/trimtab/.venv/bin/python", "-m", "x"), PYTHON)
    other = Process(9, 1, ("/src/other/.venv/bin/python",), PYTHON)
    assert belonging([shim, engine, other], ROOTS, frozenset()) == [shim, engine]


def test_a_folder_whose_name_only_begins_as_ours_is_somebody_elses() -> None:
    beside = Process(7, 1, ("bash", "/src/trimtab-tools/watch.sh", "--root=/src/trimtab2"), "/bin/bash")
    named = Process(8, 1, ("kind", "--config=/src/trimtab", "x:/src/trimtab:ro"), "/bin/kind")
    assert belonging([beside, named], ROOTS, frozenset()) == [named]


def test_whoever_asks_is_not_left_over() -> None:
    line = [Process(1, 0, ("init",), "/init"), Process(5, 1, ("bash", "/src/trimtab/.ci/run"), "/bin/bash")]
    line.append(Process(6, 5, ("python3", "/src/trimtab/e2e/cluster"), PYTHON))
    left = Process(7, 1, ("kind", "/src/trimtab"), "/usr/bin/kind")
    assert own_line([*line, left], 6) == frozenset({1, 5, 6})
    assert belonging([*line, left], ROOTS, own_line([*line, left], 6)) == [left]


def test_mounts_below_our_folders_are_ours() -> None:
    table = (
        "overlay /home/a/.cache/trimtab/docker/data/x overlay rw 0 0\nproc /proc proc rw 0 0\nx /src/trimtab-2/y z\n"
    )
    assert mounts(table, ROOTS) == ["mount: /home/a/.cache/trimtab/docker/data/x"]


def test_what_docker_leaves_in_the_firewall_goes_and_other_rules_stay() -> None:
    assert docker_leftovers(SAVED) == [
        ["-D", "FORWARD", "-j", "DOCKER-USER"],
        ["-D", "FORWARD", "-o", "docker0", "-m", "conntrack", "--ctstate", "RELATED,ESTABLISHED", "-j", "ACCEPT"],
        ["-F", "DOCKER"],
        ["-F", "DOCKER-USER"],
        ["-X", "DOCKER"],
        ["-X", "DOCKER-USER"],
    ]


def test_a_firewall_that_nobody_has_touched_accepts() -> None:
    assert forward_policy(SAVED) == "DROP"
    assert forward_policy("") == "ACCEPT"

"""CPU time and memory of a server's processes."""

import os
import subprocess
import sys

from trimtab_engine.bench.local_server import LocalServer, _tree


def test_process_tree_has_process_and_children() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert {os.getpid(), child.pid} <= set(_tree(os.getpid()))
        child.communicate(b"\n")


def test_cpu_time_grows_with_work() -> None:
    server = LocalServer("", "", os.getpid())
    before = server.cpu_seconds()
    while server.cpu_seconds() < before + 0.02:
        sum(range(10_000))


def test_resident_memory_is_of_server_and_cores_only() -> None:
    sizes = LocalServer("", "", os.getpid()).resident_kib()
    assert sizes["API server"] > 10_000
    assert sizes["engine core"] == 0
    command = [sys.executable, "-c", "print('runs', flush=True); input()", "trimtab_engine.core.process"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as core:
        assert core.stdout is not None
        core.stdout.readline()
        assert LocalServer("", "", os.getpid()).resident_kib()["engine core"] > 0
        core.communicate(b"\n")

"""Scenario: the engine's core process is killed; the replica recovers and status is correct meanwhile."""

from __future__ import annotations

import pytest
from harness.answer import EXPECTED, ask
from harness.deployment import Deployment, describe
from harness.kube import Kube, Manifest, is_true
from harness.report import log_line, report_measurement
from harness.wait import NotYet
from harness.watch import watch

CRD = "inferencedeployments.trimtab.dev"
NOTICED_SECONDS = 60.0
# The core is a child of the API server process (1). SIGKILL leaves it no chance to shut down cleanly.
KILL_THE_CORE = """
import os, signal
children = open('/proc/1/task/1/children').read().split()
named = {int(p): open(f'/proc/{p}/cmdline').read().replace(chr(0), ' ').strip() for p in children}
core = [pid for pid, words in named.items() if 'resource_tracker' not in words]
assert core, named
os.kill(core[0], signal.SIGKILL)
print(core[0], named[core[0]][:200])
"""


def _replica_is_down(deployment: Deployment) -> Manifest:
    item = deployment.get()
    if is_true(item, "Ready"):
        raise NotYet(describe(item))
    return item


def test_killed_engine_core_recovers_with_correct_status(ready: Deployment, kube: Kube) -> None:
    pod = ready.pod()
    name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
    with watch(kube, CRD, ready.name, ready.namespace) as watched:
        output = kube.exec(ready.namespace, name, "python3", "-c", KILL_THE_CORE, container="main")
        log_line(f"killed process {output.strip()}")
        down = ready.waiter.until(
            "Ready is not True",
            lambda: _replica_is_down(ready),
            deadline_seconds=NOTICED_SECONDS,
            every_seconds=0.3,
        )
        ready.ready()
    assert down["status"].get("readyReplicas", 0) == 0
    for state in watched.states:
        status = state["status"]
        assert is_true(state, "Ready") == (status.get("readyReplicas", 0) == 1), status

    assert EXPECTED in ask(ready).text
    after = ready.pod()
    restarts = sum(entry["restartCount"] for entry in after["status"]["containerStatuses"])
    report_measurement(
        f"engine core killed: replica back (same pod: {after['metadata']['uid'] == uid}, restarts {restarts})"
    )
    assert restarts >= 1 or after["metadata"]["uid"] != uid


@pytest.mark.usefixtures("ready")
def test_deleted_pod_is_recreated(ready: Deployment, kube: Kube) -> None:
    before = ready.pod()["metadata"]
    kube.delete("pod", before["name"], ready.namespace)
    ready.waiter.until("Ready is not True", lambda: _replica_is_down(ready), deadline_seconds=60.0)
    ready.ready()
    assert ready.pod()["metadata"]["uid"] != before["uid"]

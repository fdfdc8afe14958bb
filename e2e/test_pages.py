"""Scenario: the documented commands work from install to uninstall: autoscale, roll back, upgrade.

The commands are read from docs/ and executed, page after page, on a cluster without Trimtab.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.answer import EXPECTED, ask
from harness.deployment import READY_SECONDS, Deployment
from harness.install import NAMESPACE, Installation
from harness.kube import CRD_KIND, Kube, condition, is_true
from harness.pages import blocks, run_blocks
from harness.prometheus import NAME as PROMETHEUS
from harness.prometheus import PrometheusServer
from harness.target import REPOSITORY, prometheus_in_cluster
from harness.wait import NotYet

DOCS = REPOSITORY / "docs"
COMMAND_SECONDS = READY_SECONDS + 300.0
DRAIN_SECONDS = 120.0  # the sample's drainTimeout, and the kubelet's delay
KEDA_CRD, KEDA_PROMETHEUS = "scaledobjects.keda.sh", "http://prometheus.monitoring.svc:9090"
AUTOSCALING = ("autoscaling/v2", "autoscaling/v2beta2")  # newest first; the page is written for the first


@pytest.fixture
def smollm2(kube: Kube) -> Deployment:
    """Return the sample, which the install page applies to the namespace default."""
    return Deployment(kube, "default", "smollm2")


def page(name: str) -> Path:
    """Return the file of a page, in the folder of its section."""
    (path,) = DOCS.glob(f"*/{name}.md")
    return path


def test_install_page_commands_serve_model(bare_cluster: Installation, smollm2: Deployment) -> None:
    of_a_pipeline = blocks(page("gitops"))["wait"]
    run_blocks(bare_cluster, [*blocks(page("install")).values(), of_a_pipeline], timeout_seconds=COMMAND_SECONDS)
    assert EXPECTED in ask(smollm2).text


def test_hpa_reads_and_writes_scale(bare_cluster: Installation, kube: Kube, smollm2: Deployment) -> None:
    """The HPA is able to scale although nothing serves its metric here: it reads /scale with its selector."""
    api = next((version for version in AUTOSCALING if kube.serves(version)), None)
    if api is None:
        pytest.skip(f"the cluster serves none of {', '.join(AUTOSCALING)}")
    version = api.partition("/")[2]
    text = "\n".join(blocks(page("hpa")).values())
    text = text.replace("apiVersion: autoscaling/v2\n", f"apiVersion: {api}\n").replace("lers.v2.", f"lers.{version}.")
    run_blocks(bare_cluster, [text], timeout_seconds=COMMAND_SECONDS)
    assert is_true(smollm2.get(), "Ready")


def test_keda_reads_and_writes_scale(bare_cluster: Installation, kube: Kube, smollm2: Deployment) -> None:
    """On clusters with KEDA, which queries the test's Prometheus for the engines' queue length."""
    if kube.get("crd", KEDA_CRD) is None:
        pytest.skip(f"the cluster has no KEDA: it serves no {KEDA_CRD}")
    server = PrometheusServer(kube, "default", prometheus_in_cluster())
    try:
        server.scrape(smollm2.pods())
        found = {name: text.replace(KEDA_PROMETHEUS, server.url) for name, text in blocks(page("keda")).items()}
        assert server.url in found["scale"], "the page's Prometheus URL is not the one this scenario replaces"
        run_blocks(bare_cluster, list(found.values()), timeout_seconds=COMMAND_SECONDS)
    finally:
        server.stop()
        kube.delete("service", PROMETHEUS, "default")
        kube.delete("configmap", PROMETHEUS, "default")
    smollm2.ready()


def test_rollback_page_commands_recover(bare_cluster: Installation, smollm2: Deployment) -> None:
    found = blocks(page("rollback"))
    run_blocks(bare_cluster, [found["break"]], timeout_seconds=COMMAND_SECONDS)
    broken = smollm2.get()
    ready = condition(broken, "Ready")
    assert ready is not None
    assert (ready["status"], ready["reason"]) == ("False", "RolledBack")
    assert "--tokenizer=/models/no-such-folder" in broken["spec"]["runtime"]["args"], (
        "the operator changed the owner's spec"
    )
    assert EXPECTED in ask(smollm2).text
    run_blocks(bare_cluster, [found["mend"]], timeout_seconds=COMMAND_SECONDS)
    assert EXPECTED in ask(smollm2).text


def test_upgrade_page_keeps_pods_until_restart_is_requested(bare_cluster: Installation, smollm2: Deployment) -> None:
    found = blocks(page("upgrade"))
    assert "the same pods" in run_blocks(bare_cluster, [found["upgrade"]], timeout_seconds=COMMAND_SECONDS)
    before = smollm2.restarts()
    run_blocks(bare_cluster, [found["new-pods"]], timeout_seconds=COMMAND_SECONDS)

    def drained() -> None:
        """Raise NotYet while a replaced pod still drains."""
        if before.keys() & smollm2.restarts().keys():
            raise NotYet("a replaced pod still exists")

    smollm2.waiter.until("the replaced pods are gone", drained, deadline_seconds=DRAIN_SECONDS)


def test_uninstall_page_commands_remove_everything(bare_cluster: Installation, kube: Kube) -> None:
    run_blocks(bare_cluster, list(blocks(page("uninstall")).values()), timeout_seconds=COMMAND_SECONDS)
    assert kube.get("namespace", NAMESPACE) is None
    assert kube.get("crd", CRD_KIND) is None
    names = kube.run("get", "clusterroles,clusterrolebindings,validatingwebhookconfigurations", "-o", "name")
    assert "trimtab" not in names

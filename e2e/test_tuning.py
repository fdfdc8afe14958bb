"""Scenario: load on a small KV cache causes preemptions, the operator reduces them, and no request fails."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Apply, Remove
from harness.deployment import Deployment
from harness.engine import EngineReading
from harness.install import Installation
from harness.kube import CRD_KIND, Kube, condition
from harness.report import log_line, report_measurement
from harness.traffic import LoadReport, load
from harness.tuning import (
    CALM_DEADLINE_SECONDS,
    DECISION_SECONDS,
    SEQS,
    UTILIZATION,
    WATCH_SECONDS,
    WATERMARK,
    calm_probe,
    decision_probe,
    load_options,
    pinned_utilization,
    preemptions_per_1000_tokens,
    start_utilization,
    watch_probe,
)
from harness.wait import NotYet


@pytest.fixture
def recommending(apply: Apply, remove: Remove) -> Iterator[Deployment]:
    """Return the sample in mode Recommend, not tuned yet."""
    deployment = apply("headroom", tuning={"mode": "Recommend"})
    deployment.ready()
    yield deployment
    remove(deployment)


def test_recommended_utilization_is_applied_in_auto_mode(
    recommending: Deployment, installation: Installation, kube: Kube, namespace: str, calm_seconds: float
) -> None:
    """Under one constant load, mode Recommend only reports the change, and mode Auto applies it."""
    deployment = recommending
    before, restarts = deployment.engine(), deployment.restarts()
    log_line(f"KV cache: {before.kv_tokens} tokens now, {before.kv_tokens_cap} at the bound")
    with load(kube, namespace, installation.images.operator, load_options(deployment)) as running:
        advice = deployment.waiter.until(
            "a recommendation", lambda: _recommendation(deployment, UTILIZATION), deadline_seconds=DECISION_SECONDS
        )
        log_line(f"recommended: {advice['message']}")
        assert advice["knob"] == UTILIZATION
        unchanged = deployment.engine()
        assert unchanged.preemptions > before.preemptions
        assert unchanged.config_generation == before.config_generation, "mode Recommend changed the engine"
        assert not deployment.status()["tuning"].get("applied")

        kube.patch(CRD_KIND, deployment.name, namespace, {"spec": {"tuning": {"mode": "Auto"}}})
        decision, after = _moved_and_calm(deployment, UTILIZATION, before, calm_seconds)
        report = running.stop()

    assert float(decision["to"]) > float(decision["from"])
    assert after.kv_tokens > before.kv_tokens
    assert after.config_generation > before.config_generation
    _assert_undisturbed(report, deployment, restarts)
    _is_reported_everywhere(decision, deployment, installation, kube)
    report_measurement(
        f"trim with headroom: {before.kv_tokens} to {after.kv_tokens} KV tokens, {after.preemptions:.0f} preemptions "
        f"before calm, {report}"
    )


def test_watermark_is_raised_before_max_num_seqs_without_headroom(
    apply: Apply, installation: Installation, kube: Kube, namespace: str
) -> None:
    """KV blocks are kept free for running sequences; `max_num_seqs` is not lowered because of preemptions."""
    deployment = apply("pinned", **pinned_utilization(start_utilization()))
    deployment.ready()
    before, restarts = deployment.engine(), deployment.restarts()
    assert before.kv_tokens == before.kv_tokens_cap
    with load(kube, namespace, installation.images.operator, load_options(deployment)) as running:
        decision = _moved(deployment, WATERMARK, before)
        then = deployment.engine()
        after = deployment.waiter.until(
            "the same load continues", watch_probe(deployment.engine), deadline_seconds=2 * WATCH_SECONDS
        )
        report = running.stop()

    assert float(decision["to"]) > float(decision["from"])
    assert then.preemptions > before.preemptions
    assert after.kv_tokens == before.kv_tokens
    assert then.values[SEQS] == before.values[SEQS]
    _assert_undisturbed(report, deployment, restarts)
    _is_reported_everywhere(decision, deployment, installation, kube)
    report_measurement(
        f"trim without headroom: watermark {decision['from']} to {decision['to']}, preemptions per 1,000 tokens "
        f"{preemptions_per_1000_tokens(before, then):.1f} until then, {preemptions_per_1000_tokens(then, after):.1f} "
        f"in the {WATCH_SECONDS:.0f} s after, {report}"
    )


def _moved_and_calm(
    deployment: Deployment, knob: str, before: EngineReading, calm_seconds: float
) -> tuple[dict[str, str], EngineReading]:
    """Wait until the operator has changed `knob` and the same load causes no more preemptions.

    Returns the decision and the engine's metrics afterwards.
    """
    decision = _moved(deployment, knob, before)
    after = deployment.waiter.until(
        "no preemptions under the same load",
        calm_probe(deployment, calm_seconds=calm_seconds),
        deadline_seconds=CALM_DEADLINE_SECONDS + calm_seconds,
    )
    return decision, after


def _moved(deployment: Deployment, knob: str, before: EngineReading) -> dict[str, str]:
    """Wait until the operator has changed `knob`, and return the decision."""
    decision = deployment.waiter.until(
        f"the operator changes {knob}",
        decision_probe(deployment, knob, before.values[knob]),
        deadline_seconds=DECISION_SECONDS,
    )
    log_line(f"decided: {decision['message']}")
    return decision


def _assert_undisturbed(report: LoadReport, deployment: Deployment, restarts: dict[str, int]) -> None:
    log_line(str(report))
    assert report.failed == []
    assert report.completed > 0
    assert deployment.restarts() == restarts


def _recommendation(deployment: Deployment, knob: str) -> dict[str, str]:
    """Return the recommendation for this knob. Raises NotYet if there is none."""
    found = deployment.status().get("tuning", {}).get("recommendation")
    if not found or found.get("knob") != knob:
        reading = deployment.engine()
        metrics = condition(deployment.get(), "MetricsAvailable")
        raise NotYet(
            f"no recommendation for {knob} yet, but {found}: {reading.preemptions:.0f} preemptions; "
            f"MetricsAvailable: {metrics}"
        )
    return dict(found)


def _is_reported_everywhere(
    decision: dict[str, str], deployment: Deployment, installation: Installation, kube: Kube
) -> None:
    """Assert that the decision has the same id in status, an Event, the operator's log and `trimtab why`."""
    events = [e for e in kube.events(deployment.namespace, deployment.name) if decision["id"] in str(e["message"])]
    assert len(events) == 1, f"{len(events)} Events carry decision {decision['id']}"
    assert decision["message"] in events[0]["message"]
    lines = [line for line in installation.log(tail=5000).splitlines() if decision["id"] in line]
    assert len(lines) == 1, f"{len(lines)} log lines carry decision {decision['id']}"
    command = [str(Path(sys.executable).with_name("kubectl-trimtab")), "why", deployment.name]
    why = subprocess.run(
        [*command, "--namespace", deployment.namespace],
        env=kube.full_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert why.returncode == 0, why.stderr
    explained = why.stdout.partition(f"[{decision['id']}] ")[2]
    assert explained.startswith(f"{decision['reason']}: {decision['message']}"), why.stdout
    assert "    evidence: preemptions " in explained

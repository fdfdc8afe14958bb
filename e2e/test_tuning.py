"""Story: load on a small KV cache preempts requests, the operator acts, fewer are or none; no request fails."""

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
from harness.report import measured, say
from harness.traffic import LoadReport, load
from harness.trim import (
    CALM_DEADLINE_SECONDS,
    DECISION_SECONDS,
    SEQS,
    UTILIZATION,
    WATCH_SECONDS,
    WATERMARK,
    calm_probe,
    load_options,
    moved,
    pinned_utilization,
    preemptions_per_1000_tokens,
    start_utilization,
    watch_probe,
)
from harness.wait import NotYet


@pytest.fixture
def recommending(apply: Apply, remove: Remove) -> Iterator[Deployment]:
    """The sample in mode Recommend, which nobody has tuned yet."""
    deployment = apply("headroom", tuning={"mode": "Recommend"})
    deployment.ready()
    yield deployment
    remove(deployment)


def test_preemptions_are_recommended_away_then_trimmed_away(
    recommending: Deployment, installation: Installation, kube: Kube, namespace: str, calm_seconds: float
) -> None:
    """One load throughout: mode Recommend says what would help and changes nothing; mode Auto does it."""
    deployment = recommending
    before, restarts = deployment.engine(), deployment.restarts()
    say(f"KV cache: {before.kv_tokens} tokens now, {before.kv_tokens_cap} at the bound")
    with load(kube, namespace, installation.images.operator, load_options(deployment)) as running:
        advice = deployment.waiter.until(
            "a recommendation", lambda: _recommendation(deployment, UTILIZATION), deadline_seconds=DECISION_SECONDS
        )
        say(f"recommended: {advice['message']}")
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
    _nobody_suffered(report, deployment, restarts)
    _is_told_everywhere(decision, deployment, installation, kube)
    measured(
        f"trim with headroom: {before.kv_tokens} to {after.kv_tokens} KV tokens, {after.preemptions:.0f} preemptions "
        f"before calm, {report}"
    )


def test_without_headroom_requests_are_admitted_later_before_anybody_loses_a_seat(
    apply: Apply, installation: Installation, kube: Kube, namespace: str
) -> None:
    """KV blocks are kept free for what runs; users do not wait for fewer seats because of a count of preemptions."""
    deployment = apply("pinned", **pinned_utilization(start_utilization()))
    deployment.ready()
    before, restarts = deployment.engine(), deployment.restarts()
    assert before.kv_tokens == before.kv_tokens_cap
    with load(kube, namespace, installation.images.operator, load_options(deployment)) as running:
        decision = _moved(deployment, WATERMARK, before)
        then = deployment.engine()
        after = deployment.waiter.until(
            "the same load goes on", watch_probe(deployment.engine), deadline_seconds=2 * WATCH_SECONDS
        )
        report = running.stop()

    assert float(decision["to"]) > float(decision["from"])
    assert then.preemptions > before.preemptions
    assert after.kv_tokens == before.kv_tokens
    assert then.values[SEQS] == before.values[SEQS]
    _nobody_suffered(report, deployment, restarts)
    _is_told_everywhere(decision, deployment, installation, kube)
    measured(
        f"trim without headroom: watermark {decision['from']} to {decision['to']}, preemptions per 1,000 tokens "
        f"{preemptions_per_1000_tokens(before, then):.1f} until then, {preemptions_per_1000_tokens(then, after):.1f} "
        f"in the {WATCH_SECONDS:.0f} s after, {report}"
    )


def _moved_and_calm(
    deployment: Deployment, knob: str, before: EngineReading, calm_seconds: float
) -> tuple[dict[str, str], EngineReading]:
    """Wait until the operator has moved `knob` and the load, which goes on, preempts no more: the decision, and what
    the engine then reports."""
    decision = _moved(deployment, knob, before)
    after = deployment.waiter.until(
        "no preemptions under the same load",
        calm_probe(deployment, calm_seconds=calm_seconds),
        deadline_seconds=CALM_DEADLINE_SECONDS + calm_seconds,
    )
    return decision, after


def _moved(deployment: Deployment, knob: str, before: EngineReading) -> dict[str, str]:
    """Wait until the operator has moved `knob`: the decision."""
    decision = deployment.waiter.until(
        f"the operator moves {knob}", moved(deployment, knob, before.values[knob]), deadline_seconds=DECISION_SECONDS
    )
    say(f"decided: {decision['message']}")
    return decision


def _nobody_suffered(report: LoadReport, deployment: Deployment, restarts: dict[str, int]) -> None:
    say(str(report))
    assert report.failed == []
    assert report.completed > 0
    assert deployment.restarts() == restarts


def _recommendation(deployment: Deployment, knob: str) -> dict[str, str]:
    """What is recommended for this knob; raises NotYet."""
    found = deployment.status().get("tuning", {}).get("recommendation")
    if not found or found.get("knob") != knob:
        reading = deployment.engine()
        metrics = condition(deployment.get(), "MetricsAvailable")
        raise NotYet(
            f"no recommendation for {knob} yet, but {found}: {reading.preemptions:.0f} preemptions; "
            f"MetricsAvailable: {metrics}"
        )
    return dict(found)


def _is_told_everywhere(
    decision: dict[str, str], deployment: Deployment, installation: Installation, kube: Kube
) -> None:
    """One decision, one id: in status (where it came from), as an Event, in the operator's log, and by `why`."""
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
    told = why.stdout.partition(f"[{decision['id']}] ")[2]
    assert told.startswith(f"{decision['reason']}: {decision['message']}"), why.stdout
    assert "    evidence: preemptions " in told

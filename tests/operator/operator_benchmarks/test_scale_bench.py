"""The scale benchmark's audit log parser and percentiles."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from operator_benchmarks.api_server import Audit
from operator_benchmarks.scale_bench import percentiles


def an_event(verb: str, stage: str = "ResponseComplete", **about: str) -> str:
    return json.dumps({"verb": verb, "stage": stage, "requestURI": "/version", "objectRef": about}) + "\n"


def test_each_request_counts_once_and_a_watch_when_it_begins(tmp_path: Path) -> None:
    log = tmp_path / "audit.log"
    log.write_text(
        an_event("get", resource="pods")
        + an_event("watch", "ResponseStarted", resource="pods")
        + an_event("watch", resource="pods")  # it ends
        + an_event("patch", resource="inferencedeployments", subresource="status")
    )
    found = Audit(log).since_last()
    assert found == {("get", "pods"): 1, ("watch", "pods"): 1, ("patch", "inferencedeployments/status"): 1}


def test_audit_counts_complete_lines_once(tmp_path: Path) -> None:
    log, half = tmp_path / "audit.log", an_event("list", resource="pods")[:20]
    log.write_text(an_event("get", resource="pods") + half)
    audit = Audit(log)
    assert audit.since_last() == {("get", "pods"): 1}
    log.write_text(an_event("get", resource="pods") + an_event("list", resource="pods"))
    assert audit.since_last() == {("list", "pods"): 1}


@pytest.mark.parametrize(
    ("values", "text"),
    [([], "none"), ([1.0], "p50 1.00 s, p99 1.00 s, all 1.00 s of 1"), (range(1, 101), "p50 50.00 s, p99 99.00 s")],
)
def test_percentiles_are_by_rank(values: list[float], text: str) -> None:
    assert percentiles(values).startswith(text)

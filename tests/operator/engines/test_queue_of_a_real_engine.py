"""Scheduling policy patches, validated by a real engine's live configuration."""

from __future__ import annotations

import json

import pytest
from operator_builders import a_deployment
from trimtab_engine.config.live.patch import LiveConfig
from trimtab_engine.config.live.values import Envelope, LiveValues
from trimtab_operator.engines.admin_client import ConfigReport
from trimtab_operator.observed.engines import ReportedScheduling
from trimtab_operator.planning.scheduling_policy import (
    MAX_TARGET_SECONDS,
    SchedulingPlan,
    plan_scheduling,
    scheduling_status,
)


def an_engine() -> LiveConfig:
    envelope = Envelope(
        max_num_seqs_cap=64,
        max_num_batched_tokens_cap=1024,
        gpu_memory_utilization_cap="0.95",
        max_model_len=1024,
        block_size=16,
        enable_chunked_prefill=True,
        min_utilization="0.5",
        num_blocks_cap=599,
    )
    values = LiveValues(max_num_seqs=32, max_num_batched_tokens=512, gpu_memory_utilization="0.8")
    return LiveConfig(envelope, values)


def heard(engine: LiveConfig) -> ReportedScheduling:
    """Return the operator's view of the configuration."""
    return ConfigReport.model_validate_json(json.dumps(engine.describe())).queue()


def sent(engine: LiveConfig, found: SchedulingPlan) -> LiveConfig:
    """Return the engine after the operator's patch."""
    after, status, body = engine.patch(dict(found.patches["g"]), if_match=engine.generation, change_id="c")
    assert status == 200, body
    return after


@pytest.mark.parametrize("target", ["1ms", "2s", "99h"])
def test_engine_applies_and_reverts_policy(target: str) -> None:
    objectives = {"ttft": {"target": target, "perPromptToken": "125us"}}
    engine, auto = an_engine(), {"mode": "Auto"}
    found = plan_scheduling(a_deployment(objectives=objectives, tuning=auto), {"g": heard(engine)})
    engine = sent(engine, found)
    assert engine.values.scheduling_policy == "deadline"
    assert engine.values.ttft_target == {"1ms": 0.001, "2s": 2.0, "99h": MAX_TARGET_SECONDS}[target]
    assert engine.values.ttft_target_per_prompt_token == 0.000125
    again = plan_scheduling(a_deployment(objectives=objectives, tuning=auto), {"g": heard(engine)})
    assert (again.patches, again.events, again.unsupported) == ({}, (), ())
    status = {"tuning": {"schedulingPolicy": scheduling_status(again)}}
    back = plan_scheduling(a_deployment(tuning=auto, status=status), {"g": heard(engine)})
    engine = sent(engine, back)
    assert engine.values.scheduling_policy == "fcfs"
    status = {"tuning": {"schedulingPolicy": scheduling_status(back)}}
    assert plan_scheduling(a_deployment(tuning=auto, status=status), {"g": heard(engine)}) == SchedulingPlan()


def test_schema_policies_match_engine() -> None:
    for policy in ("fcfs", "priority", "deadline"):
        deployment = a_deployment(engine={"schedulingPolicy": policy}, objectives={"ttft": {"target": "2s"}})
        assert plan_scheduling(deployment, {"g": heard(an_engine())}).unsupported == ()
        assert policy in heard(an_engine()).policies

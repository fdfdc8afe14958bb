"""Start timeout: from the spec or the model's size, and never longer than the startup probe."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from operator_builders import a_deployment
from trimtab_operator.builders.admin_token import TokenHashes
from trimtab_operator.builders.pod import pod_spec
from trimtab_operator.builders.startup import (
    MAX_START_TIMEOUT_SECONDS,
    describe_start_timeout,
    probe_seconds,
    start_seconds,
)
from trimtab_operator.resource.spec import InferenceDeployment

GB = 10**9


def a_start(gigabytes: float | None = None, **rollout: Any) -> InferenceDeployment:
    weights_bytes = None if gigabytes is None else round(gigabytes * GB)
    return replace(a_deployment(rollout=rollout), weights_bytes=weights_bytes)


def probe_of(deployment: InferenceDeployment) -> float:
    """Return the seconds after which the startup probe fails."""
    (main,) = pod_spec(deployment, token_hashes=TokenHashes("0" * 64, "0" * 64))["containers"]
    return float(main["startupProbe"]["failureThreshold"] * main["startupProbe"]["periodSeconds"])


@pytest.mark.parametrize(
    ("gigabytes", "minutes"),
    [
        (None, 30),  # the model is not read yet
        (0.27, 31),  # SmolLM2-135M
        (141, 54),  # Llama 3 70B: 23.5 minutes at 100 MB/s
        (688, 145),  # DeepSeek-V3 in fp8
    ],
)
def test_a_start_may_take_half_an_hour_and_what_reading_the_model_takes(
    gigabytes: float | None, minutes: float
) -> None:
    assert start_seconds(a_start(gigabytes)) == 60 * minutes


def test_its_owners_word_counts_instead() -> None:
    assert start_seconds(a_start(688, startTimeout="5m")) == 300
    assert describe_start_timeout(a_start(688, startTimeout="5m")) == "5m"


def test_start_timeout_text_names_its_derivation() -> None:
    assert describe_start_timeout(a_start(141)) == "54m (for a model of 141.0 GB; spec.rollout.startTimeout)"
    assert describe_start_timeout(a_start()) == "30m"


@pytest.mark.parametrize("gigabytes", [None, 0.27, 141, 688, 2000])
@pytest.mark.parametrize("rollout", [{}, {"startTimeout": "1m"}, {"startTimeout": "2h"}])
def test_no_kubelet_begins_anew_what_the_operator_still_waits_for(
    gigabytes: float | None, rollout: dict[str, str]
) -> None:
    deployment = a_start(gigabytes, **rollout)
    assert probe_of(deployment) == probe_seconds(deployment) >= start_seconds(deployment)


def test_another_time_that_is_written_makes_no_other_pods() -> None:
    assert probe_of(a_start(1, startTimeout="1m")) == probe_of(a_start(1)) == MAX_START_TIMEOUT_SECONDS

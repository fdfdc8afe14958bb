"""Prior of the step cost for a real model on a real GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from trimtab_operator.layout.facts import facts_of_config
from trimtab_operator.layout.gpus import gpu_named
from trimtab_operator.planning.tuning import step_cost_prior
from trimtab_operator.resource.spec import Parallelism

CONFIGS = json.loads((Path(__file__).parents[2] / "golden" / "published_configs.json").read_text())
LLAMA = facts_of_config(CONFIGS["Llama-3.1-8B"], "Llama-3.1-8B")
H200 = gpu_named("H200")


def test_a_prior_of_a_real_model_on_a_real_gpu_is_plausible() -> None:
    cost = step_cost_prior(LLAMA, Parallelism(), H200)
    assert 0.005 < cost.per_step < 0.012
    assert 20_000 < 1 / cost.per_token < 60_000
    assert cost.per_context == pytest.approx(131_072 / 4.3e12, rel=0.05)  # bytes of KV over the bandwidth reached
    assert 0 <= cost.per_attended < cost.per_context


def test_prior_depends_on_ranks_and_device() -> None:
    alone = step_cost_prior(LLAMA, Parallelism(), H200)
    assert step_cost_prior(LLAMA, Parallelism(tensor=2), H200).per_step < alone.per_step
    assert step_cost_prior(LLAMA, Parallelism(), gpu_named("L4")).per_token > 4 * alone.per_token

"""Random mixes of requests that share prefixes, on several ranks: each request gets what it gets alone on one rank."""

from collections.abc import Callable
from typing import Any

import pytest
from request_mixes import BUDGETS, Tally, answer_alone, draw_questions, run_mix
from trimtab_engine.core.engine import Engine

pytestmark = pytest.mark.usefixtures("forked")
SIZES: dict[str, Any] = {
    "max_model_len": 256,
    "num_gpu_blocks_override": 800,
    "max_num_seqs": 24,
    "max_num_seqs_cap": 24,
    "max_num_batched_tokens": max(BUDGETS),
    "max_num_batched_tokens_cap": max(BUDGETS),
}
MIXES = 12
TP2, PP2 = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        pytest.param("dense", TP2, id="dense tp2"),
        pytest.param("dense", PP2, id="dense pp2"),
        pytest.param("moe", TP2 | {"enable_expert_parallel": True}, id="moe tp2 ep"),
        pytest.param("windows", PP2, id="windows pp2"),
    ],
)
def test_requests_of_mixes_equal_each_alone_on_one_rank(
    model: str, layout: dict[str, Any], models: dict[str, str], start: Callable[..., Engine]
) -> None:
    questions = draw_questions(60, longest=240, block_size=8)
    answers = answer_alone(start(models[model], **SIZES, enable_prefix_caching=False), questions)
    engine = start(models[model], **SIZES, **layout)
    tally = Tally()
    for number in range(1, MIXES + 1):
        run_mix(engine, questions, answers, number, tally, tolerance=2e-4)
    assert tally.defects == []
    assert tally.near_ties <= tally.tokens / 200
    assert tally.cached_tokens > 1000
    assert tally.sliced_steps > 0

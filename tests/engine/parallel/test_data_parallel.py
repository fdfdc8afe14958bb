"""Data-parallel cores: greedy tokens equal one rank's in every further layout with up to four processes, with chunking,
preemption and prefix caching. Real processes, driven as by the API server.
"""

from collections.abc import Callable
from typing import Any

import pytest
from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.config.experts import EplbConfig
from trimtab_engine.config.speculation import SpeculativeConfig
from trimtab_engine.core.engine import Engine

pytestmark = pytest.mark.usefixtures("forked")

MOST_ROUNDS = 10
NUM_REQUESTS, OUTPUT = 12, 12
TP2, PP2, EP = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}, {"enable_expert_parallel": True}
SWAP = {"preemption_mode": "swap", "swap_space_bytes": 1 << 20, "swap_space_bytes_cap": 1 << 20}
DRAFTS = {
    "speculative": SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1),
    "num_speculative_tokens": 3,
    "num_speculative_tokens_cap": 3,
}
EPLB = {"eplb": EplbConfig(window_size=16, step_interval=8, num_redundant_experts=4)}
LAYOUTS: list[Any] = [
    pytest.param("dense", {}, id="dense dp2"),
    pytest.param("dense", TP2, id="dense tp2 dp2"),
    pytest.param("dense", PP2, id="dense pp2 dp2"),
    pytest.param("moe", {}, id="moe dp2"),
    pytest.param("moe", EP, id="moe dp2 ep"),
    pytest.param("moe", EP | SWAP | DRAFTS, id="moe dp2 ep swapping, with n-grams"),
    pytest.param("moe", TP2, id="moe tp2 dp2"),
    pytest.param("moe", TP2 | EP, id="moe tp2 dp2 ep"),
    pytest.param("skewed", TP2 | EP | EPLB, id="skewed moe tp2 dp2 ep balanced"),
    pytest.param("moe", PP2, id="moe pp2 dp2"),
    pytest.param("moe", PP2 | EP, id="moe pp2 dp2 ep"),
]


@pytest.mark.parametrize(("model", "layout"), LAYOUTS)
async def test_tokens_equal_those_of_one_rank(
    model: str,
    layout: dict[str, Any],
    models: dict[str, str],
    start: Callable[..., Engine],
    serving: Any,
    cores_of: Any,
    config_of: Callable[..., EngineConfig],
    tight: dict[str, Any],
    expected: dict[str, dict[str, list[int]]],
) -> None:
    serve, requests, check_disturbed = serving
    asked = requests(NUM_REQUESTS, OUTPUT)
    if model not in expected:
        expected[model] = serve(start(models[model]), asked)
    async with cores_of(config_of(models[model], data_parallel_size=2, **tight, **layout)) as cores:
        assert await cores.serve(asked) == expected[model]
        served = [sum(s.num_generation_tokens for s in cores.steps if s.engine_index == core) for core in (0, 1)]
        assert min(served) >= 3 * OUTPUT, "both cores are to serve"
        few = asked[3:4]
        assert await cores.serve(few) == {r.request_id: expected[model][r.request_id] for r in few}, (
            "a single request again"
        )
        for _ in range(MOST_ROUNDS):  # on a busy machine requests may arrive too far apart to compete
            if any(stats.preempted for stats in cores.steps):
                break
            assert await cores.serve(asked) == expected[model]
    check_disturbed(cores.steps, asked)
    assert (sum(stats.swapped_in_bytes for stats in cores.steps) > 0) == ("preemption_mode" in layout)
    assert (sum(stats.num_drafts for stats in cores.steps) > 0) == ("speculative" in layout)
    news = [stats.expert_balance for stats in cores.steps if stats.expert_balance is not None]
    assert (sum(entry.moved_bytes for entry in news) > 0) == ("eplb" in layout)

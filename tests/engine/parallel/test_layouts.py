"""Every layout yields the greedy tokens of one rank: chunked, preempted, prefix-cached, on real processes over gloo."""

from array import array
from collections.abc import Callable
from typing import Any, get_args

import pytest
from trimtab_engine.config.speculation import SpeculativeConfig
from trimtab_engine.core.engine import Engine
from trimtab_engine.errors import ConfigError
from trimtab_engine.messages.requests import AddRequest, StepStats
from trimtab_engine.scheduling.pooling import Pooling, PoolingMethod
from trimtab_engine.scheduling.sampling import Sampling

pytestmark = pytest.mark.usefixtures("forked")

DRAFTS = {
    "speculative": SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1),
    "num_speculative_tokens": 3,
    "num_speculative_tokens_cap": 3,
}
SEVERAL_GROUPS = {"num_gpu_blocks_override": 48, "max_num_batched_tokens_cap": 24}
"""Blocks for one or two requests, of which windows hold part."""
SWAP = {"preemption_mode": "swap", "swap_space_bytes": 1 << 20, "swap_space_bytes_cap": 1 << 20}
OFFLOAD = {"kv_offload_bytes": 1 << 20, "kv_offload_bytes_cap": 1 << 20}
METHODS: tuple[PoolingMethod, ...] = get_args(PoolingMethod)
LAYOUTS = [
    pytest.param("dense", {"tensor_parallel_size": 2}, id="dense tp2"),
    pytest.param("dense", {"tensor_parallel_size": 2, "async_scheduling": True}, id="dense tp2 async"),
    pytest.param("dense", {"tensor_parallel_size": 2} | DRAFTS, id="dense tp2 with drafts"),
    pytest.param("dense", {"pipeline_parallel_size": 2}, id="dense pp2"),
    pytest.param("dense", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, id="dense tp2 pp2"),
    pytest.param("dense", {"pipeline_parallel_size": 3}, id="dense pp3"),
    pytest.param("dense", {"pipeline_parallel_size": 3} | SWAP, id="dense pp3 swapping"),
    pytest.param("dense", {"tensor_parallel_size": 2, "async_scheduling": True} | SWAP, id="dense tp2 async swapping"),
    pytest.param("dense", {"pipeline_parallel_size": 2} | OFFLOAD, id="dense pp2 offloading"),
    pytest.param(
        "dense", {"tensor_parallel_size": 2, "async_scheduling": True} | OFFLOAD | SWAP, id="dense tp2 async offloading"
    ),
    pytest.param(
        "dense", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2} | SWAP | DRAFTS, id="dense tp2 pp2 all"
    ),
    pytest.param("moe", {"enable_expert_parallel": True}, id="moe ep of one rank"),
    pytest.param("moe", {"tensor_parallel_size": 2}, id="moe tp2"),
    pytest.param("moe", {"pipeline_parallel_size": 2}, id="moe pp2"),
    pytest.param("moe", {"pipeline_parallel_size": 2, "enable_expert_parallel": True}, id="moe pp2 ep"),
    pytest.param("moe", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, id="moe tp2 pp2"),
    pytest.param("moe", {"tensor_parallel_size": 2, "enable_expert_parallel": True}, id="moe tp2 ep"),
    pytest.param(
        "moe",
        {
            "tensor_parallel_size": 2,
            "pipeline_parallel_size": 2,
            "enable_expert_parallel": True,
            "expert_placement_strategy": "round_robin",
        },
        id="moe tp2 pp2 ep",
    ),
    pytest.param("windows", {"tensor_parallel_size": 2} | SEVERAL_GROUPS, id="windows tp2"),
    pytest.param("windows", {"pipeline_parallel_size": 2} | SEVERAL_GROUPS | SWAP, id="windows pp2 swapping"),
    pytest.param("sinks", {"tensor_parallel_size": 2} | SEVERAL_GROUPS, id="sinks tp2"),
    pytest.param("sinks", {"pipeline_parallel_size": 2} | SEVERAL_GROUPS | DRAFTS, id="sinks pp2 with drafts"),
    pytest.param(
        "sinks",
        {"tensor_parallel_size": 2, "enable_expert_parallel": True} | SEVERAL_GROUPS | SWAP,
        id="sinks tp2 ep swapping",
    ),
    pytest.param("chunks", {"tensor_parallel_size": 2} | SEVERAL_GROUPS, id="chunks tp2"),
    pytest.param("chunks", {"pipeline_parallel_size": 2} | SEVERAL_GROUPS | SWAP, id="chunks pp2 swapping"),
    pytest.param(
        "chunks",
        {"tensor_parallel_size": 2, "enable_expert_parallel": True} | SEVERAL_GROUPS | DRAFTS,
        id="chunks tp2 ep with drafts",
    ),
    pytest.param("latent", {"tensor_parallel_size": 2}, id="latent tp2"),
    pytest.param("latent", {"pipeline_parallel_size": 2} | SWAP, id="latent pp2 swapping"),
    pytest.param(
        "latent", {"tensor_parallel_size": 2, "enable_expert_parallel": True} | DRAFTS, id="latent tp2 ep with drafts"
    ),
    pytest.param("awq", {"tensor_parallel_size": 2}, id="awq tp2"),
    pytest.param("awq", {"pipeline_parallel_size": 2} | SWAP, id="awq pp2 swapping"),
    pytest.param("gptq", {"tensor_parallel_size": 2, "enable_expert_parallel": True}, id="gptq tp2 ep"),
    pytest.param("gptq", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, id="gptq tp2 pp2"),
    pytest.param("ordered", {"tensor_parallel_size": 2}, id="gptq in an order tp2"),
    pytest.param("fp8", {"tensor_parallel_size": 2}, id="fp8 by channel tp2"),
    pytest.param("fp8", {"pipeline_parallel_size": 2} | SWAP, id="fp8 by channel pp2 swapping"),
    pytest.param("w4a16", {"tensor_parallel_size": 2}, id="w4a16 tp2"),
    pytest.param("w4a16", {"tensor_parallel_size": 2, "enable_expert_parallel": True}, id="w4a16 tp2 ep"),
    pytest.param("w4a16", {"pipeline_parallel_size": 2}, id="w4a16 pp2"),
    pytest.param("mxfp4", {"tensor_parallel_size": 2} | SEVERAL_GROUPS, id="mxfp4 tp2"),
    pytest.param("mxfp4", {"pipeline_parallel_size": 2} | SEVERAL_GROUPS | SWAP, id="mxfp4 pp2 swapping"),
    pytest.param(
        "mxfp4", {"tensor_parallel_size": 2, "enable_expert_parallel": True} | SEVERAL_GROUPS, id="mxfp4 tp2 ep"
    ),
]


@pytest.mark.parametrize(("model", "layout"), LAYOUTS)
def test_tokens_equal_those_of_one_rank(
    model: str,
    layout: dict[str, Any],
    models: dict[str, str],
    start: Callable[..., Engine],
    serving: Any,
    tight: dict[str, Any],
    expected: dict[str, dict[str, list[int]]],
) -> None:
    serve, requests, check_disturbed = serving
    asked = requests()
    if model not in expected:
        expected[model] = serve(start(models[model]), asked)
    engine = start(models[model], **(tight | layout))
    steps: list[StepStats] = []
    assert serve(engine, asked, steps) == expected[model]
    assert serve(engine, asked, steps) == expected[model], "again, with cached blocks"
    check_disturbed(steps, asked)
    assert (sum(stats.swapped_in_bytes for stats in steps) > 0) == ("preemption_mode" in layout)
    assert (sum(stats.restored_bytes for stats in steps) > 0) == ("kv_offload_bytes" in layout)
    assert (sum(stats.num_drafts for stats in steps) > 0) == ("speculative" in layout)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        pytest.param("dense", {"tensor_parallel_size": 2, "async_scheduling": True}, id="dense tp2 async"),
        pytest.param("dense", {"pipeline_parallel_size": 2} | SWAP, id="dense pp2 swapping"),
        pytest.param("windows", {"pipeline_parallel_size": 2} | SEVERAL_GROUPS, id="windows pp2"),
    ],
)
def test_vectors_equal_those_of_one_rank(
    model: str,
    layout: dict[str, Any],
    models: dict[str, str],
    start: Callable[..., Engine],
    serving: Any,
    tight: dict[str, Any],
) -> None:
    """Prompts that are pooled, in chunks, among as many that go on to generate and preempt them."""
    _, requests, _ = serving
    generating = requests()
    to_pool = [
        AddRequest(f"{method}-{r.request_id}", (r.prompt_token_ids * 2)[:96], r.sampling, 0.0, pooling=Pooling(method))
        for r in generating
        for method in METHODS
    ]
    expected = vectors(start(models[model]), to_pool)
    engine = start(models[model], **(tight | layout))
    mixed = [request for pair in zip(generating, to_pool[::2], to_pool[1::2], strict=True) for request in pair]
    steps: list[StepStats] = []
    found = vectors(engine, mixed, steps)
    for request_id, vector in expected.items():
        assert found[request_id] == pytest.approx(vector, abs=1e-5), request_id
    assert any(stats.preempted for stats in steps)
    assert sum(stats.num_generation_tokens for stats in steps) == 12 * len(generating)


def vectors(engine: Engine, asked: list[AddRequest], steps: list[StepStats] | None = None) -> dict[str, list[float]]:
    """Return vectors of pooling requests served together; invariants are checked after every step."""
    found: dict[str, list[float]] = {}
    for request in asked:
        engine.add(request)
    while engine.has_work:
        step = engine.step()
        engine.check_integrity()
        if steps is not None:
            steps.append(step.stats)
        for output in step.outputs:
            if output.pooled is not None:
                assert output.finish_reason == "stop"
                found[output.request_id] = array("f", output.pooled).tolist()
    assert found.keys() == {request.request_id for request in asked if request.pooling is not None}
    return found


@pytest.mark.parametrize(
    ("model", "layout", "is_always_right"),
    [
        pytest.param("dense", {"tensor_parallel_size": 2} | SWAP, True, id="dense tp2 swapping"),
        pytest.param("dense", {"pipeline_parallel_size": 2, "pipeline_layer_partition": (1, 2)}, True, id="dense pp2"),
        pytest.param("moe", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, False, id="moe tp2 pp2"),
    ],
)
def test_a_draft_model_on_the_core_s_rank_changes_no_token(
    model: str,
    layout: dict[str, Any],
    is_always_right: bool,
    models: dict[str, str],
    start: Callable[..., Engine],
    serving: Any,
    tight: dict[str, Any],
    expected: dict[str, dict[str, list[int]]],
) -> None:
    serve, requests, check_disturbed = serving
    asked = requests()
    if model not in expected:
        expected[model] = serve(start(models[model]), asked)
    drafts = DRAFTS | {
        "speculative": SpeculativeConfig(method="draft_model", model=models["dense"], num_speculative_tokens=3)
    }
    steps: list[StepStats] = []
    assert serve(start(models[model], **tight, **layout, **drafts), asked, steps) == expected[model]
    check_disturbed(steps, asked)
    assert (sum(stats.swapped_in_bytes for stats in steps) > 0) == ("preemption_mode" in layout)
    drafted = sum(stats.num_draft_tokens for stats in steps)
    accepted = sum(sum(stats.accepted_per_position) for stats in steps)
    assert drafted > 0
    assert (accepted == drafted) is is_always_right


def test_swapped_bytes_count_every_rank_and_the_space_is_sized_by_the_widest(
    models: dict[str, str], start: Callable[..., Engine], serving: Any, tight: dict[str, Any]
) -> None:
    serve, requests, _ = serving
    layout = {"pipeline_parallel_size": 2, "pipeline_layer_partition": (2, 1)}
    one_layer = 2 * 8 * 2 * 12 * 4  # keys and values of 8 tokens in 2 heads of 12 floats
    space = {"preemption_mode": "swap", "swap_space_bytes": 9 * one_layer, "swap_space_bytes_cap": 9 * one_layer}
    engine = start(models["dense"], **tight, **layout, **space)
    assert engine._scheduler.blocks.swap_space.num_total == 4, "of two layers each, on the first stage"
    steps: list[StepStats] = []
    serve(engine, requests(), steps)
    swapped = [stats.swapped_out_bytes for stats in steps if stats.swapped_out_bytes]
    assert swapped
    assert all(count % (3 * one_layer) == 0 for count in swapped)


def test_seeded_request_is_equal_on_two_ranks(
    models: dict[str, str], start: Callable[..., Engine], serving: Any
) -> None:
    serve, *_ = serving
    sampling = Sampling(max_tokens=20, temperature=1.0, top_p=0.9, seed=7, repetition_penalty=1.1, ignore_eos=True)
    asked = [AddRequest("r", [3, 1, 4, 1, 5], sampling, 0.0)]
    assert serve(start(models["dense"], tensor_parallel_size=2), asked) == serve(start(models["dense"]), asked)


def test_reported_layout_matches_rank_reports(models: dict[str, str], start: Callable[..., Engine]) -> None:
    engine = start(models["moe"], tensor_parallel_size=2, pipeline_parallel_size=2, enable_expert_parallel=True)
    layout = engine.layout()
    assert (layout["world_size"], layout["tensor_parallel_size"], layout["pipeline_parallel_size"]) == (4, 2, 2)
    assert layout["expert_parallel"] is True
    rows = layout["ranks"]
    assert [row["rank"] for row in rows] == [0, 1, 2, 3]
    assert [tuple(row["layers"]) for row in rows] == [(0, 1), (0, 1), (2, 2), (2, 2)]
    assert [(row["heads"], row["kv_heads"]) for row in rows] == [(2, 1)] * 4
    assert [tuple(row["experts"]) for row in rows] == [(0, 1, 2), (3, 4, 5)] * 2
    assert len({row["pid"] for row in rows}) == 4


def test_all_ranks_have_as_many_blocks_as_the_tightest(models: dict[str, str], start: Callable[..., Engine]) -> None:
    engine = start(
        models["dense"],
        pipeline_parallel_size=2,
        pipeline_layer_partition=(2, 1),
        num_gpu_blocks_override=None,
        gpu_memory_utilization="0.3",
        gpu_memory_utilization_cap="0.3",
    )
    ledger = engine.ledger()
    of_first_stage = 2 * 2 * 8 * 2 * 12 * 4  # the other stage has twice the layers, so its blocks are twice as large
    assert ledger.bytes_per_block == of_first_stage // 2
    room = 0.3 * ledger.device_bytes
    assert ledger.blocks_total * of_first_stage < room
    assert ledger.kinds["kv_mapped"] < 0.6 * room, "this rank could have had nearly twice as many"


@pytest.mark.parametrize(
    ("model", "layout", "message"),
    [
        ("dense", {"tensor_parallel_size": 3}, "num_attention_heads 4 cannot be divided by 3"),
        ("dense", {"pipeline_parallel_size": 4}, "--pipeline-parallel-size is 4, but the model has 3 layers"),
        ("dense", {"enable_expert_parallel": True, "tensor_parallel_size": 2}, "LlamaForCausalLM has none"),
        ("dense", {"tensor_parallel_size": 2, "nnodes": 3}, "= 2 ranks cannot be divided evenly among that many nodes"),
        ("dense", {"tensor_parallel_size": 2, "node_rank": 1}, "--node-rank is 1; with --nnodes 1"),
    ],
)
def test_a_layout_that_cannot_work_is_refused_with_the_number_that_is_wrong(
    model: str, layout: dict[str, Any], message: str, models: dict[str, str], start: Callable[..., Engine]
) -> None:
    with pytest.raises(ConfigError, match=message):
        start(models[model], **layout)

"""Device steps on several ranks: fixed inputs and graphs, replayed by a test double. Real processes over gloo. Tokens
equal one rank's steps, and all ranks of a step replay the same graph.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from calling_recorder import all_steps_follow, noted, steps_of_a_device
from llguidance import LLMatcher
from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.config.experts import EplbConfig
from trimtab_engine.config.graphs import CompilationConfig, CUDAGraphMode
from trimtab_engine.config.speculation import SpeculativeConfig
from trimtab_engine.core.engine import Engine
from trimtab_engine.core.startup import start_engine
from trimtab_engine.messages.admin import PatchConfig, Sleep, WakeUp
from trimtab_engine.messages.requests import AddRequest, StepStats

pytestmark = pytest.mark.usefixtures("forked")

NUM_REQUESTS, OUTPUT = 12, 12
TP2, PP2, EP = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}, {"enable_expert_parallel": True}
OVERLAPPED = {"async_scheduling": True}
DRAFTS = {
    "speculative": SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1),
    "num_speculative_tokens": 3,
    "num_speculative_tokens_cap": 3,
}
SWAP = {"preemption_mode": "swap", "swap_space_bytes": 1 << 20, "swap_space_bytes_cap": 1 << 20}
SEVERAL_GROUPS = {"num_gpu_blocks_override": 48, "max_num_batched_tokens_cap": 24}
"""Blocks for one or two requests, of which windows hold part."""
EPLB = {"eplb": EplbConfig(window_size=16, step_interval=8, num_redundant_experts=4)}
LAZY = {"compilation": CompilationConfig(cudagraph_lazy_capture=True)}
ONLY_FULL = {"compilation": CompilationConfig(cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY)}


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    folder = tmp_path / "notes"
    folder.mkdir()
    return folder


def kinds(steps: list[StepStats]) -> set[str]:
    return {kind for stats in steps for kind in stats.graph_steps}


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        pytest.param("dense", TP2, id="dense tp2"),
        pytest.param("dense", TP2 | OVERLAPPED, id="dense tp2 overlapped"),
        pytest.param("dense", TP2 | DRAFTS | LAZY, id="dense tp2 with drafts, lazily"),
        pytest.param("dense", TP2 | OVERLAPPED | SWAP, id="dense tp2 overlapped, swapping"),
        pytest.param("dense", PP2 | SWAP, id="dense pp2 swapping"),
        pytest.param("dense", TP2 | PP2 | ONLY_FULL, id="dense tp2 pp2, only decodes"),
        pytest.param("moe", TP2 | EP | OVERLAPPED, id="moe tp2 ep overlapped"),
        pytest.param("skewed", TP2 | EP | EPLB | OVERLAPPED, id="skewed moe tp2 ep balanced"),
        pytest.param("windows", TP2 | OVERLAPPED | SWAP | SEVERAL_GROUPS, id="windows tp2 overlapped, swapping"),
        pytest.param("sinks", TP2 | EP | DRAFTS | SEVERAL_GROUPS, id="sinks tp2 ep with drafts"),
        pytest.param("chunks", PP2 | SEVERAL_GROUPS, id="chunks pp2"),
        pytest.param("latent", TP2 | EP | OVERLAPPED | SWAP, id="latent tp2 ep overlapped, swapping"),
        pytest.param("latent", PP2 | DRAFTS, id="latent pp2 with drafts"),
    ],
)
def test_tokens_equal_those_of_one_rank(
    model: str,
    layout: dict[str, Any],
    models: dict[str, str],
    start: Callable[..., Engine],
    serving: Any,
    tight: dict[str, Any],
    expected: dict[str, dict[str, list[int]]],
    notes: Path,
) -> None:
    serve, requests, check_disturbed = serving
    asked = requests()
    if model not in expected:
        expected[model] = serve(start(models[model]), asked)
    steps: list[StepStats] = []
    with steps_of_a_device(notes):
        engine = start(models[model], **(tight | layout))
        assert serve(engine, asked, steps) == expected[model]
        assert serve(engine, asked, steps) == expected[model], "again, with cached blocks"
        engine.close()
    check_disturbed(steps, asked)
    assert kinds(steps) == (
        {"full"} if layout.get("compilation") == ONLY_FULL["compilation"] else {"full", "piecewise"}
    )
    taken = noted(notes)
    assert len(taken) == layout.get("tensor_parallel_size", 1) * layout.get("pipeline_parallel_size", 1)
    assert all(of_rank == taken[0] for of_rank in taken), "every rank takes the same graph in each step"


def test_sampling_features_are_equal_over_ranks(
    models: dict[str, str], start: Callable[..., Engine], serving: Any, notes: Path
) -> None:
    """Tokens are chosen on the rank that samples, from counts that it keeps, while the others compute the next step."""
    serve, requests, _ = serving
    wishes: list[dict[str, Any]] = [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.5, "frequency_penalty": 0.5, "temperature": 0.9, "seed": 4},
        {"logit_bias": {5: 4.0}, "min_tokens": 8, "ignore_eos": False},
        {"bad_words": [[7], [3, 9]], "logprobs": 2},
    ]
    asked = [
        AddRequest(r.request_id, r.prompt_token_ids, msgspec.structs.replace(r.sampling, **wishes[number % 4]), 0.0)
        for number, r in enumerate(requests(8))
    ]
    ends = ("length", "stop")
    expected = serve(start(models["dense"]), asked, ends=ends)
    with steps_of_a_device(notes):
        engine = start(models["dense"], **TP2, **OVERLAPPED)
        assert serve(engine, asked, ends=ends) == expected
        engine.close()


def test_grammars_are_equal_over_ranks(
    models: dict[str, str], tokenizer_folder: Path, start: Callable[..., Engine], serving: Any, notes: Path
) -> None:
    """Masks arrive while the other rank already computes the step."""
    serve, requests, _ = serving
    model = notes.parent / "with-tokenizer"
    shutil.copytree(models["dense"], model)
    shutil.copytree(tokenizer_folder, model, dirs_exist_ok=True)
    wishes: list[dict[str, Any]] = [
        {"grammar": LLMatcher.grammar_from_regex("[0-9 ]{9}"), "temperature": 0.9, "seed": 4},
        {},
        {"grammar": LLMatcher.grammar_from_regex("[A-F]{1,40}"), "repetition_penalty": 1.2},
    ]
    asked = [
        AddRequest(r.request_id, r.prompt_token_ids, msgspec.structs.replace(r.sampling, **wishes[number % 3]), 0.0)
        for number, r in enumerate(requests(8))
    ]
    ends = ("length", "stop")
    expected = serve(start(str(model)), asked, ends=ends)
    with steps_of_a_device(notes):
        engine = start(str(model), **TP2, **OVERLAPPED)
        assert all_steps_follow(engine, lambda: serve(engine, asked, ends=ends)) == expected
        engine.close()


def test_graphs_outlive_sleep_and_a_resized_cache(
    models: dict[str, str], start: Callable[..., Engine], serving: Any, notes: Path
) -> None:
    serve, requests, _ = serving
    asked = requests(6)
    sized: dict[str, Any] = {
        "num_gpu_blocks_override": None,
        "gpu_memory_utilization": "0.2",
        "gpu_memory_utilization_cap": "0.3",
    }
    sized |= {"block_size": 128}  # few blocks, though the memory is large
    expected = serve(start(models["dense"]), asked)
    steps: list[StepStats] = []
    with steps_of_a_device(notes) as recorder:
        engine = start(models["dense"], **TP2, **sized)
        num_records = recorder.num_records
        assert serve(engine, asked, steps) == expected
        engine.lifecycle(Sleep(1, "abort"))
        engine.lifecycle(WakeUp(["weights", "kv_cache", "scheduling"]))
        assert serve(engine, asked, steps) == expected
        for utilization in (0.3, 0.2):
            status, _ = engine.patch_config(PatchConfig({"gpu_memory_utilization": utilization}))
            assert status == 200
            assert serve(engine, asked, steps) == expected
        assert recorder.num_records == num_records
        engine.close()
    assert sum(stats.graph_captures for stats in steps) == 0


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        pytest.param("dense", PP2 | DRAFTS, id="dense pp2 with drafts"),
        pytest.param("skewed", TP2 | EP | EPLB | OVERLAPPED, id="skewed moe tp2 ep balanced"),
    ],
)
def test_reloaded_weights_of_ranks_are_captured_again(
    model: str,
    layout: dict[str, Any],
    models: dict[str, str],
    start: Callable[..., Engine],
    serving: Any,
    notes: Path,
) -> None:
    serve, requests, _ = serving
    asked = requests(6)
    expected = serve(start(models[model]), asked)
    steps: list[StepStats] = []
    with steps_of_a_device(notes):
        engine = start(models[model], **layout)
        assert serve(engine, asked, steps) == expected
        assert sum(stats.graph_captures for stats in steps) == 0
        engine.lifecycle(Sleep(2, "abort"))
        asleep = [rank["kinds"]["weights"] for rank in engine.memory()["ranks"]]
        engine.lifecycle(WakeUp(["weights", "kv_cache", "scheduling"]))
        assert serve(engine, asked, steps) == expected
        engine.close()
    assert asleep == [0, 0]
    assert sum(stats.graph_captures for stats in steps) > 0
    taken = noted(notes)
    assert taken[0] == taken[1]


def test_rank_ledgers_include_inputs_and_graph_progress_is_reported(
    models: dict[str, str], config_of: Callable[..., EngineConfig], notes: Path
) -> None:
    told: list[tuple[str, float]] = []
    with steps_of_a_device(notes):
        config = config_of(models["dense"], **PP2)
        engine, _ = start_engine(config, lambda stage, percent: told.append((stage, percent)), lambda: 0.0)
        try:
            ranks = engine.memory()["ranks"]
        finally:
            engine.close()
    workspace = [rank["kinds"]["workspace"] for rank in ranks]
    assert len(workspace) == 2
    assert workspace[0] > 0
    assert workspace[1] > workspace[0], "the last stage keeps the hidden states of the one before it as well"
    percents = [percent for stage, percent in told if stage == "graphs"]
    assert len(percents) > 2
    assert percents == sorted(percents)


def test_graph_replays_count_sent_bytes(
    models: dict[str, str], start: Callable[..., Engine], serving: Any, notes: Path
) -> None:
    serve, requests, _ = serving
    steps: list[StepStats] = []
    with steps_of_a_device(notes):
        engine = start(models["dense"], **TP2)
        serve(engine, requests(6), steps)
        engine.close()
    replayed = [stats for stats in steps if stats.graph_steps]
    assert len(replayed) >= OUTPUT - 1
    for stats in replayed:
        rows = stats.num_scheduled_tokens + stats.graph_padding_tokens
        assert stats.wire_bytes["all_reduce"] == (1 + 2 * 3) * rows * 48 * 4, "three layers of 48 floats per row"


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(EP | OVERLAPPED, id="dp2 ep overlapped"),
        pytest.param(TP2 | EP | DRAFTS, id="dp2 tp2 ep with drafts"),
        pytest.param(PP2, id="dp2 pp2"),
    ],
)
async def test_cores_in_lockstep_take_one_graph_together(
    layout: dict[str, Any],
    models: dict[str, str],
    start: Callable[..., Engine],
    serving: Any,
    cores_of: Any,
    config_of: Callable[..., EngineConfig],
    tight: dict[str, Any],
    expected: dict[str, dict[str, list[int]]],
    notes: Path,
) -> None:
    serve, requests, check_disturbed = serving
    asked: list[AddRequest] = requests(NUM_REQUESTS, OUTPUT)
    if "moe" not in expected:
        expected["moe"] = serve(start(models["moe"]), asked)
    with steps_of_a_device(notes):
        async with cores_of(config_of(models["moe"], data_parallel_size=2, **tight, **layout)) as cores:
            assert await cores.serve(asked) == expected["moe"]
            few = asked[3:4]
            before = len(cores.steps)
            assert await cores.serve(few) == {r.request_id: expected["moe"][r.request_id] for r in few}
            alone = cores.steps[before:]
    check_disturbed(cores.steps, asked)
    assert kinds(cores.steps) == {"full", "piecewise"}
    idle = [stats for stats in alone if stats.num_generation_tokens == 0 and stats.graph_steps.get("full")]
    assert idle, "a core without work replays the other's graph on padding"
    taken = noted(notes)
    assert len(taken) == 2 * layout.get("tensor_parallel_size", 1) * layout.get("pipeline_parallel_size", 1)
    assert all(of_rank == taken[0] for of_rank in taken), "every rank of both cores takes the same graph in each step"

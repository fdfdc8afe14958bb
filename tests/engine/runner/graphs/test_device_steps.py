"""Device steps with and without graphs: tokens equal the CPU's steps, with any padding and replay."""

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import engine_builders
import msgspec
import pytest
from calling_recorder import all_steps_follow, steps_of_a_device, steps_that_follow
from trimtab_engine.config.graphs import CompilationConfig, CUDAGraphMode
from trimtab_engine.config.speculation import SpeculativeConfig
from trimtab_engine.core import startup
from trimtab_engine.core.engine import Engine
from trimtab_engine.messages.admin import Sleep, WakeUp
from trimtab_engine.messages.requests import AddRequest, StepStats
from trimtab_engine.runner import start
from trimtab_engine.runner.graphs.device_steps import warm_up_sizes
from trimtab_engine.runner.graphs.plan import cuda_graph_plan
from trimtab_engine.sampling import token_table
from trimtab_engine.scheduling.sampling import Sampling, TokenLogprobs, token_mask
from trimtab_kernels.tune.measurement import BATCH_SIZES

VOCABULARY = 97


@pytest.fixture
def model(model_of: Callable[..., Path]) -> Path:
    return model_of()


def generate(
    engine: Engine, requests: list[tuple[list[int], Sampling]], totals: StepStats | None = None
) -> list[list[int]]:
    """Return the tokens of each request and check the idle engine. Step counts are added to totals."""
    for number, (prompt, sampling) in enumerate(requests):
        engine.add(AddRequest(str(number), prompt, sampling, arrival_time=0.0))
    tokens: list[list[int]] = [[] for _ in requests]
    while engine.has_work:
        step = engine.step()
        if totals is not None:
            add(totals, step.stats)
        for output in step.outputs:
            tokens[int(output.request_id)] += output.token_ids
    engine.check_integrity()
    return tokens


def reports(engine: Engine, requests: list[tuple[list[int], Sampling]]) -> list[list[TokenLogprobs]]:
    """Log-probabilities of each request."""
    for number, (prompt, sampling) in enumerate(requests):
        engine.add(AddRequest(str(number), prompt, sampling, arrival_time=0.0))
    found: list[list[TokenLogprobs]] = [[] for _ in requests]
    while engine.has_work:
        for output in engine.step().outputs:
            found[int(output.request_id)] += output.logprobs or []
    return found


def prompt_reports(engine: Engine, requests: list[tuple[list[int], Sampling]]) -> list[list[TokenLogprobs]]:
    """Log-probabilities of each prompt."""
    for number, (prompt, sampling) in enumerate(requests):
        engine.add(AddRequest(str(number), prompt, sampling, arrival_time=0.0))
    found: list[list[TokenLogprobs]] = [[] for _ in requests]
    while engine.has_work:
        for output in engine.step().outputs:
            found[int(output.request_id)] += output.prompt_logprobs or []
    return found


def add(totals: StepStats, stats: StepStats) -> None:
    for kind, count in stats.graph_steps.items():
        totals.graph_steps[kind] = totals.graph_steps.get(kind, 0) + count
    for reason, count in stats.eager_steps.items():
        totals.eager_steps[reason] = totals.eager_steps.get(reason, 0) + count
    totals.graph_padding_tokens += stats.graph_padding_tokens
    totals.graph_captures += stats.graph_captures
    totals.swapped_out_bytes += stats.swapped_out_bytes
    totals.swapped_in_bytes += stats.swapped_in_bytes


def no_totals() -> StepStats:
    return StepStats(0, 0.0, 0.0, "idle", 0, 0, 0, 0, 0, graph_steps={}, eager_steps={})


an_engine_config = partial(
    engine_builders.a_config, num_gpu_blocks_override=96, max_model_len=128, max_num_seqs=6, max_num_batched_tokens=48
)


def an_engine(model: Path, **changes: Any) -> Engine:
    config = an_engine_config(model, **changes)
    return startup.start_engine(config, lambda stage, percent: None, engine_builders.ticking())[0]


def random_requests(number: int, count: int = 9, **sampling: Any) -> list[tuple[list[int], Sampling]]:
    """Return prompts of 1 to 40 tokens, so that chunks, decodes and mixed steps occur."""
    dice = random.Random(number)
    return [
        (
            [dice.randrange(VOCABULARY) for _ in range(dice.randint(1, 40))],
            Sampling(**{"temperature": 0.0, "max_tokens": dice.randint(1, 12), "ignore_eos": True, **sampling}),
        )
        for _ in range(count)
    ]


BOTH = CompilationConfig()
ONLY_FULL = CompilationConfig(cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY)
ONLY_PIECES = CompilationConfig(cudagraph_mode=CUDAGraphMode.PIECEWISE)
FEW_SIZES = CompilationConfig(cudagraph_capture_sizes=(4, 40))
LAZY = CompilationConfig(cudagraph_lazy_capture=True)


@pytest.mark.parametrize(
    "changes",
    [
        {"compilation": BOTH},
        {"compilation": ONLY_FULL},
        {"compilation": ONLY_PIECES},
        {"compilation": FEW_SIZES},
        {"compilation": LAZY},
        {"enforce_eager": True},
        {"compilation": BOTH, "async_scheduling": True},
        {"compilation": BOTH, "async_scheduling": True, "num_gpu_blocks_override": 18},  # preempts
    ],
    ids=["both", "full", "pieces", "few sizes", "lazy", "eager", "overlapped", "preempting"],
)
def test_tokens_equal_cpu_steps(model: Path, changes: dict[str, Any]) -> None:
    requests = random_requests(1)
    expected = generate(an_engine(model), requests)
    with steps_of_a_device():
        found = generate(an_engine(model, **changes), requests)
    assert found == expected


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.8, "seed": 5, "top_k": 20},
        {"temperature": 1.0, "seed": 7, "top_p": 0.9},
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.6, "frequency_penalty": -0.4, "temperature": 0.9, "seed": 4},
        {"temperature": 0.7, "seed": 3, "min_tokens": 4, "ignore_eos": False},
        {"logprobs": 2},
        {"allowed_tokens": token_mask(tuple(range(3, 60, 2))), "repetition_penalty": 2.0, "max_tokens": 12},
        {"logit_bias": {7: 3.5, 9: -50.0, 11: 3.0}, "frequency_penalty": 1.0},
        {"bad_words": ((7,), (3, 5), (5, 3), (3, 3, 3), (5, 5)), "allowed_tokens": token_mask((3, 5, 7)),
         "max_tokens": 12},
        {"allowed_tokens": token_mask((3, 5, 96)), "min_tokens": 5, "ignore_eos": False, "logprobs": 1,
         "presence_penalty": 2.0},
    ],
    ids=[
        "top k", "top p", "repetition", "presence", "min tokens", "logprobs",
        "allowed", "bias", "bad words", "all of them",
    ],
)  # fmt: skip
@pytest.mark.parametrize("num_blocks", [96, 18], ids=["", "preempting"])
def test_overlapped_sampling_gives_the_tokens_of_its_seed(
    model: Path, sampling: dict[str, Any], num_blocks: int
) -> None:
    requests = random_requests(2, **sampling) + random_requests(3, count=3)
    expected = generate(an_engine(model), requests)
    with steps_of_a_device():
        engine = an_engine(model, async_scheduling=True, num_gpu_blocks_override=num_blocks)
        assert all_steps_follow(engine, lambda: generate(engine, requests)) == expected


@pytest.mark.parametrize(("num_rows", "follows"), [(12, True), (8, True), (5, False)])
def test_requests_share_the_rows_that_their_penalties_need(
    model: Path, monkeypatch: pytest.MonkeyPatch, num_rows: int, follows: bool
) -> None:
    """Two rows per request, three running at once; some are preempted and resumed."""
    requests = random_requests(
        12, repetition_penalty=1.3, presence_penalty=0.2, logit_bias={5: 2.0, 6: 2.0}, temperature=0.8, seed=2
    )
    changes = {"max_num_seqs": 4, "num_gpu_blocks_override": 18}
    expected = generate(an_engine(model, **changes), requests)
    monkeypatch.setattr(token_table, "TABLE_BYTES", num_rows * 4 * 100)
    with steps_of_a_device():
        engine = an_engine(model, async_scheduling=True, **changes)
        followed, found = steps_that_follow(engine, lambda: generate(engine, requests))
    assert found == expected
    assert all(followed) == follows


@pytest.mark.parametrize("num_host_blocks", [100, 6], ids=["", "a small swap space"])
def test_steps_that_swap_follow_others(model: Path, num_host_blocks: int) -> None:
    block_bytes = 2 * 2 * 8 * 2 * 16 * 4  # keys and values of two layers: tokens, heads, float32
    changes = {
        "num_gpu_blocks_override": 18,
        "preemption_mode": "swap",
        "swap_space_bytes": num_host_blocks * block_bytes,
        "swap_space_bytes_cap": num_host_blocks * block_bytes,
    }
    requests = random_requests(15, repetition_penalty=1.2)
    expected = generate(an_engine(model), requests)
    with steps_of_a_device():
        engine = an_engine(model, async_scheduling=True, **changes)
        totals = no_totals()
        assert all_steps_follow(engine, lambda: generate(engine, requests, totals)) == expected
    assert totals.swapped_out_bytes > 0
    assert totals.swapped_in_bytes > 0


def test_logprobs_equal_cpu_steps(model: Path) -> None:
    requests = random_requests(13, logprobs=3, repetition_penalty=1.4, max_tokens=6) + random_requests(14, logprobs=0)
    expected = reports(an_engine(model), requests)
    with steps_of_a_device():
        found = reports(an_engine(model, async_scheduling=True), requests)
    assert [[(r.token_ids, r.rank) for r in own] for own in found] == [
        [(r.token_ids, r.rank) for r in own] for own in expected
    ]
    for ours, theirs in zip(found, expected, strict=True):
        for report, other in zip(ours, theirs, strict=True):
            assert report.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_drafts_are_verified_in_graphs_of_their_own(model: Path) -> None:
    speculation = {
        "speculative": SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1),
        "num_speculative_tokens": 3,
        "num_speculative_tokens_cap": 3,
    }
    requests = random_requests(4)
    expected = generate(an_engine(model), requests)
    with steps_of_a_device():
        totals = no_totals()
        found = generate(an_engine(model, **speculation), requests, totals)
    assert found == expected
    assert totals.graph_steps["full"] > 0


@pytest.mark.parametrize("num_blocks", [96, 18], ids=["", "preempting"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 4, "repetition_penalty": 1.1}], ids=str)
def test_drafts_overlap_device_work_with_reporting(model: Path, sampling: dict[str, Any], num_blocks: int) -> None:
    """After each reported step with continuing requests the next one is already running."""
    speculation = {
        "speculative": SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1),
        "num_speculative_tokens": 3,
        "num_speculative_tokens_cap": 3,
    }
    requests = random_requests(4, **sampling)
    expected = generate(an_engine(model), requests)
    with steps_of_a_device():
        engine = an_engine(model, async_scheduling=True, num_gpu_blocks_override=num_blocks, **speculation)
        for number, (prompt, params) in enumerate(requests):
            engine.add(AddRequest(str(number), prompt, params, arrival_time=0.0))
        engine.add(AddRequest("aborted", [5] * 30, Sampling(max_tokens=90, temperature=0.0), arrival_time=0.0))
        tokens: list[list[int]] = [[] for _ in requests]
        num_drafts, in_steps, began, now = 0, 0.0, None, 0.0
        while engine.has_work:
            step = engine.step()
            in_steps, now = in_steps + step.stats.step_seconds, step.stats.time
            began = now - step.stats.step_seconds if began is None else began
            num_drafts += step.stats.num_drafts
            assert engine._in_flight or not engine._scheduler.num_unfinished
            for output in step.outputs:
                if output.request_id != "aborted":
                    tokens[int(output.request_id)] += output.token_ids
            if step.stats.step == 8:
                engine.abort(["aborted"])
            engine.check_integrity()
    assert tokens == expected
    assert num_drafts > 0
    assert began is not None
    assert in_steps <= now - began, "no second is of two steps"


def test_every_graph_is_captured_before_the_engine_is_ready(model: Path) -> None:
    stages: list[str] = []
    with steps_of_a_device() as recorder:
        config = msgspec.structs.replace(an_engine_config(model), compilation=FEW_SIZES)
        engine, _ = startup.start_engine(config, lambda stage, percent: stages.append(stage), lambda: 0.0)
        assert recorder.num_records == len(cuda_graph_plan(config).keys) == 4  # 4 and 40 in pieces; 4 and 6 whole
    assert "graphs" in stages
    assert stages.index("graphs") > stages.index("kv_cache")
    totals = no_totals()
    generate(engine, random_requests(5), totals)
    assert totals.graph_captures == 0


def test_lazy_graphs_are_captured_when_a_step_wants_them(model: Path) -> None:
    with steps_of_a_device() as recorder:
        engine = an_engine(model, compilation=LAZY)
        assert recorder.num_records == 2, "the largest two, to estimate the memory of all"
        totals = no_totals()
        generate(engine, random_requests(6), totals)
    assert totals.graph_captures == recorder.num_records - 2 > 0


def test_steps_padding_and_eager_fall_backs_are_counted(model: Path) -> None:
    with steps_of_a_device() as recorder:
        engine = an_engine(model, compilation=CompilationConfig(cudagraph_capture_sizes=(4, 16)))
        before = recorder.num_replays
        totals = no_totals()
        generate(engine, [(list(range(30)), Sampling(temperature=0.0, max_tokens=3))], totals)
    assert totals.eager_steps == {"too_large": 1}  # the prompt
    assert totals.graph_steps == {"full": 2}
    assert totals.graph_padding_tokens == 2 * 3
    assert recorder.num_replays - before == 2


def test_without_graphs_every_step_is_counted_as_off(model: Path) -> None:
    with steps_of_a_device():
        engine = an_engine(model, enforce_eager=True)
        totals = no_totals()
        generate(engine, random_requests(7, count=2), totals)
    assert set(totals.eager_steps) == {"off"}
    assert totals.graph_steps == {}


def test_padding_writes_to_no_block(model: Path) -> None:
    """A padding-only step, as used for graph capture, leaves the cache unchanged."""
    with steps_of_a_device():
        engine = an_engine(model)
    cache = engine._kv_cache
    for tensor in (*cache.keys, *cache.values):
        tensor.fill_(3.0)
    steps = engine._runner.steps
    assert steps is not None
    steps.warm_up()
    for key in steps.plan.keys:
        steps.capture(key)
    assert all(bool((tensor == 3.0).all()) for tensor in (*cache.keys, *cache.values))


def test_a_step_follows_another_before_its_tokens_are_known(model: Path) -> None:
    with steps_of_a_device():
        engine = an_engine(model, async_scheduling=True)
    all_steps_follow(engine, lambda: generate(engine, random_requests(8)))


def test_steps_that_judge_prompts_follow_others_and_judge_alike(model: Path) -> None:
    requests = random_requests(16, prompt_logprobs=2) + random_requests(17, count=3)
    expected = prompt_reports(an_engine(model), requests)
    with steps_of_a_device():
        engine = an_engine(model, async_scheduling=True)
        found = all_steps_follow(engine, lambda: prompt_reports(engine, requests))
    assert [len(own) for own in found] == [len(prompt) - 1 for prompt, _ in requests[:9]] + [0] * 3
    for ours, theirs in zip(found, expected, strict=True):
        for report, other in zip(ours, theirs, strict=True):
            assert (report.token_ids, report.rank) == (other.token_ids, other.rank)
            assert report.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_reloaded_weights_are_captured_again(model: Path) -> None:
    requests = random_requests(9, count=4)
    with steps_of_a_device() as recorder:
        engine = an_engine(model)
        expected = generate(engine, requests)
        before = recorder.num_records
        engine.lifecycle(Sleep(2, "abort"))
        engine.lifecycle(WakeUp(["weights", "kv_cache", "scheduling"]))
        assert generate(engine, requests) == expected
    assert recorder.num_records > before


def test_ledger_includes_graphs_and_buffers(model: Path) -> None:
    with steps_of_a_device():
        engine = an_engine(model)
    kinds = engine.ledger().kinds
    steps = engine._runner.steps
    assert steps is not None
    assert kinds["workspace"] == steps.num_bytes > 0
    assert kinds["graphs"] >= 0


def test_warm_up_covers_kernel_configuration_sizes() -> None:
    assert set(BATCH_SIZES) <= set(warm_up_sizes(5000))
    assert warm_up_sizes(5000)[0] == 5000
    assert warm_up_sizes(1) == [1]


@pytest.mark.parametrize(
    ("grown", "num_graphs", "expected"),
    [([], 0, 0), ([50 << 20], 1, 50 << 20), ([50 << 20, 3 << 20], 10, 77 << 20), ([50 << 20, 0], 3, 52 << 20)],
)
def test_the_memory_of_graphs_is_estimated_from_the_first_two(grown: list[int], num_graphs: int, expected: int) -> None:
    assert start.estimated_bytes(grown, num_graphs) == expected

"""The whole engine in one process with a tiny random model: runtime changes do not change outputs."""

import itertools
import json
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from engine_builders import a_config, a_new_request
from trimtab_engine.core import execution
from trimtab_engine.core.engine import Engine
from trimtab_engine.core.startup import start_engine
from trimtab_engine.errors import ConfigError
from trimtab_engine.memory.reserved import RANK_BYTES
from trimtab_engine.messages.admin import PatchConfig
from trimtab_engine.messages.lifecycle import CoreReady
from trimtab_engine.messages.requests import AddRequest, StepStats
from trimtab_engine.runner.model_runner import ModelRunner
from trimtab_engine.sampling import sampler
from trimtab_engine.scheduling.request import Request
from trimtab_engine.scheduling.sampling import Sampling, token_mask

VOCABULARY = 97
MAX_MODEL_LEN = 128
BLOCKS_FOR_ONE = MAX_MODEL_LEN // 8
BYTES_PER_BLOCK = 2 * 2 * 8 * 2 * 16 * 4
DEVICE_BYTES = 4 << 30  # 0.0001 of it is 0.43 MB, some 52 blocks


class Clock:
    """Time that moves only when it is looked at."""

    def __init__(self) -> None:
        self._ticks = itertools.count()

    def __call__(self) -> float:
        return next(self._ticks) * 0.001


@pytest.fixture
def model(model_of: Callable[..., Path]) -> Path:
    return model_of()


def an_engine(model: Path, **changes: Any) -> tuple[Engine, CoreReady]:
    settings: dict[str, Any] = {
        "device_memory_bytes": DEVICE_BYTES,
        "max_model_len": MAX_MODEL_LEN,
        "num_gpu_blocks_override": 4 * BLOCKS_FOR_ONE,
        "max_num_seqs_cap": 16,
        "max_num_batched_tokens_cap": 256,
    }
    return start_engine(a_config(model, **settings | changes), lambda stage, percent: None, Clock())


def utilization(steps_above_the_reserve: int) -> str:
    """Return a utilization that leaves some hundred MB for the engine above the process reservation."""
    return str((RANK_BYTES * 10_000 // DEVICE_BYTES + steps_above_the_reserve) / 10_000)


def a_request(number: int, *, prompt: int, output: int, shared: bool = False, **sampling: Any) -> AddRequest:
    tokens = [random.Random(number * 7 + i).randrange(VOCABULARY - 1) for i in range(prompt)]
    return a_new_request(f"r{number}", SHARED + tokens if shared else tokens, **{"max_tokens": output, **sampling})


def run(engine: Engine, requests: list[AddRequest], between_steps: Any = lambda step: None) -> dict[str, list[int]]:
    """Serve to the end. The tokens of each request; fails when one does not end by length."""
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    reasons: dict[str, str] = {}
    for request in requests:
        engine.add(request)
    for step in range(100_000):
        if not engine.has_work:
            break
        for output in engine.step().outputs:
            tokens[output.request_id] += output.token_ids
            if output.finish_reason:
                reasons[output.request_id] = output.finish_reason
        engine.check_integrity()
        between_steps(step)
    assert set(reasons.values()) == {"length"}
    assert reasons.keys() == tokens.keys()
    return tokens


def test_continuing_requests_are_reported_as_plain_tokens(model: Path) -> None:
    engine, _ = an_engine(model)
    for number in range(2):
        engine.add(a_request(number, prompt=4, output=5 + number))
    steps = [engine.step() for _ in range(7)]
    request_outputs = [[(o.request_id, o.finish_reason) for o in step.request_outputs] for step in steps]
    plain = [step.plain for step in steps]
    begun, ended = request_outputs[0], [request_outputs[4], request_outputs[5]]
    assert begun == [("r0", None), ("r1", None)]
    assert ended == [[("r0", "length")], [("r1", "length")]]
    in_columns = [tokens for tokens in plain if tokens is not None]
    assert [tokens.request_ids for tokens in in_columns] == [["r0", "r1"]] * 3 + [["r1"]]
    assert in_columns[2].request_ids is in_columns[1].request_ids
    assert [len(step.outputs) for step in steps] == [2, 2, 2, 2, 2, 1, 0]


SHARED = list(range(20))
REQUESTS = [a_request(n, prompt=5 + 7 * (n % 9), output=10 + 5 * (n % 8), shared=n % 3 == 0) for n in range(24)]


A_SWAP_SPACE = {"swap_space_bytes": 100 * BYTES_PER_BLOCK, "swap_space_bytes_cap": 100 * BYTES_PER_BLOCK}
A_SMALL_SWAP_SPACE = {"swap_space_bytes": 9 * BYTES_PER_BLOCK, "swap_space_bytes_cap": 9 * BYTES_PER_BLOCK}


@pytest.fixture(scope="module")
def expected(model_of: Callable[..., Path]) -> dict[str, list[int]]:
    """Return each request's undisturbed output."""
    return alone(model_of())


def alone(model: Path) -> dict[str, list[int]]:
    """Return each request's undisturbed output."""
    engine, _ = an_engine(model, max_num_batched_tokens=256)
    answers: dict[str, list[int]] = {}
    for request in REQUESTS:
        answers |= run(engine, [request])
    return answers


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_num_batched_tokens": 16},
        {"max_num_batched_tokens": 16, "long_prefill_token_threshold": 5},
        {"enable_prefix_caching": False},
        {"num_gpu_blocks_override": BLOCKS_FOR_ONE + 4},
        {"num_gpu_blocks_override": BLOCKS_FOR_ONE + 4, "watermark": 0.1, "max_num_batched_tokens": 20},
        {"num_gpu_blocks_override": BLOCKS_FOR_ONE + 4, "preemption_mode": "swap", **A_SWAP_SPACE},
        {"num_gpu_blocks_override": BLOCKS_FOR_ONE + 4, "preemption_mode": "auto", **A_SWAP_SPACE},
        {"num_gpu_blocks_override": BLOCKS_FOR_ONE + 4, "preemption_mode": "swap", **A_SMALL_SWAP_SPACE},
    ],
)
def test_batching_does_not_change_tokens(
    model: Path, expected: dict[str, list[int]], changes: dict[str, Any], overlap: bool
) -> None:
    engine, _ = an_engine(model, async_scheduling=overlap, **changes)
    preempted: Counter[str] = Counter()
    hits = moved = 0
    for request in REQUESTS:
        engine.add(request)
    tokens: dict[str, list[int]] = {request.request_id: [] for request in REQUESTS}
    while engine.has_work:
        step = engine.step()
        for mode, reasons in step.stats.preempted.items():
            preempted[mode] += sum(reasons.values())
        hits += step.stats.prefix_cache_hits
        moved += step.stats.swapped_in_bytes
        for output in step.outputs:
            tokens[output.request_id] += output.token_ids
        engine.check_integrity()
    assert tokens == expected
    mode = changes.get("preemption_mode", "recompute")
    assert preempted["recompute"] > (5 if mode == "recompute" and "num_gpu_blocks_override" in changes else -1)
    assert (preempted["swap"] > 0) == (moved > 0)
    assert preempted["swap"] > (0 if mode == "swap" else -1)
    if changes.get("swap_space_bytes") == A_SMALL_SWAP_SPACE["swap_space_bytes"]:
        assert preempted["recompute"] > 0, "a full swap space falls back"
    assert (hits > 0) == changes.get("enable_prefix_caching", True)


def test_prefix_cache_is_shared_only_with_equal_salts(model: Path) -> None:
    engine, _ = an_engine(model)
    prompt = [number % VOCABULARY for number in range(50)]
    greedy = Sampling(max_tokens=4, temperature=0.0, ignore_eos=True)
    cached = {}
    for name, salt in (("first", ""), ("again", ""), ("tenant", "x"), ("tenant again", "x")):
        engine.add(AddRequest(name, prompt, greedy, arrival_time=0.0, cache_salt=salt))
        first, *_ = engine.step().outputs
        cached[name] = first.num_cached_tokens
        while engine.has_work:
            engine.step()
    assert cached == {"first": 0, "again": 48, "tenant": 0, "tenant again": 48}


@pytest.mark.parametrize("overlap", [False, True])
def test_random_patches_under_load_change_no_output(model: Path, expected: dict[str, list[int]], overlap: bool) -> None:
    engine, _ = an_engine(
        model,
        async_scheduling=overlap,
        num_gpu_blocks_override=None,
        gpu_memory_utilization=utilization(200),
        gpu_memory_utilization_cap=utilization(240),
    )
    dice = random.Random(20)
    least = engine.config()["fields"]["gpu_memory_utilization"]["min"]
    seen = {200: 0, 412: 0, 422: 0}
    generation = 1
    resized = set()

    def patch_at_random(_: int) -> None:
        nonlocal generation
        for _ in range(2):
            values = dice.choice(
                [
                    {"max_num_seqs": dice.randint(1, 20)},
                    {"max_num_batched_tokens": dice.randint(1, 300)},
                    {"max_num_seqs": dice.randint(1, 16), "max_num_batched_tokens": dice.randint(16, 256)},
                    {"gpu_memory_utilization": dice.choice([least, float(utilization(dice.randint(-60, 300)))])},
                ]
            )
            if_match = dice.choice([None, generation, generation - 1])
            status, body = engine.patch_config(PatchConfig(values, if_match, False))
            seen[status] += 1
            if status == 200:
                generation = int(body["generation"])
                resized.add(engine.ledger().blocks_total)
            engine.check_integrity()

    rounds = 0
    while sum(seen.values()) < 1000:
        assert run(engine, REQUESTS, patch_at_random) == expected
        rounds += 1
    assert seen[200] > 100
    assert seen[412] > 50
    assert seen[422] > 50
    assert len(resized) > 3, "the KV cache really changed its size"


def test_a_patch_takes_effect_in_the_very_next_step(model: Path) -> None:
    engine, _ = an_engine(model)
    for request in REQUESTS[:8]:
        engine.add(request)
    before = engine.step().stats
    status, body = engine.patch_config(PatchConfig({"max_num_batched_tokens": 8}))
    after = engine.step().stats
    assert status == 200
    assert body["applied_at_step"] == before.step + 1 == after.step
    assert before.num_scheduled_tokens == 64
    assert after.num_scheduled_tokens == 8
    assert after.config_generation == 2


def test_request_lateness_uses_arrival_clock(model: Path) -> None:
    """The scheduler's `now` is the engine's clock parameter, the API servers' one, also after a live change."""
    now = 1e6
    config = a_config(model, max_num_seqs=1, max_num_batched_tokens=64, ttft_target=10.0)
    engine, _ = start_engine(config, lambda stage, percent: None, lambda: now)
    status, _ = engine.patch_config(PatchConfig({"scheduling_policy": "deadline"}))
    assert status == 200
    engine.add(a_request(0, prompt=4, output=9))
    engine.step()
    for index, waited in ((1, 7.6), (2, 7.4), (3, 0.0)):
        engine.add(msgspec.structs.replace(a_request(index, prompt=4, output=2), arrival_time=now - waited))
    stats = engine.step().stats
    assert (stats.num_waiting, stats.num_late, stats.num_waiting_late) == (3, 1, 1)
    assert stats.oldest_waiting_arrival == now - 7.6
    now += 0.2
    assert (stats := engine.step().stats).num_late == 1
    assert stats.num_waiting_late == 2
    ended = [output.request_id for _ in range(20) for output in engine.step().outputs if output.finish_reason]
    assert len(ended) == 4
    assert ended[1:] == ["r3", "r1", "r2"]


def test_step_stats_report_context_and_attended_tokens(model: Path) -> None:
    engine, _ = an_engine(model, max_num_seqs=2, max_num_batched_tokens=64)
    engine.add(a_request(0, prompt=10, output=5))
    engine.add(a_request(1, prompt=20, output=5))
    stats = engine.step().stats
    assert (stats.num_arrived, stats.num_arrived_prompt_tokens) == (2, 30)
    assert (stats.kind, stats.num_context_tokens) == ("prefill", 30)
    assert stats.num_attended_tokens == 10 * 11 // 2 + 20 * 21 // 2
    stats = engine.step().stats
    assert (stats.num_arrived, stats.kind) == (0, "decode")
    assert stats.num_context_tokens == stats.num_attended_tokens == 11 + 21
    (first, _) = engine.unfinished()["unfinished"]
    assert first[1:] == [10, 0, 2]


def test_kv_shrink_below_use_preempts_and_frees_memory(model: Path) -> None:
    engine, _ = an_engine(
        model,
        num_gpu_blocks_override=None,
        gpu_memory_utilization=utilization(200),
        gpu_memory_utilization_cap="0.9",
        max_num_seqs=16,
        max_num_batched_tokens=256,
    )
    least = engine.config()["fields"]["gpu_memory_utilization"]["min"]
    for number in range(16):  # more blocks in all than the smallest cache can have, whose size is rounded up
        engine.add(a_request(number, prompt=80, output=40))
    for _ in range(12):
        engine.step()
    total = engine.ledger().blocks_total
    status, _ = engine.patch_config(PatchConfig({"gpu_memory_utilization": least}))
    stats = engine.step().stats
    assert status == 200
    assert engine.ledger().blocks_total < total
    assert stats.preempted["recompute"]["resize"] > 0
    assert stats.kv_blocks_used <= stats.kv_blocks_total
    engine.check_integrity()


def test_drain_aborts_remaining_requests_at_deadline(model: Path) -> None:
    engine, _ = an_engine(model)
    for request in REQUESTS[:4]:
        engine.add(request)
    engine.step()
    report = engine.drain(0.0)
    outputs = engine.step().outputs
    assert report["remaining_requests"] == 4
    assert report["remaining_tokens"] > 0
    assert {output.finish_reason for output in outputs} == {"abort"}
    assert not engine.has_work


def test_ledger_lists_owners_and_mapped_kv_bytes(model: Path) -> None:
    engine, ready = an_engine(model)
    ledger = engine.ledger()
    assert ledger.kinds["kv_mapped"] == ready.num_blocks * BYTES_PER_BLOCK
    assert sum(ledger.kinds.values()) + ledger.free_bytes == ledger.device_bytes
    assert ledger.untouched_bytes == ledger.kinds["kv_mapped"], "no KV page was written yet"


def test_a_plan_gives_what_a_patch_of_the_same_utilisation_gives(model: Path) -> None:
    high = utilization(240)
    sizes = {
        "num_gpu_blocks_override": None,
        "gpu_memory_utilization": utilization(200),
        "gpu_memory_utilization_cap": high,
    }
    engine, ready = an_engine(model, **sizes)
    assert engine.memory_plan({})[1]["num_blocks"] == ready.num_blocks
    status, plan = engine.memory_plan({"gpu_memory_utilization": float(high)})
    assert engine.patch_config(PatchConfig({"gpu_memory_utilization": float(high)}))[0] == 200
    assert (status, plan["num_blocks"]) == (200, engine.ledger().blocks_total)
    assert plan["kinds"]["kv_mapped"] == engine.ledger().kinds["kv_mapped"]
    known = json.loads((model / "config.json").read_text())
    assert (
        engine.memory_plan({"max_model_len": "auto"})[1]["planned"]["max_model_len"] == known["max_position_embeddings"]
    )


def test_swap_space_on_the_cpu_is_part_of_the_device(model: Path) -> None:
    swap = 64 * BYTES_PER_BLOCK
    engine, _ = an_engine(model, preemption_mode="swap", swap_space_bytes=swap // 2, swap_space_bytes_cap=swap)
    ledger = engine.ledger()
    assert ledger.kinds["workspace"] == swap
    assert ledger.untouched_bytes == ledger.kinds["kv_mapped"] + swap
    status, plan = engine.memory_plan({"swap_space_bytes": 2 * swap})
    assert (status, plan["kinds"]["workspace"]) == (200, 2 * swap)


def offload(blocks: int) -> dict[str, int]:
    return {"kv_offload_bytes": blocks * BYTES_PER_BLOCK, "kv_offload_bytes_cap": blocks * BYTES_PER_BLOCK}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("space", [{}, {"preemption_mode": "swap", **A_SMALL_SWAP_SPACE}])
def test_host_cache_hits_keep_tokens_and_are_counted(
    model: Path, expected: dict[str, list[int]], space: dict[str, Any], overlap: bool
) -> None:
    engine, _ = an_engine(
        model, num_gpu_blocks_override=BLOCKS_FOR_ONE + 4, async_scheduling=overlap, **offload(400), **space
    )
    for turn in range(2):
        stats: list[StepStats] = []
        cached: dict[str, tuple[int, int]] = {}
        tokens: dict[str, list[int]] = {request.request_id: [] for request in REQUESTS}
        for request in REQUESTS:
            engine.add(request)
        while engine.has_work:
            step = engine.step()
            stats.append(step.stats)
            for output in step.outputs:
                tokens[output.request_id] += output.token_ids
                if output.first_scheduled_time is not None:
                    cached[output.request_id] = (output.num_cached_tokens, output.num_host_cached_tokens)
            engine.check_integrity()
        assert tokens == expected
        on_host = sum(host for _, host in cached.values())
        assert on_host == sum(s.host_cache_hits for s in stats) == sum(s.num_host_cached_prompt_tokens for s in stats)
        assert sum(all_of for all_of, _ in cached.values()) == on_host + sum(s.prefix_cache_hits for s in stats)
        assert sum(s.offloaded_bytes for s in stats) > 0
        if turn:
            assert on_host > 100
            assert sum(s.restored_bytes for s in stats) >= on_host // 8 * BYTES_PER_BLOCK


def test_host_cache_separates_salts_and_resets_with_prefix_cache(model: Path) -> None:
    engine, _ = an_engine(model, num_gpu_blocks_override=BLOCKS_FOR_ONE, **offload(100))
    filler = [a_request(50 + n, prompt=100, output=2) for n in range(3)]

    def found(number: int, salt: str) -> int:
        """Return host tokens of a conversation repeated after others have filled the KV cache."""
        request = AddRequest(
            f"back{number}", [*range(40)], Sampling(max_tokens=1, temperature=0.0), 0.0, cache_salt=salt
        )
        engine.add(request)
        outputs = [output for _ in range(20) if engine.has_work for output in engine.step().outputs]
        run(engine, filler)
        return outputs[0].num_host_cached_tokens

    assert [found(0, ""), found(1, ""), found(2, "tenant"), found(3, "tenant"), found(4, "")] == [0, 32, 0, 32, 32]
    assert engine.reset_prefix_cache(reset_running_requests=False)[0] == 200
    assert [found(5, ""), found(6, "")] == [0, 32]
    assert engine.patch_config(PatchConfig({"kv_offload_bytes": 0}))[0] == 200
    assert [found(7, ""), found(8, "")] == [0, 0]
    assert engine.patch_config(PatchConfig({"kv_offload_bytes": 100 * BYTES_PER_BLOCK}))[0] == 200
    assert [found(9, ""), found(10, "")] == [0, 32]
    status, refusal = engine.patch_config(PatchConfig({"kv_offload_bytes": 101 * BYTES_PER_BLOCK}))
    assert (status, refusal["nearest"]) == (422, 100 * BYTES_PER_BLOCK)


def test_kv_shrink_evicts_to_host_cache(model: Path) -> None:
    engine, _ = an_engine(
        model,
        num_gpu_blocks_override=None,
        gpu_memory_utilization=utilization(200),
        gpu_memory_utilization_cap=utilization(260),
        **offload(400),
    )
    first = run(engine, REQUESTS)
    before = engine.config()["fields"]["gpu_memory_utilization"]["min"]
    assert engine.patch_config(PatchConfig({"gpu_memory_utilization": before}))[0] == 200
    hits: list[int] = []
    again = [AddRequest("again" + r.request_id, r.prompt_token_ids, r.sampling, 0.0) for r in REQUESTS]
    for request in again:
        engine.add(request)
    tokens: dict[str, list[int]] = {request.request_id: [] for request in again}
    while engine.has_work:
        step = engine.step()
        hits.append(step.stats.host_cache_hits)
        for output in step.outputs:
            tokens[output.request_id] += output.token_ids
    assert {f"again{name}": answer for name, answer in first.items()} == tokens
    assert sum(hits) > 100


def test_the_host_cache_on_the_cpu_is_part_of_the_device(model: Path) -> None:
    engine, _ = an_engine(model, **offload(64))
    ledger = engine.ledger()
    assert ledger.kinds["workspace"] == 64 * BYTES_PER_BLOCK
    assert ledger.untouched_bytes == ledger.kinds["kv_mapped"] + 64 * BYTES_PER_BLOCK


def test_every_live_field_of_the_scheduler_takes_effect_while_requests_run(model: Path) -> None:
    expected = alone(model)
    swap = 64 * BYTES_PER_BLOCK
    engine, _ = an_engine(
        model, num_gpu_blocks_override=BLOCKS_FOR_ONE + 12, swap_space_bytes_cap=swap, ttft_target=0.05
    )
    dice = random.Random(3)
    choices: dict[str, list[Any]] = {
        "long_prefill_token_threshold": [0, 3, 16],
        "watermark": [0, 0.1, 0.5],
        "scheduling_policy": ["fcfs", "priority", "deadline"],
        "ttft_target": [0.001, 0.05, 5],
        "ttft_target_per_prompt_token": [0, 0.001],
        "preemption_mode": ["recompute", "swap", "auto"],
        "swap_space_bytes": [0, swap // 2, swap],
        "enable_prefix_caching": [False, True],
        "max_num_seqs": [1, 4, 16],
    }

    def patch_at_random(_: int) -> None:
        name = dice.choice(list(choices))
        status, body = engine.patch_config(PatchConfig({name: dice.choice(choices[name])}))
        assert status == 200, body
        engine.check_integrity()

    for _ in range(3):
        assert run(engine, REQUESTS, patch_at_random) == expected


def test_out_of_memory_at_start_names_flags(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    monkeypatch.setattr(ModelRunner, "profile", fail)
    with pytest.raises(
        ConfigError, match=r"out of memory at start, in stage profile .* lower --max-num-batched-tokens"
    ):
        an_engine(model)


def test_too_small_device_is_rejected_with_numbers_and_flags(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"max seq len \(128\).*--gpu-memory-utilization|--device-memory-bytes"):
        an_engine(model, num_gpu_blocks_override=None, device_memory_bytes=RANK_BYTES)


def test_unchunked_prefill_needs_a_budget_of_max_model_len(model: Path) -> None:
    with pytest.raises(ConfigError, match="--max-num-batched-tokens 64 is below max_model_len 128"):
        an_engine(model, enable_chunked_prefill=False)


@pytest.mark.parametrize(
    ("changes", "longest"),
    [
        ({"num_gpu_blocks_override": 20}, 160),
        ({"num_gpu_blocks_override": 1000}, 256),  # the model's
        ({"num_gpu_blocks_override": 20, "enable_chunked_prefill": False}, 64),  # a prompt must fit into one step
        ({"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 9 * BYTES_PER_BLOCK}, 72),
    ],
)
def test_max_model_len_auto_is_the_longest_that_fits_one_request(
    model: Path, changes: dict[str, Any], longest: int
) -> None:
    engine, ready = an_engine(model, max_model_len="auto", **changes)
    assert ready.max_model_len == engine.config()["envelope"]["max_model_len"] == longest
    prompt = min(longest, 64) - 2
    run(engine, [a_request(1, prompt=prompt, output=min(longest - prompt, 40))])


def test_max_model_len_auto_reports_missing_memory(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"out of memory before loading: .* use a device of more than"):
        an_engine(model, max_model_len="auto", num_gpu_blocks_override=None, device_memory_bytes=RANK_BYTES)


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_token_ids": [1, VOCABULARY, 2]},
        {"sampling": Sampling(logit_bias={VOCABULARY: 1.0})},
        {"sampling": Sampling(allowed_tokens=token_mask((VOCABULARY,)))},
    ],
)
def test_a_token_id_that_the_model_does_not_have_ends_its_request_alone(
    model: Path, expected: dict[str, list[int]], changes: dict[str, Any]
) -> None:
    engine, _ = an_engine(model)
    good = REQUESTS[3]
    wrong = msgspec.structs.replace(good, request_id="wrong", **changes)
    engine.add(wrong)
    engine.add(good)
    ended, tokens = [], []
    while engine.has_work:
        for output in engine.step().outputs:
            ended += [output] if output.request_id == "wrong" else []
            tokens += output.token_ids
    assert [output.finish_reason for output in ended] == ["error"]
    assert "out of a vocabulary of 97" in ended[0].error
    assert tokens == expected[good.request_id]


@pytest.mark.parametrize("overlap", [False, True])
def test_logits_that_are_no_numbers_end_their_request_alone_and_are_counted(
    model: Path, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    engine, _ = an_engine(model, async_scheduling=overlap)
    good, bad = REQUESTS[3], msgspec.structs.replace(REQUESTS[3], request_id="bad", cache_salt="its own")
    really_sample = sampler.sample

    @torch.inference_mode()
    def sample(logits: torch.Tensor, requests: Sequence[Request], **others: Any) -> Any:
        for row, request in enumerate(requests):
            if request.request_id == "bad" and request.num_output_tokens == 4:
                logits[row] = math.nan
        return really_sample(logits, requests, **others)

    monkeypatch.setattr(execution, "sample", sample)
    engine.add(bad)
    engine.add(good)
    outputs, failed = [], Counter[str]()
    while engine.has_work:
        step = engine.step()
        outputs += step.outputs
        failed.update(step.stats.failed_requests)
        engine.check_integrity()
    end = next(output for output in outputs if output.request_id == "bad" and output.finish_reason)
    assert (end.finish_reason, end.is_engines_fault, end.token_ids) == ("error", True, [])
    assert sum(len(output.token_ids) for output in outputs if output.request_id == "bad") == 4
    assert [t for o in outputs if o.request_id == good.request_id for t in o.token_ids] == expected[good.request_id]
    assert failed == {"nan": 1}
    monkeypatch.undo()
    engine.add(msgspec.structs.replace(bad, request_id="again"))
    first = engine.step().outputs[0]
    assert (first.request_id, first.num_cached_tokens) == ("again", 0), "its blocks are not found again"


def test_request_without_possible_token_fails_with_reason(model: Path) -> None:
    engine, _ = an_engine(model)
    stuck = Sampling(max_tokens=5, min_tokens=3, temperature=0.0, allowed_tokens=token_mask((96,)))
    engine.add(AddRequest("stuck", [1, 2, 3], stuck, arrival_time=0.0))
    outputs, failed = [], Counter[str]()
    while engine.has_work:
        step = engine.step()
        outputs += step.outputs
        failed.update(step.stats.failed_requests)
    assert [(o.finish_reason, o.token_ids, o.is_engines_fault) for o in outputs] == [("error", [], False)]
    assert "no token is left to choose" in outputs[0].error
    assert failed == {"nothing_left": 1}

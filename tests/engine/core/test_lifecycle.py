"""Pause and sleep: effects on requests and memory; frozen requests keep their output."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import engine_builders
import pytest
from trimtab_engine.config.speculation import SpeculativeConfig
from trimtab_engine.core.engine import Engine
from trimtab_engine.core.lifecycle import RemainingWork
from trimtab_engine.memory.reserved import RANK_BYTES
from trimtab_engine.messages.admin import GetLifecycle, LifecycleCall, PatchConfig, Pause, Resume, Sleep, WakeUp
from trimtab_engine.messages.requests import AddRequest

NUM_BLOCKS = 64
OUTPUT = 24
DEVICE_BYTES = 4 << 30  # 0.0001 of it is some 52 blocks


an_engine = partial(
    engine_builders.an_engine,
    device_memory_bytes=DEVICE_BYTES,
    max_model_len=128,
    num_gpu_blocks_override=NUM_BLOCKS,
    max_num_seqs=4,
    max_num_batched_tokens=32,
)


def a_request(number: int) -> AddRequest:
    prompt = [(7 * number + 3 * i) % 250 for i in range(10 + 9 * number)]
    return engine_builders.a_new_request(f"r{number}", prompt, max_tokens=OUTPUT)


class Run:
    """Six requests on an engine, and their output so far."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tokens: dict[str, list[int]] = {f"r{number}": [] for number in range(6)}
        self.reasons: dict[str, str] = {}
        for number in range(6):
            engine.add(a_request(number))

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            for output in self.engine.step().outputs:
                assert output.request_id not in self.reasons, "it has ended: no further output"
                self.tokens[output.request_id] += output.token_ids
                if output.finish_reason:
                    self.reasons[output.request_id] = output.finish_reason
            self.engine.check_integrity()

    def finish(self) -> dict[str, list[int]]:
        for _ in range(2000):
            if not self.engine.has_work:
                break
            self.step()
        assert set(self.reasons.values()) == {"length"}
        assert len(self.reasons) == 6
        return self.tokens


def ask(engine: Engine, call: LifecycleCall) -> dict[str, Any]:
    status, answer = engine.lifecycle(call)
    assert status == 200, answer
    return answer


def refused(engine: Engine, call: LifecycleCall) -> str:
    status, answer = engine.lifecycle(call)
    assert status == 409
    return str(answer["message"])


@pytest.fixture(scope="module", params=[False, True], ids=["in step", "ahead"])
def shared(request: pytest.FixtureRequest, tiny_model: Path) -> Engine:
    """Return one engine shared by many tests; it may schedule a step while one is in flight."""
    return an_engine(tiny_model, async_scheduling=request.param)


@pytest.fixture
def engine(shared: Engine) -> Iterator[Engine]:
    """Awake and without requests, before each test."""
    yield shared
    if ask(shared, GetLifecycle())["is_sleeping"]:
        ask(shared, WakeUp(tags=["weights", "kv_cache", "scheduling"]))
    ask(shared, Pause(mode="abort"))
    ask(shared, Resume())
    while shared.has_work:
        shared.step()


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> dict[str, list[int]]:
    """Return the requests' undisturbed output."""
    return Run(an_engine(tiny_model)).finish()


def test_kept_requests_are_frozen_and_go_on_after_the_resume(engine: Engine, expected: dict[str, list[int]]) -> None:
    run = Run(engine)
    run.step(9)
    answer = ask(run.engine, Pause(mode="keep"))
    assert (answer["is_paused"], answer["remaining_requests"]) == (True, 6)
    run.step()  # output of the step in flight
    before = {name: len(tokens) for name, tokens in run.tokens.items()}
    used = run.engine.ledger().blocks_used
    assert not run.engine.has_work, "a frozen engine does not spin"
    run.step(5)
    assert {name: len(tokens) for name, tokens in run.tokens.items()} == before
    assert run.engine.ledger().blocks_used == used > 0
    assert run.engine.state().pause_mode == "keep"
    ask(run.engine, Resume())
    assert run.finish() == expected


def test_pause_keep_queues_new_requests(engine: Engine) -> None:
    ask(engine, Pause(mode="keep"))
    run = Run(engine)
    run.step(3)
    assert engine.state().num_waiting == 6
    ask(engine, Resume())
    run.finish()


def test_pause_abort_ends_running_and_new_requests(engine: Engine) -> None:
    run = Run(engine)
    run.step(9)
    assert ask(run.engine, Pause(mode="abort"))["remaining_requests"] == 0
    assert run.engine.has_work, "the aborts are reported after the output of the step in flight"
    run.step()
    assert set(run.reasons.values()) == {"abort"}
    assert run.engine.ledger().blocks_used == 0
    late = Run(run.engine)
    late.step()
    assert set(late.reasons.values()) == {"abort"}
    assert not run.engine.has_work


def test_pause_wait_lets_running_requests_finish(engine: Engine, expected: dict[str, list[int]]) -> None:
    run = Run(engine)
    run.step(3)
    assert ask(run.engine, Pause(mode="wait"))["is_paused"] is False
    assert run.finish() == expected
    assert ask(run.engine, GetLifecycle())["is_paused"] is True


@pytest.mark.parametrize("level", [0, 1, 2])
def test_requests_that_were_kept_through_a_sleep_yield_the_same_tokens(
    engine: Engine, expected: dict[str, list[int]], level: int
) -> None:
    run = Run(engine)
    run.step(9)
    for _ in range(2):  # twice: the released memory is available again
        answer = ask(run.engine, Sleep(level=level, mode="keep"))
        assert (answer["is_sleeping"], answer["sleep_level"], answer["remaining_requests"]) == (True, level, 6)
        assert answer["awake"] == {"weights": level < 2, "kv_cache": level < 1}
        run.step(2)
        assert run.engine.state().sleep_level == level
        assert ask(run.engine, WakeUp(tags=["weights", "kv_cache", "scheduling"]))["is_sleeping"] is False
        run.step(4)
    assert run.finish() == expected


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_speculation_continues_after_sleep(
    tiny_model: Path, expected: dict[str, list[int]], method: Literal["ngram", "draft_model"], level: int
) -> None:
    drafts = SpeculativeConfig(
        method=method, num_speculative_tokens=3, model=str(tiny_model) if method == "draft_model" else None
    )
    depth = {"num_speculative_tokens": 3, "num_speculative_tokens_cap": 3}
    run = Run(an_engine(tiny_model, speculative=drafts, max_num_batched_tokens_cap=64, **depth))
    run.step(5)
    ask(run.engine, Sleep(level=level, mode="keep"))
    ask(run.engine, WakeUp(tags=["weights", "kv_cache", "scheduling"]))
    assert run.finish() == expected


def test_sleep_releases_memory_in_ledger(engine: Engine) -> None:
    run = Run(engine)
    run.step(9)
    awake = run.engine.ledger()
    ask(run.engine, Sleep(level=1, mode="keep"))
    asleep = run.engine.ledger()
    assert (asleep.kinds["kv_mapped"], asleep.untouched_bytes, asleep.blocks_used) == (0, 0, 0)
    assert asleep.kinds["weights"] == awake.kinds["weights"]
    ask(run.engine, Sleep(level=2, mode="keep"))
    assert run.engine.ledger().kinds["weights"] == 0
    ask(run.engine, WakeUp(tags=["weights"]))
    ask(run.engine, WakeUp(tags=["kv_cache"]))
    assert run.engine.ledger().kinds == awake.kinds
    assert ask(run.engine, GetLifecycle())["is_sleeping"] is True, "scheduling sleeps on"
    ask(run.engine, WakeUp(tags=["scheduling"]))
    run.finish()


def test_sleep_wait_starts_after_running_requests(engine: Engine, expected: dict[str, list[int]]) -> None:
    run = Run(engine)
    run.step(3)
    assert ask(run.engine, Sleep(level=2, mode="wait"))["is_sleeping"] is False
    assert run.finish() == expected
    assert ask(run.engine, GetLifecycle())["sleep_level"] == 2


def test_pause_replaces_a_sleep_that_waits(engine: Engine, expected: dict[str, list[int]]) -> None:
    """A pause `keep` freezes running requests; the engine must not fall asleep with them."""
    run = Run(engine)
    run.step(3)
    assert ask(run.engine, Sleep(level=2, mode="wait"))["is_sleeping"] is False
    answer = ask(run.engine, Pause(mode="keep"))
    assert (answer["is_paused"], answer["is_sleeping"]) == (True, False)
    run.step()
    assert ask(run.engine, GetLifecycle())["is_sleeping"] is False
    ask(run.engine, Resume())
    assert run.finish() == expected


def test_kv_cache_resize_during_sleep(tiny_model: Path, expected: dict[str, list[int]]) -> None:
    low, start, high = ((RANK_BYTES * 10_000 // DEVICE_BYTES + steps) / 10_000 for steps in (180, 200, 240))
    sizes = {"num_gpu_blocks_override": None, "gpu_memory_utilization": str(start)}
    run = Run(an_engine(tiny_model, gpu_memory_utilization_cap=str(high), **sizes))
    run.step(9)
    ask(run.engine, Sleep(level=1, mode="keep"))
    for utilization in (high, low):
        status, body = run.engine.patch_config(PatchConfig({"gpu_memory_utilization": utilization}))
        assert status == 200, body
        run.engine.check_integrity()
    assert run.engine.ledger().blocks_total == 0
    ask(run.engine, WakeUp(tags=["kv_cache", "scheduling"]))
    _, plan = run.engine.memory_plan({})
    assert run.engine.ledger().blocks_total == plan["num_blocks"]
    assert run.finish() == expected


def test_lockstep_engine_sleeps_at_level_1_at_most(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine._lifecycle.weights, "can_drop_weights", False)  # as of data-parallel cores in lockstep
    assert "step together; use level 1" in refused(engine, Sleep(level=2, mode="abort"))
    assert ask(engine, Sleep(level=1, mode="abort"))["is_sleeping"] is True
    ask(engine, WakeUp(tags=["weights", "kv_cache", "scheduling"]))


def test_lifecycle_call_out_of_order_is_rejected(engine: Engine) -> None:
    assert "the engine is awake" in refused(engine, WakeUp(tags=["scheduling"]))
    ask(engine, Sleep(level=2, mode="abort"))
    assert "wake it up first" in refused(engine, Pause(mode="keep"))
    assert "wake it up, which resumes it too" in refused(engine, Resume())
    assert "before it sleeps at 1" in refused(engine, Sleep(level=1, mode="keep"))
    assert "weights must be woken before scheduling" in refused(engine, WakeUp(tags=["kv_cache", "scheduling"]))
    ask(engine, WakeUp(tags=["weights", "scheduling"]))
    Run(engine).finish()


def test_drain_ends_frozen_requests_at_deadline(tiny_model: Path) -> None:
    run = Run(an_engine(tiny_model))
    run.step(5)
    ask(run.engine, Sleep(level=1, mode="keep"))
    run.engine.drain(0.0)
    run.step()
    assert set(run.reasons.values()) == {"abort"}


def test_the_prefix_cache_is_reset_when_nothing_is_in_use_or_by_preempting(
    engine: Engine, expected: dict[str, list[int]]
) -> None:
    run = Run(engine)
    run.step(6)
    status, answer = run.engine.reset_prefix_cache(reset_running_requests=False)
    assert (status, answer["reset"]) == (409, False)
    assert "set reset_running_requests" in answer["message"]
    assert run.engine.reset_prefix_cache(reset_running_requests=True) == (200, {"reset": True})
    assert run.finish() == expected
    assert run.engine.step().stats.kv_blocks_cached > 0
    assert run.engine.reset_prefix_cache(reset_running_requests=False) == (200, {"reset": True})
    assert run.engine.step().stats.kv_blocks_cached == 0


@pytest.mark.parametrize(
    ("work", "pace", "eta"),
    [
        ({}, 0.0, 0.0),
        ({"num_running": 2, "output_tokens": 100, "longest_output": 50}, 0.0, None),  # no pace is known yet
        ({"num_running": 2, "output_tokens": 100, "longest_output": 50}, 10.0, 10.0),
        ({"num_running": 2, "output_tokens": 60, "longest_output": 50}, 10.0, 10.0),  # only the longest continues
        ({"num_running": 2, "num_waiting": 6, "output_tokens": 400, "longest_output": 50}, 10.0, 40.0),
        ({"num_waiting": 1, "output_tokens": 10, "longest_output": 10, "prompt_tokens": 500}, 10.0, 6.0),
    ],
)
def test_drain_eta_uses_rate_and_longest_request(work: dict[str, int], pace: float, eta: float | None) -> None:
    nothing = dict.fromkeys(("num_running", "num_waiting", "output_tokens", "longest_output", "prompt_tokens"), 0)
    assert RemainingWork(**nothing | work).eta_seconds(pace, prompt_seconds_per_token=0.01) == eta


def test_drain_reports_remaining_work_and_only_shortens_deadline(tiny_model: Path) -> None:
    run = Run(an_engine(tiny_model))
    run.step(8)
    first = run.engine.drain(50.0)
    assert first["remaining_requests"] == first["running_requests"] + first["waiting_requests"] == 6
    assert first["remaining_prompt_tokens"] > 0
    assert 0 < first["eta_seconds"] <= first["deadline_seconds"] <= 50
    run.step(20)
    later = run.engine.drain(1000.0)
    assert later["remaining_tokens"] < first["remaining_tokens"]
    assert later["deadline_seconds"] < 50
    assert run.engine.drain(1.0)["deadline_seconds"] <= 1

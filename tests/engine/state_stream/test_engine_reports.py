"""Reports of a whole engine: keys as the cache is, loads, acknowledgements; and equal tokens with and without them."""

import random
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import engine_builders
import pytest
from trimtab_engine.core.engine import Engine
from trimtab_engine.messages.admin import PatchConfig, Sleep, WakeUp
from trimtab_engine.messages.requests import AddRequest
from trimtab_engine.messages.state_stream import CoreReport, Dispatch, PrefixCuts
from trimtab_engine.scheduling.block_manager import BlockManager
from trimtab_engine.scheduling.request import RequestStatus
from trimtab_router.protocol.messages import Load

VOCABULARY = 97
BLOCK_SIZE = 8
CUT_TOKENS = 12


@pytest.fixture
def model(model_of: Callable[..., Path]) -> Path:
    return model_of()


def make_engine(model: Path, **changes: Any) -> Engine:
    settings: dict[str, Any] = {
        "max_model_len": 128,
        "num_gpu_blocks_override": 24,
        "max_num_batched_tokens": 48,
        "max_num_batched_tokens_cap": 48,
    }
    return engine_builders.an_engine(model, **settings | changes)


def make_request(name: str, tokens: Sequence[int], max_tokens: int = 4, **fields: Any) -> AddRequest:
    """Return a request whose keys end every CUT_TOKENS tokens."""
    ends = list(range(CUT_TOKENS, len(tokens) + 1, CUT_TOKENS))
    keys = [hash((fields.get("cache_salt", ""), tuple(tokens[:end]))) & (2**64 - 1) for end in ends]
    request = engine_builders.a_new_request(name, tokens, max_tokens=max_tokens)
    request.cuts = PrefixCuts(keys, ends, 5 * len(tokens))
    for field, value in fields.items():
        setattr(request, field, value)
    return request


class Router:
    """A router's knowledge of an engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.keys: set[int] = set()
        self.load = Load()
        self.acknowledged: list[int] = []
        engine.report_state(enabled=True)

    def step(self) -> CoreReport:
        report = self.engine.step().state
        assert report is not None
        assert self.keys.isdisjoint(report.added)
        assert self.keys.issuperset(report.removed)
        self.keys.difference_update(report.removed)
        self.keys.update(report.added)
        self.load = report.load
        self.acknowledged += [dispatch.number for dispatch in report.dispatches]
        return report

    def run(self) -> None:
        while self.engine.has_work:
            self.step()
        self.step()

    @property
    def blocks(self) -> BlockManager:
        return self.engine._scheduler.blocks

    def check_claims(self, requests: Sequence[AddRequest], *, exact: bool) -> None:
        """Check that leading keys are known as far as leading blocks are cached; while steps run at most as far."""
        for message in requests:
            assert message.cuts is not None
            request = engine_builders.a_request(message.prompt_token_ids)
            request.cache_salt = message.cache_salt
            contents = self.blocks.lookup_keys(request, len(message.prompt_token_ids) // BLOCK_SIZE)
            num_cached = sum(1 for _ in takewhile(self.blocks.is_cached, contents))
            known = list(
                takewhile(lambda pair: pair[0] in self.keys, zip(message.cuts.keys, message.cuts.ends, strict=True))
            )
            claimed = known[-1][1] // BLOCK_SIZE if known else 0
            assert claimed <= num_cached
            if exact:
                ends = [end for end in message.cuts.ends if end // BLOCK_SIZE <= num_cached]
                assert claimed == (ends[-1] // BLOCK_SIZE if ends else 0)


OFFLOADING = {"kv_offload_bytes": 1 << 20, "kv_offload_bytes_cap": 1 << 20}
SWAPPING = {"swap_space_bytes": 1 << 20, "swap_space_bytes_cap": 1 << 20, "preemption_mode": "swap"}


@pytest.mark.parametrize("changes", [{}, OFFLOADING, SWAPPING], ids=["recompute", "host cache", "swap"])
@pytest.mark.parametrize("seed", range(3))
def test_keys_follow_cache_through_random_load(model: Path, seed: int, changes: dict[str, Any]) -> None:
    rng = random.Random(seed)
    router = Router(make_engine(model, **changes))
    stems = [[rng.randrange(VOCABULARY - 1) for _ in range(60)] for _ in range(3)]
    sent: list[AddRequest] = []
    for wave in range(6):
        for number in range(rng.randrange(1, 7)):
            stem = rng.choice(stems)[: rng.randrange(10, 60)]
            tokens = stem + [rng.randrange(VOCABULARY - 1) for _ in range(rng.randrange(40))]
            salt = rng.choice(["", "", "tenant"])
            sent.append(make_request(f"r{wave}-{number}", tokens, rng.randrange(1, 20), cache_salt=salt))
            router.engine.add(sent[-1])
        while router.engine.has_work:
            router.step()
            router.check_claims(sent, exact=False)
            if rng.random() < 0.02:
                router.engine.abort([rng.choice(sent).request_id])
        router.step()
        router.check_claims(sent, exact=True)
    assert router.keys


def test_tokens_are_equal_with_and_without_reports(model: Path) -> None:
    def run(*, reports: bool) -> list[list[int]]:
        engine = make_engine(model)
        engine.report_state(enabled=reports)
        rng, tokens = random.Random(5), dict[str, list[int]]()
        stem = [rng.randrange(VOCABULARY - 1) for _ in range(40)]
        for number in range(12):
            engine.add(make_request(f"r{number}", stem[: rng.randrange(8, 40)] + [number] * 20, 16))
        while engine.has_work:
            for output in engine.step().outputs:
                tokens.setdefault(output.request_id, []).extend(output.token_ids)
        return [tokens[f"r{number}"] for number in range(12)]

    assert run(reports=True) == run(reports=False)


def test_no_reports_and_no_records_without_listener(model: Path) -> None:
    engine = make_engine(model)
    engine.add(make_request("r", range(40)))
    assert engine.step().state is None
    assert not engine.state().reports_state
    router = Router(engine)
    router.run()
    assert engine.state().reports_state
    engine.report_state(enabled=False)
    engine.add(make_request("s", range(40)))
    while engine.has_work:
        assert engine.step().state is None
    assert engine._scheduler.blocks.take_changes() == []


def test_load_counts_waiting_running_and_uncomputed_tokens(model: Path) -> None:
    router = Router(make_engine(model, max_num_seqs=2, max_num_seqs_cap=2))
    for number in range(4):
        router.engine.add(make_request(f"r{number}", [number] * 60, 30))
    router.step()
    load = router.load
    assert load.running + load.waiting == 4
    assert 4 * 60 > load.prefill_tokens >= 2 * 60  # at least two wait
    assert (load.token_budget, load.slots, load.kv_total_tokens) == (48, 2, 24 * BLOCK_SIZE)
    assert load.kv_used_tokens > 0
    assert load.bytes_per_token == pytest.approx(5.0)
    while router.load.prefill_tokens:
        router.step()
    assert router.load.context_tokens > 0
    router.run()
    load = router.load
    assert (load.running, load.waiting, load.prefill_tokens, load.context_tokens, load.step_seconds) == (0, 0, 0, 0, 0)


def test_cached_tokens_of_waiting_requests_are_no_load(model: Path) -> None:
    router = Router(make_engine(model, max_num_seqs=1, max_num_seqs_cap=1))
    router.engine.add(make_request("first", range(60)))
    router.run()
    router.engine.add(make_request("running", [1] * 20, 30))
    router.engine.add(make_request("waiting", range(70)))
    for _ in range(4):
        router.step()
    assert (router.load.running, router.load.waiting) == (1, 1)
    assert router.load.prefill_tokens == 70 - 56  # seven of its blocks are cached
    router.run()
    assert router.load.prefill_tokens == 0


def test_cached_tokens_of_preempted_requests_are_no_load(model: Path) -> None:
    router = Router(make_engine(model, num_gpu_blocks_override=16))
    router.engine.add(make_request("first", [1] * 40, 60))
    router.engine.add(make_request("second", [2] * 40, 60))
    prefill = []
    while router.engine.has_work:
        report = router.step()
        waiting = [r for r in router.engine._scheduler.unfinished() if r.status is RequestStatus.PREEMPTED]
        if waiting and report.load.running == 1:
            prefill.append((report.load.prefill_tokens, waiting[0].num_tokens))
    assert prefill
    assert prefill[0][0] < prefill[0][1]  # a part of it is still in the cache


def test_prefill_share_falls_while_nothing_is_computed(model: Path) -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 0.01
        return now[0]

    router = Router(engine_builders.an_engine(model, clock, max_model_len=128, num_gpu_blocks_override=64))
    for number in range(20):
        router.engine.add(make_request(f"r{number}", [number] * 100, 1))
    router.run()
    busy = router.load.prefill_share
    assert busy > 0
    now[0] += 20.0
    router.step()
    assert router.load.prefill_share < busy / 4


def test_step_times_are_fitted_and_reported(model: Path) -> None:
    router = Router(make_engine(model))
    found = []
    for number in range(30):
        router.engine.add(make_request(f"r{number}", [number] * 60, 12))
        while router.engine.has_work:
            found.append(router.step().coefficients)
    fits = [fit for fit in found if fit is not None]
    assert fits
    assert fits[-1].samples >= 16
    assert 0 < router.load.prefill_share < 1


def test_dispatches_are_acknowledged_whether_queued_or_refused(model: Path) -> None:
    router = Router(make_engine(model))
    router.engine.add(make_request("r1", range(20), dispatch=Dispatch("router", 1)))
    router.engine.add(make_request("r2", range(20), dispatch=Dispatch("router", 2), adapter="unknown"))
    router.engine.add(make_request("r3", [1] * 500, dispatch=Dispatch("router", 3)))
    router.engine.note_dispatch(Dispatch("router", 4))
    report = router.step()
    assert [dispatch.number for dispatch in report.dispatches] == [1, 2, 3, 4]
    assert report.load.running + report.load.waiting == 1
    router.run()
    assert router.acknowledged == [1, 2, 3, 4]


def test_reset_resize_and_sleep_withdraw_keys(model: Path) -> None:
    router = Router(make_engine(model, num_gpu_blocks_override=None, gpu_memory_utilization="0.6"))
    engine = router.engine
    engine.add(make_request("r", range(60)))
    router.run()
    assert router.keys
    engine.reset_prefix_cache(reset_running_requests=False)
    router.step()
    assert router.keys == set()
    engine.add(make_request("s", range(60)))
    router.run()
    assert router.keys
    assert engine.lifecycle(Sleep(1, "abort"))[0] == 200
    router.step()
    assert router.keys == set()
    assert engine.lifecycle(WakeUp(["weights", "kv_cache", "scheduling"]))[0] == 200
    engine.add(make_request("t", range(60)))
    router.run()
    assert router.keys
    assert engine.patch_config(PatchConfig({"enable_prefix_caching": False}))[0] == 200
    router.step()
    assert router.keys == set()

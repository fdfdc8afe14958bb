"""The tuner driving a small plant to rest: it ends, stays in bounds, does not oscillate, and recovers from lies.

The plant is a paged KV cache under closed-loop clients: requests are admitted while there is a seat and room for their
prompt, grow token by token, and the newest is preempted when the last block is gone.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import deque
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trimtab_operator.tuner import (
    Bounds,
    Decision,
    EngineConfig,
    EngineLoad,
    FieldRange,
    GroupReading,
    Knob,
    Mode,
    Reason,
    Settings,
    TickResult,
    TunerState,
    Value,
    tick,
)

UTILIZATION, SEQS, TOKENS = Knob.GPU_MEMORY_UTILIZATION, Knob.MAX_NUM_SEQS, Knob.MAX_NUM_BATCHED_TOKENS
DEVICE_BYTES = 1_572_864_000  # the small CPU device of the memory formula's golden cases
FIXED_BYTES = 1_051_893_760
BYTES_PER_BLOCK = 737_280
BLOCK_SIZE = 16
TICK_SECONDS = 5.0
STEP_SECONDS = 0.1
STARTS: dict[Knob, Value] = {UTILIZATION: 0.74, SEQS: 32, TOKENS: 512}
BOUNDS = {UTILIZATION: Bounds(0.74, 0.95), SEQS: Bounds(2, 64), TOKENS: Bounds(64, 1024)}


@dataclass
class PlantRequest:
    prompt: int
    output: int
    done: int = 0  # tokens generated; kept when preempted, computed again

    @property
    def blocks(self) -> int:
        return math.ceil((self.prompt + self.done + 1) / BLOCK_SIZE)


@dataclass
class Plant:
    """One engine. `clients` requests are always in flight."""

    clients: int
    prompt: tuple[int, int] = (32, 96)
    output: tuple[int, int] = (64, 256)
    utilization_cap: float = 0.95
    kv_is_fixed: bool = False
    rng: random.Random = field(default_factory=lambda: random.Random(7))
    values: dict[Knob, Value] = field(default_factory=lambda: dict(STARTS))
    generation: int = 1
    preemptions: int = 0
    tokens: int = 0
    running: list[PlantRequest] = field(default_factory=list)
    waiting: deque[PlantRequest] = field(default_factory=deque)

    @property
    def blocks_total(self) -> int:
        requested = math.ceil(self.values[UTILIZATION] * DEVICE_BYTES)
        return max(0, requested - FIXED_BYTES) // BYTES_PER_BLOCK

    @property
    def blocks_used(self) -> int:
        return sum(request.blocks for request in self.running)

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / STEP_SECONDS)):
            self._arrive()
            self._admit()
            self._decode()

    def _arrive(self) -> None:
        while len(self.running) + len(self.waiting) < self.clients:
            self.waiting.append(PlantRequest(self.rng.randint(*self.prompt), self.rng.randint(*self.output)))

    def _admit(self) -> None:
        budget, used = self.values[TOKENS], self.blocks_used
        while self.waiting and len(self.running) < self.values[SEQS] and budget > 0:
            head = self.waiting[0]
            used += head.blocks
            if used > self.blocks_total:
                return
            budget -= head.prompt + head.done
            self.running.append(self.waiting.popleft())

    def _decode(self) -> None:
        for request in self.running:
            request.done += 1
        used = self.blocks_used
        while used > self.blocks_total:
            victim = self.running.pop()
            victim.done -= 1  # it had no room for this token
            used -= victim.blocks
            self.preemptions += 1
            self.waiting.appendleft(victim)
        self.tokens += len(self.running)
        self.running = [request for request in self.running if request.done < request.output]

    def apply(self, fields: dict[Knob, Value]) -> None:
        self.values.update(fields)
        self.generation += 1

    def restart(self) -> None:
        self.values, self.generation, self.preemptions, self.tokens = dict(STARTS), 1, 0, 0
        self.running, self.waiting = [], deque()

    def reading(self, now: float, group: str = "a") -> GroupReading:
        applied = {k: v for k, v in self.values.items() if not (self.kv_is_fixed and k is UTILIZATION)}
        fields = {
            UTILIZATION: FieldRange(not self.kv_is_fixed, 0.7, self.utilization_cap),
            SEQS: FieldRange(True, 1, min(64, self.values[TOKENS])),
            TOKENS: FieldRange(True, self.values[SEQS], 1024),
        }
        load = EngineLoad(
            at=now,
            config_generation=self.generation,
            preemptions_total=self.preemptions,
            generation_tokens_total=self.tokens,
            running=len(self.running),
            waiting=len(self.waiting),
            kv_usage=min(1.0, self.blocks_used / self.blocks_total),
            blocks_total=self.blocks_total,
            blocks_used=min(self.blocks_used, self.blocks_total),
            block_size=BLOCK_SIZE,
            bytes_per_block=BYTES_PER_BLOCK,
            device_bytes=DEVICE_BYTES,
        )
        return GroupReading(group, True, EngineConfig(self.generation, applied, fields, 1024), load)


@dataclass
class Loop:
    """Plants and tuner together, tick by tick."""

    plants: dict[str, Plant]
    wanted: Settings = field(default_factory=lambda: Settings(Mode.AUTO, BOUNDS, STARTS))
    state: TunerState = field(default_factory=TunerState)
    now: float = 1_000_000.0
    decisions: list[Decision] = field(default_factory=list)

    def tick(self, *, lie: GroupReading | None = None) -> TickResult:
        for plant in self.plants.values():
            plant.run(TICK_SECONDS)
        self.now += TICK_SECONDS
        readings = [plant.reading(self.now, name) for name, plant in self.plants.items()]
        if lie is not None:
            readings = [lie]
        result = tick(self.state, readings, self.wanted, self.now)
        self.state = result.state
        self.decisions += result.decisions
        for patch in result.patches:
            self.plants[patch.group].apply(dict(patch.fields))
        return result

    def run(self, seconds: float) -> TickResult:
        result = self.tick()
        for _ in range(round(seconds / TICK_SECONDS) - 1):
            result = self.tick()
        return result


def a_loop(clients: int, **plant: object) -> Loop:
    return Loop({"a": Plant(clients, **plant)})  # type: ignore[arg-type]


def preemptions_in(loop: Loop, seconds: float) -> int:
    before = sum(plant.preemptions for plant in loop.plants.values())
    loop.run(seconds)
    return sum(plant.preemptions for plant in loop.plants.values()) - before


def test_a_load_that_fits_at_the_bound_ends_without_preemptions_and_with_all_seats() -> None:
    loop = a_loop(clients=26)
    before = preemptions_in(loop, 10)
    loop.run(290)
    assert before > 0
    assert preemptions_in(loop, 120) == 0
    assert loop.plants["a"].values[SEQS] == 32
    assert {decision.knob for decision in loop.decisions} == {UTILIZATION}


def test_the_first_step_is_sized_by_the_waiting_requests_so_preemptions_end_within_a_few_ticks() -> None:
    loop = a_loop(clients=40)
    loop.run(30)
    assert preemptions_in(loop, 60) == 0
    assert len(loop.decisions) == 1


def test_a_load_that_needs_the_whole_device_gets_it_within_a_minute_and_a_half() -> None:
    loop = a_loop(clients=40, output=(200, 400))
    loop.run(90)
    assert loop.plants["a"].values[UTILIZATION] == 0.95


def test_without_headroom_the_sequences_are_lowered_until_preemptions_are_gone() -> None:
    loop = a_loop(clients=40, utilization_cap=0.74)
    before = preemptions_in(loop, 60)
    loop.run(240)
    assert preemptions_in(loop, 120) <= before * 0.1
    assert {decision.knob for decision in loop.decisions} == {SEQS}
    assert loop.plants["a"].values[UTILIZATION] == 0.74


def test_with_a_fixed_kv_cache_the_utilisation_is_never_touched() -> None:
    loop = a_loop(clients=40, kv_is_fixed=True)
    loop.run(300)
    assert UTILIZATION not in loop.state.applied
    assert loop.decisions[0].knob is SEQS
    assert "the size of the KV cache is fixed" in loop.decisions[0].sentence


def test_an_overload_ends_lowered_or_saturated_and_then_rests() -> None:
    loop = a_loop(clients=120)
    loop.run(600)
    made = len(loop.decisions)
    loop.run(600)
    assert len(loop.decisions) == made


def test_with_every_knob_pinned_it_says_once_that_replicas_are_needed() -> None:
    loop = a_loop(clients=60)
    pinned: dict[Knob, Bounds] = {knob: Bounds(value, value) for knob, value in STARTS.items()}
    loop.wanted = replace(loop.wanted, bounds=pinned)
    result = loop.run(600)
    assert [decision.reason for decision in loop.decisions] == [Reason.SATURATED]
    assert loop.plants["a"].values == STARTS
    assert result.tuning_active.reason == "Saturated"
    assert "add replicas" in loop.decisions[0].sentence


def test_a_calm_engine_is_left_alone() -> None:
    loop = a_loop(clients=3)
    loop.run(600)
    assert loop.decisions == []
    assert loop.state.applied == {}


def test_recommend_says_what_auto_would_do_and_changes_nothing() -> None:
    loop = a_loop(clients=40)
    loop.wanted = replace(loop.wanted, mode=Mode.RECOMMEND)
    result = loop.run(280)
    assert loop.plants["a"].values == STARTS
    assert result.recommendation is not None
    assert result.recommendation.knob is UTILIZATION
    assert len(loop.decisions) == 1  # said once, not every tick
    assert result.recommendation.sentence.startswith("Raise gpu_memory_utilization from 0.74 to ")


def test_a_restarted_engine_gets_the_applied_values_again_without_a_new_decision() -> None:
    loop = a_loop(clients=26)
    loop.run(300)
    tuned = dict(loop.plants["a"].values)
    made = len(loop.decisions)
    assert tuned != STARTS
    loop.plants["a"].restart()
    loop.tick()
    assert loop.plants["a"].values == tuned
    loop.run(60)
    assert len(loop.decisions) == made


def test_all_groups_of_a_resource_end_with_one_set_of_values() -> None:
    loop = Loop({"a": Plant(40), "b": Plant(6), "c": Plant(20, rng=random.Random(3))})
    loop.run(300)
    assert loop.plants["a"].values == loop.plants["b"].values == loop.plants["c"].values != STARTS


def test_a_lost_state_is_rebuilt_from_the_status_and_nothing_moves() -> None:
    loop = a_loop(clients=26)
    loop.run(300)
    tuned, made = dict(loop.plants["a"].values), len(loop.decisions)
    loop.state = TunerState.rebuilt({k.value: v for k, v in loop.state.applied.items()}, starts=STARTS)
    loop.run(120)
    assert loop.plants["a"].values == tuned
    assert len(loop.decisions) == made


def test_an_operator_that_restarts_between_any_two_ticks_comes_to_the_same_rest() -> None:
    steady, restarting = a_loop(clients=40, output=(200, 400)), a_loop(clients=40, output=(200, 400))
    steady.run(400)
    for _ in range(80):
        restarting.tick()
        if restarting.now % 7 < 2:
            restored = TunerState.from_json(restarting.state.to_json())
            assert restored is not None
            restarting.state = restored
    assert any(d.knob is UTILIZATION for d in restarting.decisions)
    assert restarting.plants["a"].values[UTILIZATION] == steady.plants["a"].values[UTILIZATION] == 0.95


LIES = {
    "a counter that is not a number": {"preemptions_total": math.nan},
    "a negative count": {"running": -1.0},
    "a usage above one": {"kv_usage": 7.0},
    "an endless counter": {"preemptions_total": math.inf},
    "a sample from the future": {"at": 2_000_000.0},
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_a_lie_moves_nothing_and_is_named_and_the_truth_is_acted_upon_again(lie: dict[str, float]) -> None:
    loop = a_loop(clients=40)
    loop.run(10)
    made = len(loop.decisions)
    for _ in range(10):
        honest = loop.plants["a"].reading(loop.now + TICK_SECONDS)
        assert honest.load is not None
        result = loop.tick(lie=replace(honest, load=replace(honest.load, **lie)))  # type: ignore[arg-type]
        assert result.metrics_available.reason == "MetricsInconsistent"
        assert not result.tuning_active.ok
    assert len(loop.decisions) == made
    loop.run(60)
    assert len(loop.decisions) > made


@settings(max_examples=25, deadline=None)
@given(
    clients=st.integers(1, 150),
    prompt=st.integers(1, 200),
    output=st.integers(1, 400),
    cap=st.sampled_from([0.74, 0.8, 0.9, 0.95]),
    seed=st.integers(0, 1000),
)
def test_whatever_the_load_it_stays_in_bounds_moves_one_way_and_comes_to_rest(
    clients: int, prompt: int, output: int, cap: float, seed: int
) -> None:
    plant = Plant(clients, (1, prompt), (1, output), utilization_cap=cap, rng=random.Random(seed))
    loop = Loop({"a": plant})
    seen: dict[Knob, list[float]] = {knob: [value] for knob, value in STARTS.items()}
    for _ in range(120):
        loop.tick()
        for knob, value in plant.values.items():
            low, high = BOUNDS[knob].minimum, BOUNDS[knob].maximum
            assert low is not None
            assert high is not None
            assert low <= value <= min(high, cap if knob is UTILIZATION else high)
            seen[knob].append(value)
    assert plant.values[TOKENS] >= plant.values[SEQS]
    for values in seen.values():
        moves = [math.copysign(1, b - a) for a, b in itertools.pairwise(values) if b != a]
        reversals = sum(a != b for a, b in itertools.pairwise(moves))
        assert reversals <= 1  # a rollback at most
    recent = [d for d in loop.decisions if d.at > loop.now - 120]
    assert len(recent) <= 2

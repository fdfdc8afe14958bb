"""Routers of the simulation: each follows its published rule, and Trimtab's uses the router's own code."""

from __future__ import annotations

import random

import pytest
from trimtab_operator.tuner.engine_model import EngineModel, EngineModelPolicy, Sequence, StepCost
from trimtab_operator.tuner.parameters import Parameter
from trimtab_simulator.plant.fleet import FleetSettings
from trimtab_simulator.plant.machine import Machine
from trimtab_simulator.plant.replica import Replica
from trimtab_simulator.plant.routing import Router, RouterKind, RouterSettings, router_of
from trimtab_simulator.plant.shared_blocks import SharedBlocks, shared_blocks
from trimtab_simulator.policies.fixed import Fixed
from trimtab_simulator.replay import ReplaySettings, SimulationResult, replay
from trimtab_simulator.trace.arrivals import KEY_TOKENS, Arrival, Trace

COST = StepCost(8e-3, 1 / 16_000, 3e-5, 4e-9)
KEYS = tuple(range(100, 116))
PROMPT = KEY_TOKENS * len(KEYS) + 100


def make_fleet(count: int) -> list[Replica]:
    return [
        Replica(number, EngineModel(COST, EngineModelPolicy(256, 8192), SharedBlocks(20_000)), 0.0, 0.0)
        for number in range(count)
    ]


def make_router(kind: RouterKind, **more: float) -> Router:
    return router_of(RouterSettings(kind, **more), 0)  # type: ignore[arg-type]


def send(router: Router, ready: list[Replica], at: float, keys: tuple[int, ...] = KEYS, prompt: int = PROMPT) -> str:
    request = Sequence(at, prompt, 50, keys)
    replica = router.choose(request, ready, at)
    replica.send(request, at)
    return replica.name


def load(replica: Replica, count: int, *, prompt: int = 4000, at: float = 0.0) -> None:
    for _ in range(count):
        replica.send(Sequence(at, prompt, 400), at)


INFORMED = [RouterKind.SGLANG, RouterKind.LMETRIC, RouterKind.LLM_D, RouterKind.TRIMTAB]


@pytest.mark.parametrize("kind", [*INFORMED, RouterKind.CHWBL])
def test_cached_prefix_attracts_its_requests(kind: RouterKind) -> None:
    router, ready = make_router(kind), make_fleet(4)
    home = send(router, ready, 0.0)
    assert {send(router, ready, 10.0 * number) for number in range(1, 6)} == {home}


@pytest.mark.parametrize("kind", [RouterKind.SGLANG, RouterKind.LLM_D, RouterKind.TRIMTAB])
def test_sibling_requests_follow_the_first(kind: RouterKind) -> None:
    """The prefix is not computed yet, but on its way."""
    router, ready = make_router(kind), make_fleet(4)
    keys = tuple(range(80))
    assert len({send(router, ready, 0.001 * number, keys, 80 * KEY_TOKENS + 100) for number in range(4)}) == 1


@pytest.mark.parametrize("kind", INFORMED)
def test_unrelated_requests_spread(kind: RouterKind) -> None:
    router, ready = make_router(kind), make_fleet(4)
    names = [send(router, ready, 0.001 * number, (number,), KEY_TOKENS) for number in range(4)]
    assert len(set(names)) == 4


def test_sglang_leaves_the_match_when_loads_differ() -> None:
    router, ready = make_router(RouterKind.SGLANG), make_fleet(2)
    home = send(router, ready, 0.0)
    (busy,) = (replica for replica in ready if replica.name == home)
    load(busy, 31, at=5.0)
    assert send(router, ready, 5.0) == home
    load(busy, 33, at=5.0)
    assert send(router, ready, 5.0) != home


def test_llm_d_leaves_the_match_after_18_s_of_queue() -> None:
    router, ready = make_router(RouterKind.LLM_D), make_fleet(2)
    home = send(router, ready, 0.0)
    (busy,) = (replica for replica in ready if replica.name == home)
    index = ready.index(busy)
    other = ready[1 - index]
    for count, stays in ((16, True), (4, False)):
        for _ in range(count):  # 16,000 tokens are about one second
            request = Sequence(5.0, 16_000, 10)
            router.choose(request, [busy], 5.0)
            busy.send(request, 5.0)
        assert (send(router, [busy, other], 5.0) == home) is stays


def test_lmetric_weighs_tokens_by_the_batch() -> None:
    router, ready = make_router(RouterKind.LMETRIC), make_fleet(2)
    for _ in range(8):  # many running requests, nothing to prefill
        ready[0].send(Sequence(0.0, 16, 5000), 0.0)
    ready[1].send(Sequence(0.0, 16, 5000), 0.0)
    assert {send(router, ready, 5.0 + number, (), 2000) for number in range(3)} == {"r1"}


def test_chwbl_bounds_the_load() -> None:
    router, ready = make_router(RouterKind.CHWBL), make_fleet(4)
    names = [send(router, ready, 0.0) for _ in range(40)]
    assert len(set(names)) == 4
    assert max(names.count(name) for name in set(names)) <= 1.25 * 10 + 1


def test_trimtab_keeps_sessions_when_the_cache_is_full() -> None:
    """Three caches hold 20 sessions each; a second copy of one displaces another."""
    trace = agents(sessions=60, rate=7.5, seconds=200.0, prefix=40_960)
    shares = {kind: hit_share(run(trace, kind, replicas=3)) for kind in (RouterKind.TRIMTAB, RouterKind.LEAST_REQUEST)}
    assert shares[RouterKind.TRIMTAB] > 0.9
    assert shares[RouterKind.LEAST_REQUEST] < 0.6


@pytest.mark.parametrize("kind", list(RouterKind))
def test_router_serves_every_request_and_repeats(kind: RouterKind) -> None:
    trace = agents(sessions=12, rate=3.0, seconds=60.0, prefix=8192)
    first, second = (run(trace, kind, replicas=3) for _ in range(2))
    assert sorted(s.arrival for s in first.served) == [arrival.at for arrival in trace.arrivals]
    assert [s.finished_at for s in first.served] == [s.finished_at for s in second.served]


def test_shared_cache_finds_as_much_as_any_router() -> None:
    trace = agents(sessions=40, rate=4.0, seconds=120.0, prefix=8192)
    shares = {kind: hit_share(run(trace, kind, replicas=4)) for kind in RouterKind}
    assert shares[RouterKind.SHARED_CACHE_ORACLE] > max(shares.values()) - 0.01


def test_two_routers_with_old_state_still_find_prefixes() -> None:
    trace = agents(sessions=12, rate=3.0, seconds=120.0, prefix=8192)
    fresh = run(trace, RouterKind.TRIMTAB, replicas=3)
    stale = run(trace, RouterKind.TRIMTAB, replicas=3, routers=2, state_interval=1.0)
    assert len(stale.served) == len(trace.arrivals)
    assert 0.8 * hit_share(fresh) < hit_share(stale) <= hit_share(fresh)


def agents(*, sessions: int, rate: float, seconds: float, prefix: int) -> Trace:
    """Return requests of sessions, each with its own prefix."""
    rng = random.Random(3)
    arrivals, at = [], 0.0
    while (at := at + rng.expovariate(rate)) < seconds:
        session = rng.randrange(sessions)
        keys = tuple(1000 * session + index for index in range(prefix // KEY_TOKENS))
        arrivals.append(Arrival(at, prefix + 600, 100, keys))
    return Trace("agents", arrivals, seconds)


def run(
    trace: Trace, kind: RouterKind, *, replicas: int, routers: int = 1, state_interval: float = 0.0
) -> SimulationResult:
    parameters = {
        Parameter.MAX_NUM_SEQS: 512,
        Parameter.MAX_NUM_BATCHED_TOKENS: 8192,
        Parameter.WATERMARK: 0.0,
        Parameter.GPU_MEMORY_UTILIZATION: 0.9,
    }
    machine = Machine("m", "g", COST, 1_000_000)
    settings = FleetSettings(machine, parameters, replicas, 1, 8, 60.0, make_blocks=shared_blocks)
    routing = RouterSettings(kind, routers, state_interval)
    return replay(trace, Fixed("static"), settings, ReplaySettings(routing, timeline_interval_seconds=float("inf")))


def hit_share(outcome: SimulationResult) -> float:
    return outcome.cached_tokens / outcome.prompt_tokens

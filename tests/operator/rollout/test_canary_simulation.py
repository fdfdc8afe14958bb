"""Simulated canaries: an equal engine with an empty prefix cache is never worse, and a slower one is found.

Each replica serves steps of at most BUDGET tokens. Sessions send their whole history as prompt at each turn, to a
random replica or always to the same one; a replica has cached the part of a session that it served before.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from dataclasses import dataclass, field

import pytest
from trimtab_operator.rollout.canary_comparison import CanaryComparison, find_regression
from trimtab_operator.tuner.samples import Finished

BUDGET = 2048
STEP_SECONDS, TOKEN_SECONDS, SEQUENCE_SECONDS = 0.01, 1e-4, 2e-4  # 10,000 prompt tokens a second
WARM_UP_SECONDS, BAKE_SECONDS = 240.0, 300.0
RUNS = [*range(2), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 30))]


@dataclass(frozen=True)
class Load:
    """Sessions of conversations: tokens of the first prompt, of each further message, and of the answers."""

    sessions: int
    first: int
    message: int
    answer: int
    turns: int
    think_seconds: float
    is_sticky: bool = False


LOADS = {
    "agents": Load(28, 3000, 1500, 120, 20, 12.0),
    "sticky agents": Load(28, 3000, 1500, 120, 20, 12.0, is_sticky=True),
    "short chats": Load(60, 150, 60, 100, 8, 6.0),
    "sticky chats": Load(60, 400, 200, 150, 12, 6.0, is_sticky=True),
}


@dataclass
class Session:
    history: int
    turn: int = 0
    home: int = 0


@dataclass
class Request:
    session: Session
    arrived_at: float
    prompt: int
    cached: int
    left: int
    answer: int
    output: int = 0
    first_at: float | None = None


@dataclass
class Engine:
    """One replica in virtual time."""

    slowness: float = 1.0
    now: float = 0.0
    cache: dict[int, int] = field(default_factory=dict)
    waiting: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)

    def send(self, request: Request) -> None:
        request.cached = min(self.cache.get(id(request.session), 0), request.prompt - 1)
        request.left = request.prompt - request.cached
        self.waiting.append(request)

    def step(self) -> list[Request]:
        """Run one step. Return the requests that finished."""
        budget, prefill = BUDGET - len(self.running), 0
        begun = []
        while self.waiting and budget > 0:
            request = self.waiting[0]
            count = min(budget, request.left)
            request.left, budget, prefill = request.left - count, budget - count, prefill + count
            if request.left:
                break
            begun.append(self.waiting.popleft())
        seconds = STEP_SECONDS + TOKEN_SECONDS * prefill + SEQUENCE_SECONDS * len(self.running)
        self.now += seconds * self.slowness
        for request in begun:
            request.first_at = self.now
        ended = []
        for request in (*self.running, *begun):
            request.output += 1
            if request.output >= request.answer:
                ended.append(request)
        self.running = [request for request in (*self.running, *begun) if request.output < request.answer]
        for request in ended:
            assert request.first_at is not None
            self.cache[id(request.session)] = request.prompt + request.output
            ttft, decode = request.first_at - request.arrived_at, self.now - request.first_at
            row = Finished(
                request.arrived_at, self.now, request.prompt, request.output, ttft, decode, cached_tokens=request.cached
            )
            self.finished.append(row)
        return ended


def simulate(load: Load, seed: int, *, slowness: float = 1.0, is_warm: bool = False) -> CanaryComparison:
    """Return the comparison after a fourth replica was replaced by an equal or slower one."""
    chance = random.Random(seed)
    engines = [Engine() for _ in range(4)]
    arrivals: list[tuple[float, int, Session]] = []

    def begin(at: float) -> None:
        session = Session(chance.randrange(load.first // 2, 2 * load.first), home=chance.randrange(4))
        heapq.heappush(arrivals, (at, chance.randrange(1 << 30), session))

    for _ in range(load.sessions):
        begin(chance.uniform(0.0, load.think_seconds))
    has_changed = False
    while True:
        busy = [engine for engine in engines if engine.waiting or engine.running]
        engine = min(busy, key=lambda one: one.now, default=None)
        at = arrivals[0][0] if arrivals else float("inf")
        now = at if engine is None else min(at, engine.now)
        if now > WARM_UP_SECONDS and not has_changed:
            cache = dict(engines[3].cache) if is_warm else {}
            engines[3] = Engine(slowness, now, cache, engines[3].waiting, engines[3].running)
            for one in engines:
                one.finished.clear()
            has_changed = True
            continue
        if now > WARM_UP_SECONDS + BAKE_SECONDS:
            break
        if engine is None or at <= engine.now:
            _, _, session = heapq.heappop(arrivals)
            target = engines[session.home if load.is_sticky else chance.randrange(4)]
            target.now = max(target.now, at) if not (target.waiting or target.running) else target.now
            answer = chance.randrange(load.answer // 2, 2 * load.answer)
            target.send(Request(session, at, session.history, 0, 0, answer))
            continue
        for request in engine.step():
            session = request.session
            session.turn += 1
            session.history = request.prompt + request.output + chance.randrange(load.message // 2, 2 * load.message)
            think = chance.expovariate(1 / load.think_seconds)
            if session.turn < load.turns:
                heapq.heappush(arrivals, (engine.now + think, chance.randrange(1 << 30), session))
            else:
                begin(engine.now + think)
    old = {f"m-g{n}": tuple(engines[n].finished) for n in range(3)}
    return CanaryComparison("c", {"m-g3": tuple(engines[3].finished)}, old)


@pytest.mark.parametrize("seed", RUNS)
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("is_warm", [False, True], ids=["cold", "warm"])
def test_equal_engine_is_no_regression(load: str, seed: int, is_warm: bool) -> None:
    assert find_regression(simulate(LOADS[load], seed, is_warm=is_warm), is_same_model=True) is None


@pytest.mark.parametrize("load", LOADS)
def test_slow_engine_is_found(load: str) -> None:
    said = find_regression(simulate(LOADS[load], 1, slowness=3.0), is_same_model=True)
    assert said is not None
    assert "other replicas" in said

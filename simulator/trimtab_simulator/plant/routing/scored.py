"""Trimtab's router in the simulation: `trimtab_router.scoring` on reports of the simulated engines."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from trimtab_operator.tuner.engine_model import Sequence as Request
from trimtab_router.scoring.prefix_index import PrefixIndex
from trimtab_router.scoring.score import choose
from trimtab_router.scoring.state import Choice, ReplicaState, RoutedRequest, StepTime

from trimtab_simulator.plant.replica import Replica
from trimtab_simulator.plant.routing.knowledge import Knowledge, apply_change
from trimtab_simulator.plant.routing.router import RouterSettings
from trimtab_simulator.trace.arrivals import KEY_TOKENS

EXPECTED_SECONDS = 5.0
"""How long after its predicted first token a prompt's prefix is expected to become cached."""
PREFILL_SHARE_SECONDS = 10.0
"""Time constant of the mean share of step time spent on prefill."""
FORGET_INTERVAL = 1024


class Scored:
    """One or several routers that know the replicas' reports and their own requests since."""

    def __init__(self, settings: RouterSettings, seed: int) -> None:
        self._settings = settings
        self._rng = random.Random(f"router-{seed}")
        self._known = Knowledge()
        self._reports: dict[int, ReplicaState] = {}
        self._shares: dict[int, _PrefillShare] = {}
        self._next_report = 0.0
        self._heads = [_Head() for _ in range(settings.count)]
        self._num_sent = 0

    def choose(self, request: Request, ready: Sequence[Replica], now: float) -> Replica:
        """Return the replica with the least score."""
        self._report(ready, now)
        head = self._heads[int(self._rng.random() * len(self._heads))]
        routed = RoutedRequest(request.num_prompt, request.keys, float(KEY_TOKENS))
        states = [head.states[replica.number] for replica in ready]
        choice = choose(routed, states, head.index, now, self._rng, itl_target=self._settings.itl_target)
        assert choice is not None
        (replica,) = (each for each in ready if each.name == choice.best.replica)
        head.record(routed, replica, choice, now)
        self._known.record(request, replica)
        self._num_sent += 1
        if self._num_sent % FORGET_INTERVAL == 0:
            self._known.forget_started()
        return replica

    def _report(self, ready: Sequence[Replica], now: float) -> None:
        interval = self._settings.state_interval
        if not interval:
            self._report_at(ready, now)
            return
        while self._next_report <= now:
            self._report_at(ready, self._next_report)
            self._next_report += interval
        for replica in ready:
            if any(replica.number not in head.states for head in self._heads):  # ready since the last report
                self._report_at(ready, now)
                return

    def _report_at(self, ready: Sequence[Replica], at: float) -> None:
        """Deliver the state of all replicas at that time to all routers."""
        gone = self._known.update(ready, at)
        for head in self._heads:
            for number in gone:
                head.index.clear(number)
                head.states.pop(number, None)
            for number, change in self._known.changes:
                apply_change(head.index, number, change)
        for replica in ready:
            state = self._state(replica, at)
            for head in self._heads:
                head.states[replica.number] = replace(state)

    def _state(self, replica: Replica, at: float) -> ReplicaState:
        engine = replica.engine
        size = engine.blocks.block_size
        cost = engine.cost
        share = self._shares.setdefault(replica.number, _PrefillShare(at))
        return ReplicaState(
            replica.name,
            replica.number,
            reported_at=at,
            running=engine.num_running,
            waiting=engine.num_waiting,
            prefill_tokens=self._known.prefill_tokens(replica),
            context_tokens=engine.context_tokens,
            kv_used_tokens=(engine.blocks.total - engine.blocks.free) * size,
            kv_total_tokens=engine.blocks.total * size,
            token_budget=engine.policy.max_num_batched_tokens,
            slots=engine.policy.max_num_seqs,
            step_time=StepTime(cost.per_step, cost.per_token, cost.per_sequence, cost.per_context),
            prefill_share=share.update(replica, at),
            step_ends_at=engine.now if engine.now > at else None,
        )


@dataclass(slots=True)
class _Head:
    """One router: its index, and the reports plus its own requests since."""

    index: PrefixIndex = field(default_factory=PrefixIndex)
    states: dict[int, ReplicaState] = field(default_factory=dict)

    def record(self, request: RoutedRequest, replica: Replica, choice: Choice, now: float) -> None:
        """Record a request of this router until a report includes it."""
        state = self.states[replica.number]
        uncached = request.prompt_tokens - choice.best.cached_tokens
        state.pending_requests += 1
        state.pending_prefill_tokens += uncached
        state.pending_context_tokens += uncached
        self.index.expect(replica.number, request.keys, now + choice.best.predicted_ttft + EXPECTED_SECONDS)


@dataclass(slots=True)
class _PrefillShare:
    """Mean share of time that a replica spends on prefill, with exponentially falling weights."""

    at: float
    seconds: float = 0.0
    value: float = 0.0

    def update(self, replica: Replica, at: float) -> float:
        """Return the share at that time."""
        sums = replica.engine.counters.sums
        cost = replica.engine.cost
        mixed = sums["mixed"]
        seconds = sums["prefill"].seconds + mixed.steps * cost.per_step + mixed.tokens * cost.per_token
        elapsed = at - self.at
        if elapsed > 0:
            weight = 1 - math.exp(-elapsed / PREFILL_SHARE_SECONDS)
            self.value += weight * (min(1.0, (seconds - self.seconds) / elapsed) - self.value)
            self.at, self.seconds = at, seconds
        return self.value

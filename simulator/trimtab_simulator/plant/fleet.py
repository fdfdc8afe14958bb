"""All replicas of one deployment: they start, serve, drain and are removed, and are PATCHed alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from trimtab_operator.tuner.engine_model import (
    Allowance,
    Blocks,
    EngineModel,
    EngineModelPolicy,
    Gaps,
    KvBlocks,
    Sequence,
)
from trimtab_operator.tuner.engine_model.engine import VICTIM_CANDIDATES
from trimtab_operator.tuner.parameters import Parameter, Value, Values, is_same, typed
from trimtab_operator.tuner.samples import Phase, ReplicaSnapshot

from trimtab_simulator.plant.machine import Machine
from trimtab_simulator.plant.replica import Replica
from trimtab_simulator.plant.routing import Router
from trimtab_simulator.plant.snapshots import GAP_EDGES, Observer, ranges

MakeBlocks = Callable[[int, int], Blocks]
"""(blocks, block size) → a KV cache."""


def plain_blocks(num_blocks: int, block_size: int) -> Blocks:
    """Return a KV cache for requests without shared prefixes."""
    return KvBlocks(num_blocks, block_size)


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """Configuration of a fleet."""

    machine: Machine
    parameters: Values
    start_replicas: int
    min_replicas: int
    max_replicas: int
    cold_start_seconds: float
    slow_gap: float = math.inf
    make_blocks: MakeBlocks = plain_blocks
    allowance: Allowance | None = None
    """Allowance that engines order their queues by from the start; None for order of arrival."""
    victim_candidates: int = VICTIM_CANDIDATES
    """Running sequences among which engines choose the one to preempt."""


class Fleet:
    """Replicas in virtual time. Arrivals and ticks must come in order; `now` in arguments is that time."""

    def __init__(self, settings: FleetSettings, router: Router) -> None:
        self.settings = settings
        self.parameters: dict[Parameter, Value] = dict(settings.parameters)
        self.allowance = settings.allowance
        self.generation = 1
        self.desired = settings.start_replicas
        self.all: list[Replica] = []
        """Every replica so far, including removed ones."""
        self.ready: list[Replica] = []
        self.most = 0
        """Maximum number of billed replicas."""
        self._router = router
        self._held: list[Sequence] = []  # while no replica is ready
        self._observers: dict[str, Observer] = {}
        for _ in range(settings.start_replicas):
            self._request_replica(0.0, 0.0)
        self.next_ready = 0.0
        self.become_ready(0.0)

    # --- requests -------------------------------------------------------------------------------------------------

    def send(self, sequence: Sequence, now: float) -> None:
        """Route one request that has just arrived; hold it while no replica is ready."""
        if not self.ready:
            self._held.append(sequence)
            return
        self._router.choose(sequence, self.ready, now).send(sequence, now)

    # --- replicas -------------------------------------------------------------------------------------------------

    @property
    def billed(self) -> list[Replica]:
        """Replicas that are paid for."""
        return [replica for replica in self.all if not replica.is_gone]

    def become_ready(self, now: float) -> None:
        """Make replicas ready whose cold start is over, and set `next_ready` to the time of the next one."""
        due = [r for r in self.all if r.phase is Phase.STARTING and not r.is_gone and r.ready_at <= now]
        for replica in due:
            replica.enter(Phase.READY, replica.ready_at)
            replica.engine.run_until(now)
            self.ready.append(replica)
        starting = (r.ready_at for r in self.all if r.phase is Phase.STARTING and not r.is_gone)
        self.next_ready = min(starting, default=math.inf)
        if due and self._held:
            held, self._held = self._held, []
            for sequence in held:
                self.send(sequence, now)

    def scale(self, target: int, now: float) -> None:
        """Set the target to `target` replicas, not counting draining ones. Starting replicas are removed first."""
        target = max(self.settings.min_replicas, min(self.settings.max_replicas, target))
        self.desired = target
        starting = [r for r in self.all if r.phase is Phase.STARTING and not r.is_gone]
        serving = len(self.ready) + len(starting)
        for _ in range(target - serving):
            self._request_replica(now, now + self.settings.cold_start_seconds)
        for replica in sorted(starting, key=lambda r: -r.ready_at)[: max(0, serving - target)]:
            replica.gone_at = now
        for _ in range(len(self.ready) - target):
            self._drain_one(now)
        self.become_ready(now)
        self.most = max(self.most, len(self.billed))

    def _request_replica(self, now: float, ready_at: float) -> None:
        settings = self.settings
        machine = settings.machine
        engine = EngineModel(
            machine.cost,
            self._policy(),
            settings.make_blocks(self._num_blocks(), machine.block_size),
            now=ready_at,
            slow_gap=settings.slow_gap,
            gaps=Gaps(GAP_EDGES),
            records_first_tokens=True,
        )
        replica = Replica(len(self.all), engine, now, ready_at)
        self.all.append(replica)
        self._observers[replica.name] = Observer()
        self.most = max(self.most, len(self.billed))

    def _drain_one(self, now: float) -> None:
        """Drain the replica with the fewest remaining requests."""
        victim = min(self.ready, key=lambda r: (r.refresh(now), -r.requested_at))
        self.ready.remove(victim)
        victim.enter(Phase.DRAINING, now)
        self._remove_if_drained(victim)

    def remove_drained(self, now: float) -> None:
        """Remove replicas that have drained by now."""
        for replica in self.all:
            if replica.phase is Phase.DRAINING and not replica.is_gone:
                replica.engine.run_until(now)
                self._remove_if_drained(replica)

    def _remove_if_drained(self, replica: Replica) -> None:
        if replica.engine.is_idle:
            finished = replica.engine.finished
            last = finished[-1].finished_at if finished else None
            replica.gone_at = max(replica.since, last or 0.0)

    # --- parameters ---------------------------------------------------------------------------------------------------

    def patch(self, values: Mapping[Parameter, Value], now: float) -> dict[Parameter, tuple[Value, Value]]:
        """Set parameters of all replicas from their next step on, within the engine's limits; return the changes, from
        and to.

        The engine rejects a budget below the sequence slots, so the slots are lowered with it.
        """
        allowed = ranges(self.settings.machine)
        before = dict(self.parameters)
        for parameter, value in values.items():
            self.parameters[parameter] = typed(
                parameter, min(max(value, allowed[parameter].minimum), allowed[parameter].maximum)
            )
        budget = self.parameters[Parameter.MAX_NUM_BATCHED_TOKENS]
        self.parameters[Parameter.MAX_NUM_SEQS] = min(self.parameters[Parameter.MAX_NUM_SEQS], budget)
        changed = {k: (before[k], v) for k, v in self.parameters.items() if not is_same(before[k], v)}
        if not changed:
            return {}
        self._apply(now)
        return changed

    def order_queues(self, allowance: Allowance | None, now: float) -> None:
        """Set the queue order of all engines from their next step on."""
        if allowance != self.allowance:
            self.allowance = allowance
            self._apply(now)

    def _apply(self, now: float) -> None:
        """Apply the requested values to all engines."""
        self.generation += 1
        policy, num_blocks = self._policy(), self._num_blocks()
        for replica in self.billed:
            if replica.phase is not Phase.STARTING:
                replica.engine.run_until(now)
            replica.engine.set_policy(policy)
            if num_blocks != replica.engine.blocks.total:
                replica.engine.resize(num_blocks)
            replica.quiet_until = -math.inf

    def _policy(self) -> EngineModelPolicy:
        return EngineModelPolicy(
            int(self.parameters[Parameter.MAX_NUM_SEQS]),
            int(self.parameters[Parameter.MAX_NUM_BATCHED_TOKENS]),
            float(self.parameters[Parameter.WATERMARK]),
            self.allowance,
            self.settings.victim_candidates,
        )

    def _num_blocks(self) -> int:
        return self.settings.machine.blocks_at(float(self.parameters[Parameter.GPU_MEMORY_UTILIZATION]))

    # --- snapshots --------------------------------------------------------------------------------------------------

    def snapshot(self, now: float, *, with_requests: bool) -> tuple[ReplicaSnapshot, ...]:
        """Return a snapshot of every replica that is not removed."""
        machine = self.settings.machine
        values = dict(self.parameters)
        snapshots = []
        for replica in self.billed:
            if replica.phase is not Phase.STARTING:
                replica.engine.run_until(now)
            observer = self._observers[replica.name]
            snapshots.append(
                observer.snapshot(replica, machine, now, values, self.generation, with_requests=with_requests)
            )
        return tuple(snapshots)

    # --- the end --------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Serve all remaining requests."""
        if self._held and self.next_ready < math.inf:
            self.become_ready(self.next_ready)
        for replica in self.billed:
            replica.engine.drain()

    def finished(self) -> list[Sequence]:
        """Return all finished requests."""
        return [sequence for replica in self.all for sequence in replica.engine.finished]

    def gpu_seconds(self, until: float) -> float:
        """Return the GPU-seconds paid by `until`, including starts and drains."""
        return sum(replica.paid_seconds(until) for replica in self.all) * self.settings.machine.num_gpus

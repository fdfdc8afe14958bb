"""Snapshots of simulated replicas: the values that an operator parses from an engine's metrics and admin API."""

from __future__ import annotations

import math
from bisect import bisect_left

from trimtab_operator.tuner.engine_model import Sequence, StepSums
from trimtab_operator.tuner.engine_model.gaps import fine_edges
from trimtab_operator.tuner.parameters import FieldRange, Parameter, Values
from trimtab_operator.tuner.samples import (
    Config,
    Counters,
    Finished,
    Gauges,
    Histogram,
    Ledger,
    Phase,
    ReplicaSnapshot,
    RequestUpdates,
    Sample,
    Unfinished,
    Work,
)

from trimtab_simulator.plant.machine import Machine
from trimtab_simulator.plant.replica import Replica

TTFT_EDGES = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0, math.inf,
)  # fmt: skip
ITL_EDGES = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, math.inf,
)  # fmt: skip
GAP_EDGES = fine_edges(ITL_EDGES[:-1])
MAX_WATERMARK = 0.9  # the engine's bound


class Observer:
    """Takes snapshots of one replica; finished requests are reported once."""

    def __init__(self) -> None:
        self._num_finished = 0
        self._num_first = 0
        self._ttft = [0] * len(TTFT_EDGES)
        self._ttft_total = 0.0
        self._mean_itl = [0] * len(ITL_EDGES)
        self._mean_itl_total = 0.0

    def snapshot(
        self, replica: Replica, machine: Machine, at: float, values: Values, generation: int, *, with_requests: bool
    ) -> ReplicaSnapshot:
        """Return the replica's snapshot at `at`, up to which its engine has run. `values` are its parameters."""
        if replica.phase is not Phase.READY and replica.phase is not Phase.DRAINING:
            return ReplicaSnapshot(replica.name, replica.phase, replica.name, replica.since, problem="not ready")
        engine = replica.engine
        updates = engine.finished[self._num_finished :]
        self._num_finished = len(engine.finished)
        self._count(engine.first_tokens[self._num_first :], updates)
        self._num_first = len(engine.first_tokens)
        sample = Sample(
            at=at,
            counters=_counters(replica),
            gauges=_gauges(replica, at, generation),
            ttft=_histogram(TTFT_EDGES, self._ttft, self._ttft_total),
            itl=_gap_histogram(replica),
            mean_itl=_histogram(ITL_EDGES, self._mean_itl, self._mean_itl_total),
            requests=_requests(replica, updates) if with_requests else None,
        )
        config = Config(generation, values, ranges(machine), max_model_len=machine.max_model_len)
        ledger = Ledger(
            device_bytes=machine.device_bytes,
            blocks_total=engine.blocks.total,
            block_size=machine.block_size,
            bytes_per_block=machine.bytes_per_token * machine.block_size,
            free_bytes=math.floor((1 - values[Parameter.GPU_MEMORY_UTILIZATION]) * machine.device_bytes),
            blocks_cap=machine.blocks_at(machine.cap_utilization),
        )
        return ReplicaSnapshot(replica.name, replica.phase, replica.name, replica.since, sample, config, ledger)

    def _count(self, first_tokens: list[Sequence], finished: list[Sequence]) -> None:
        for sequence in first_tokens:
            seconds = sequence.ttft or 0.0
            self._ttft[bisect_left(TTFT_EDGES, seconds)] += 1
            self._ttft_total += seconds
        for sequence in finished:
            gap = sequence.mean_gap
            if gap is not None:
                self._mean_itl[bisect_left(ITL_EDGES, gap)] += 1
                self._mean_itl_total += gap


def ranges(machine: Machine) -> dict[Parameter, FieldRange]:
    """Return the ranges that the engine reports."""
    return {
        Parameter.MAX_NUM_SEQS: FieldRange(True, 1, machine.max_num_seqs_cap),
        Parameter.MAX_NUM_BATCHED_TOKENS: FieldRange(True, 1, machine.max_num_batched_tokens_cap),
        Parameter.WATERMARK: FieldRange(True, 0.0, MAX_WATERMARK),
        Parameter.GPU_MEMORY_UTILIZATION: FieldRange(True, machine.least_utilization, machine.cap_utilization),
    }


def _counters(replica: Replica) -> Counters:
    counters = replica.engine.counters
    return Counters(
        generated_tokens=counters.generated_tokens,
        prompt_tokens=counters.prompt_tokens,
        finished=counters.finished,
        preemptions=dict(counters.preempted),
        arrived=counters.arrived,
        arrived_prompt_tokens=counters.arrived_prompt_tokens,
        cached_prompt_tokens=counters.cached_prompt_tokens,
        recomputed_tokens=counters.recomputed_tokens,
        blocked_seconds=dict(counters.blocked_seconds),
        decode=_work(counters.sums["decode"]),
        prefill=_work(counters.sums["prefill"]).plus(_work(counters.sums["mixed"])),
    )


def _work(sums: StepSums) -> Work:
    return Work(sums.steps, sums.tokens, sums.sequences, sums.context, sums.attended, sums.seconds)


def _gauges(replica: Replica, at: float, generation: int) -> Gauges:
    engine = replica.engine
    oldest = engine.oldest_arrival
    return Gauges(
        running=engine.num_running,
        waiting=engine.num_waiting,
        kv_usage=1 - engine.blocks.free / engine.blocks.total,
        config_generation=generation,
        waiting_tokens=engine.waiting_tokens,
        oldest_waiting_seconds=None if oldest is None else max(0.0, at - oldest),
    )


def _requests(replica: Replica, updates: list[Sequence]) -> RequestUpdates:
    return RequestUpdates(
        finished=tuple(_finished(sequence) for sequence in updates),
        unfinished=tuple(
            Unfinished(sequence.arrival, sequence.num_prompt, num_out, sequence.num_cached)
            for sequence, num_out in replica.engine.unfinished()
        ),
    )


def _finished(sequence: Sequence) -> Finished:
    assert sequence.finished_at is not None
    assert sequence.first_token_at is not None
    return Finished(
        arrived_at=sequence.arrival,
        finished_at=sequence.finished_at,
        prompt_tokens=sequence.num_prompt,
        output_tokens=sequence.num_output,
        ttft_seconds=sequence.first_token_at - sequence.arrival,
        decode_seconds=sequence.finished_at - sequence.first_token_at,
        cached_tokens=sequence.num_cached,
        preemptions=sequence.num_preemptions,
        reason="length",
    )


def _histogram(edges: tuple[float, ...], counts: list[int], total: float) -> Histogram:
    seen, cumulated = 0, []
    for count in counts:
        seen += count
        cumulated.append(float(seen))
    return Histogram(edges, tuple(cumulated), total)


_POSITIONS = [*(GAP_EDGES.index(edge) for edge in ITL_EDGES[:-1]), len(GAP_EDGES)]


def _gap_histogram(replica: Replica) -> Histogram | None:
    """Return the fine counts, summed up to each of the engine's edges."""
    gaps = replica.engine.gaps
    if gaps is None:
        return None
    start, counts = 0, []
    for position in _POSITIONS:
        counts.append(sum(gaps.counts[start : position + 1]))
        start = position + 1
    return _histogram(ITL_EDGES, counts, gaps.total_seconds)

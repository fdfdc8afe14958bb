"""llm-d's Workload Variant Autoscaler (WVA) with the token-based saturation analyzer V2, and the HPA that follows it.

Source: internal/engines/analyzers/saturation_v2/analyzer.go and internal/config/saturation_scaling.go of
llm-d-workload-variant-autoscaler, guides/workload-autoscaling/optimized-baseline-autoscaling/hpa.yaml of llm-d. Every
30 s, with the highest KV usage and queue of the last minute:

    demand   = KV tokens in use + waiting requests x (input + output), summed over replicas
    capacity = median over replicas of min(0.8 KV tokens, k2)
    k2       = tokens in use while at least 5 requests wait (then its mean of 10 by length of outputs, while fewer do);
               before that N (input + output / 2) with N = min(budget x output / (input + output), sequence slots)
    up to the replicas that demand / 0.85 needs, including pending ones; down by whole replicas of
    supply - demand / 0.70
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from statistics import fmean, median

from trimtab_operator.tuner.parameters import Parameter
from trimtab_operator.tuner.samples import ReplicaSnapshot

from trimtab_simulator.policies.hpa import Behavior, Hpa, total
from trimtab_simulator.policies.policy import PolicyInput, PolicySetup
from trimtab_simulator.policies.signals import Increases, Sliding, lengths, num_pods

INTERVAL_SECONDS, PEAK_SECONDS, LENGTHS_SECONDS = 30.0, 60.0, 300.0
KV_THRESHOLD, QUEUE_THRESHOLD = 0.80, 5
UP, DOWN = 0.85, 0.70
REMEMBERED = 10
SHORT_OUTPUT, MEDIUM_OUTPUT = 100, 500
BEHAVIOR = Behavior(up_window=120, up_pods=0, down_window=120)


class _Analyzer:
    def __init__(self) -> None:
        self._usage: dict[str, Sliding] = defaultdict(lambda: Sliding(PEAK_SECONDS))
        self._queue: dict[str, Sliding] = defaultdict(lambda: Sliding(PEAK_SECONDS))
        self._lengths = Increases(LENGTHS_SECONDS, lengths)
        self._observed: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=REMEMBERED))
        self._decided: tuple[float, int] = (-math.inf, 0)

    def desired(self, view: PolicyInput) -> float:
        """Return wva_desired_replicas."""
        self._lengths.add(view)
        for snapshot in view.ready:
            assert snapshot.sample is not None
            self._usage[snapshot.replica].add(view.now, snapshot.sample.gauges.kv_usage)
            self._queue[snapshot.replica].add(view.now, snapshot.sample.gauges.waiting)
        if view.now - self._decided[0] >= INTERVAL_SECONDS:
            self._decided = (view.now, self._analyze(view))
        return self._decided[1]

    def _analyze(self, view: PolicyInput) -> int:
        requests, prompts, finished, outputs = self._lengths.totals
        pods = num_pods(view)
        if not requests or not finished:
            return pods  # no lengths, hence no capacity
        mean_in, mean_out = prompts / requests, outputs / finished
        demand, capacities = 0.0, []
        for snapshot in view.ready:
            in_use, queue = self._used_tokens(snapshot), self._queue[snapshot.replica].highest
            demand += in_use + queue * (mean_in + mean_out)
            capacities.append(self._capacity(snapshot, in_use, queue, mean_in, mean_out, view))
        per_replica = median(capacities)
        missing = demand / UP - pods * per_replica
        if missing > 0:
            return pods + math.ceil(missing / per_replica)
        spare = len(view.ready) * per_replica - demand / DOWN
        return max(1, pods - max(0, math.floor(spare / per_replica)))

    def _used_tokens(self, snapshot: ReplicaSnapshot) -> float:
        assert snapshot.ledger is not None
        return self._usage[snapshot.replica].highest * snapshot.ledger.blocks_total * snapshot.ledger.block_size

    def _capacity(
        self, snapshot: ReplicaSnapshot, in_use: float, queue: float, mean_in: float, mean_out: float, view: PolicyInput
    ) -> float:
        assert snapshot.ledger is not None
        by_memory = KV_THRESHOLD * snapshot.ledger.blocks_total * snapshot.ledger.block_size
        observed = self._observed[(mean_out >= SHORT_OUTPUT) + (mean_out >= MEDIUM_OUTPUT)]
        if queue >= QUEUE_THRESHOLD and in_use:
            observed.append(in_use)
            return min(by_memory, in_use)
        if observed:
            return min(by_memory, fmean(observed))
        budget, slots = view.parameters[Parameter.MAX_NUM_BATCHED_TOKENS], view.parameters[Parameter.MAX_NUM_SEQS]
        return min(by_memory, min(budget * mean_out / (mean_in + mean_out), slots) * (mean_in + mean_out / 2))


def wva(setup: PolicySetup) -> Hpa:
    """Return the autoscaler; its thresholds need no objectives."""
    return Hpa("wva", total(_Analyzer().desired, 1.0), behavior=BEHAVIOR)

"""NVIDIA Dynamo's planner with target `sla` for aggregated engines: load scaling, throughput scaling, or both.

Source: components/src/dynamo/planner/core/{load_scaling,throughput_scaling,perf_model/agg}.py of ai-dynamo/dynamo,
defaults of planner/config/defaults.py. Its performance model is seeded by a profile of the engine; here it has the true
step times, which favours it.

load, every 5 s       +1 if every engine's estimated TTFT, or every ITL, exceeds its target; -1 if for every engine, at
                      queue and KV x n / (n - 1), the queue's part of TTFT is below 80 % of what the target leaves, ITL
                      below 80 % of it, and the KV cache suffices. Nothing while replicas start.
throughput, 180 s     ceil(requests/s / an engine's most at both targets), for the last interval's requests and mean
                      lengths (predictor `constant`); with load scaling it is the fewest replicas
"""

from __future__ import annotations

import math

from trimtab_operator.tuner.parameters import Parameter
from trimtab_operator.tuner.samples import ReplicaSnapshot, Sample

from trimtab_simulator.policies.policy import STAY, PolicyActions, PolicyInput, PolicySetup
from trimtab_simulator.policies.signals import Increases, lengths, num_pods

LOAD_SECONDS, THROUGHPUT_SECONDS = 5.0, 180.0
LENGTHS_SECONDS = 320.0  # of the newest 64 observations, one per load interval
SENSITIVITY = 0.8


class Dynamo:
    """The planner with the loops that are enabled."""

    def __init__(self, name: str, setup: PolicySetup, *, load: bool, throughput: bool) -> None:
        self.name = name
        self.tick_seconds = LOAD_SECONDS
        self.reads_requests = False
        self._model = _Model(setup)
        self._load, self._throughput = load, throughput
        self._recent = Increases(LENGTHS_SECONDS, _work)
        self._interval = Increases(THROUGHPUT_SECONDS, _work)
        self._next_throughput = THROUGHPUT_SECONDS
        self._fewest = 1

    def decide(self, view: PolicyInput) -> PolicyActions:
        """Run one tick."""
        self._recent.add(view)
        self._interval.add(view)
        is_due = self._throughput and view.now >= self._next_throughput
        if is_due:
            self._next_throughput += THROUGHPUT_SECONDS
            if self._model.observe(self._interval.totals, view):
                self._fewest = math.ceil(self._interval.totals[0] / THROUGHPUT_SECONDS / self._model.most_requests())
        if not self._load:
            return PolicyActions(replicas=self._fewest) if is_due else STAY
        pods = num_pods(view)
        if len(view.ready) != pods or not self._model.observe(self._recent.totals, view):
            return STAY
        return PolicyActions(replicas=max(1, self._fewest, pods + self._step(view, pods)))

    def _step(self, view: PolicyInput, pods: int) -> int:
        """Return the change of load scaling."""
        model = self._model
        engines = [_queue_and_kv(snapshot) for snapshot in view.ready]
        is_late = all(model.ttft(queued, kv) > model.ttft_target for queued, kv, _ in engines)
        is_slow = all(model.itl(kv) > model.itl_target for _, kv, _ in engines)
        if is_late or is_slow:
            return 1
        more = pods / (pods - 1) if pods > 1 else math.inf
        return -1 if all(self._could_take(more, *engine) for engine in engines) else 0

    def _could_take(self, more: float, queued: float, kv: float, capacity: float) -> bool:
        """Return True if an engine still attains the targets with `more` times its queue and KV tokens."""
        model, combined = self._model, (queued + kv) * more
        if combined >= capacity or model.itl(combined) >= SENSITIVITY * model.itl_target:
            return False
        own = model.ttft(0.0, kv * more)
        return model.ttft(queued * more, kv * more) - own < SENSITIVITY * (model.ttft_target - own)


class _Model:
    """Step times of one engine with the observed mean lengths."""

    def __init__(self, setup: PolicySetup) -> None:
        self._cost = setup.machine.cost
        self._kv_tokens = setup.machine.kv_tokens
        self._objectives = setup.objectives
        self.itl_target = setup.objectives.itl_mean or math.inf

    def observe(self, work: list[float], view: PolicyInput) -> bool:
        """Set mean lengths from increases of counters; return False if there are none."""
        if not work or not all(work):
            return False
        requests, prompts, finished, outputs, steps, computed = work
        self._prompt, self._output, self._per_step = prompts / requests, outputs / finished, computed / steps
        self._context = self._prompt + self._output / 2
        self._budget = view.parameters[Parameter.MAX_NUM_BATCHED_TOKENS]
        self._slots = view.parameters[Parameter.MAX_NUM_SEQS]
        self.ttft_target = self._objectives.ttft_of(round(self._prompt))
        return True

    def ttft(self, queued: float, kv: float) -> float:
        """Return the time of the steps for the queue and a mean prompt, with `kv` tokens of decoding requests."""
        whole, rest = divmod(queued + self._prompt, self._budget)
        return whole * self._seconds(self._budget, kv) + (self._seconds(rest, kv) if rest else 0.0)

    def itl(self, kv: float) -> float:
        """Return the time of a step with one more request, and prompt tokens as in the mean step."""
        return self._seconds(self._per_step, kv + self._context)

    def most_requests(self) -> float:
        """Return the most requests a second at both targets (find_best_engine_agg_rps)."""
        balanced = self._output * self._budget / (self._prompt + self._output)
        rate = 0.0
        for batch in range(1, 1 + max(1, int(min(self._kv_tokens / self._context, self._slots, balanced)))):
            kv, prefill = batch * self._context, min(batch * self._prompt / self._output, self._budget)
            seconds = self._seconds(prefill, kv)
            if batch > 1 and (seconds > self.itl_target or self.ttft(prefill, kv) > self.ttft_target):
                break
            rate = batch / (self._output * seconds)
        return rate

    def _seconds(self, prefill: float, kv: float) -> float:
        cost, sequences = self._cost, kv / self._context
        decodes = (cost.per_token + cost.per_sequence) * sequences + (cost.per_context + cost.per_attended) * kv
        return cost.per_step + cost.per_token * prefill + decodes


def _queue_and_kv(snapshot: ReplicaSnapshot) -> tuple[float, float, float]:
    """Return an engine's queued prompt tokens, KV tokens in use, and KV capacity."""
    assert snapshot.sample is not None
    assert snapshot.ledger is not None
    gauges, capacity = snapshot.sample.gauges, float(snapshot.ledger.blocks_total * snapshot.ledger.block_size)
    return gauges.waiting_tokens or 0.0, gauges.kv_usage * capacity, capacity


def _work(sample: Sample) -> tuple[float, ...]:
    """Return requests, their prompt tokens, finished requests, output tokens, steps, and computed prompt tokens."""
    counters = sample.counters
    steps = sum(work.steps for work in (counters.decode, counters.prefill) if work is not None)
    return (*lengths(sample), steps, counters.prompt_tokens)


def dynamo_load(setup: PolicySetup) -> Dynamo:
    """Return the planner with load scaling."""
    return Dynamo("dynamo-load", setup, load=True, throughput=False)


def dynamo_throughput(setup: PolicySetup) -> Dynamo:
    """Return the planner with throughput scaling, its default."""
    return Dynamo("dynamo-throughput", setup, load=False, throughput=True)


def dynamo_hybrid(setup: PolicySetup) -> Dynamo:
    """Return the planner with load scaling above the floor of throughput scaling."""
    return Dynamo("dynamo-hybrid", setup, load=True, throughput=True)

"""An engine in closed form with a computable optimum, for testing searches."""

import math
from dataclasses import dataclass

from trimtab_engine.bench.autotune.search import Purpose, Trial, TrialResult


@dataclass(frozen=True, slots=True)
class SyntheticEngine:
    """A step of n sequences and p prompt tokens takes `base + per_token (n + p) + per_sequence n` seconds. Sequence
    slots beyond the KV cache preempt: up to `waste` of the work is repeated. Values in seconds and tokens are those of
    an accelerator.
    """

    base: float = 0.008
    per_token: float = 3e-5
    per_sequence: float = 5e-5
    kv_tokens: int = 100_000
    """Tokens at utilization 1."""
    input_len: int = 512
    output_len: int = 64
    waste: float = 0.3
    num_prompts: int = 400
    most_utilization: float = 1.0
    """Above it the device has no memory."""

    def answer(self, trial: Trial) -> TrialResult:
        """The figures of a run, as `bench serve` names them."""
        if trial.setting.gpu_memory_utilization > self.most_utilization:
            return TrialResult({}, refused="out of memory")
        rate = 1e-9 if trial.purpose is Purpose.SINGLE_REQUEST else trial.rate
        return TrialResult(self.figures(trial, rate))

    def figures(self, trial: Trial, rate: float) -> dict[str, float | None]:
        seats, budget = trial.setting.candidate.max_num_seqs, trial.setting.candidate.max_num_batched_tokens
        tokens = self.input_len + self.output_len
        in_cache = max(1.0, self.kv_tokens * trial.setting.gpu_memory_utilization / tokens)
        per_request = self.per_token * tokens / self.output_len + self.per_sequence  # seconds per step, of one request
        most = max(1.0, min(seats, budget * self.output_len / tokens))
        capacity = self._rate_of(min(most, in_cache), per_request) / self._again(most, in_cache)
        served = min(rate, capacity)
        running = min(most, in_cache)
        if rate < capacity:
            running = self._running(served, per_request, running)
        step = self.base + per_request * running
        chunk = max(1.0, budget - running)
        full_step = self.base + self.per_sequence * running + self.per_token * min(budget, running + self.input_len)
        queue = self._queue_seconds(rate, capacity)
        ttft = math.ceil(self.input_len / chunk) * full_step + queue
        e2e = ttft + self.output_len * step * (self._again(most, in_cache) if rate >= capacity else 1)
        return {
            "completed": float(self.num_prompts),
            "failed": 0.0,
            "request_throughput": served,
            "duration": self.num_prompts / served + (e2e - queue),
            "total_input_tokens": float(self.input_len * self.num_prompts),
            "total_output_tokens": float(self.output_len * self.num_prompts),
            "median_e2el_ms": 1000 * (e2e - queue / 2),
            "median_itl_ms": 1000 * step,
            "p99_ttft_ms": 1000 * ttft,
            "p99_itl_ms": 1000 * (full_step if rate > 1e-6 else step),
            "p99_e2el_ms": 1000 * e2e,
            "prefix_cache_hit_rate": 0.0,
        }

    def _rate_of(self, running: float, per_request: float) -> float:
        return running / (self.output_len * (self.base + per_request * running))

    def _running(self, rate: float, per_request: float, most: float) -> float:
        """Return the concurrency by Little's law, with steps that grow with it."""
        free = 1 - rate * self.output_len * per_request
        return most if free <= 0 else min(most, max(1.0, rate * self.output_len * self.base / free))

    def _again(self, running: float, in_cache: float) -> float:
        """Return how many times the work is done."""
        return 1 + self.waste * max(0.0, 1 - in_cache / running)

    def _queue_seconds(self, rate: float, capacity: float) -> float:
        if rate < capacity:
            return rate / capacity / (capacity - rate)
        return self.num_prompts * max(0.0, 1 / capacity - 1 / rate) + self.num_prompts / capacity / 50

"""Reference for the engine model: the engine's own scheduler, step by step, with the same step times.

Slow, because it schedules real token ids. Prompts are generated so that they share prefixes exactly as the trace
specifies.
"""

from __future__ import annotations

import math
from collections import deque

from trimtab_engine.scheduling.batch import Batch
from trimtab_engine.scheduling.block_manager import BlockManager
from trimtab_engine.scheduling.policy import SchedulingPolicy
from trimtab_engine.scheduling.request import Request
from trimtab_engine.scheduling.sampling import Sampling
from trimtab_engine.scheduling.scheduler import Scheduler
from trimtab_operator.tuner.engine_model import Allowance, EngineModelPolicy, Sequence, StepCost, StepSums
from trimtab_simulator.trace.arrivals import KEY_TOKENS

TOKEN_RANGE = 1 << 31  # ids of tokens; they only need to differ


class StepwiseEngine:
    """One engine, driven like an EngineModel: run_until(arrival), then add(sequence)."""

    def __init__(
        self,
        cost: StepCost,
        policy: EngineModelPolicy,
        num_blocks: int,
        *,
        block_size: int = 16,
        max_model_len: int | None = None,
        caches: bool = True,
        key_tokens: int = KEY_TOKENS,
        now: float = 0.0,
    ) -> None:
        self.now = now
        self._key_tokens = key_tokens
        self.sums = {"prefill": StepSums(), "decode": StepSums(), "mixed": StepSums()}
        self.gaps: list[float] = []
        self.finished: list[Sequence] = []
        self.recomputed_tokens = 0
        self.blocked_seconds: dict[str, float] = {}
        self._caches = caches
        self._cost = cost
        self.scheduler = Scheduler(
            BlockManager(num_blocks, num_blocks, block_size),
            _policy(policy, caches=caches),
            max_model_len=max_model_len or num_blocks * block_size,
        )
        self._sequences: dict[str, Sequence] = {}
        self._last_token: dict[str, float] = {}
        self._fresh: deque[Request] = deque()

    def add(self, sequence: Sequence) -> None:
        """Add a sequence to the queue."""
        number = len(self._sequences)
        tokens: list[int] = []
        for key in sequence.keys:
            tokens += [(key * 2654435761 + i) % TOKEN_RANGE for i in range(self._key_tokens)]
        tokens = tokens[: sequence.num_prompt]
        tokens += [(number * 40503 + i * 7 + 3) % TOKEN_RANGE for i in range(sequence.num_prompt - len(tokens))]
        sampling = Sampling(max_tokens=sequence.num_output, ignore_eos=True)
        request = Request.of(str(number), tokens, sampling, arrival_time=sequence.arrival)
        self._sequences[request.request_id] = sequence
        self.scheduler.add(request)

    def set_policy(self, policy: EngineModelPolicy) -> None:
        """Apply `policy` from the next step on."""
        self.scheduler.set_policy(_policy(policy, caches=self._caches))

    def resize(self, num_blocks: int) -> None:
        """Shrink the KV cache, or restore its original size."""
        self.scheduler.resize_kv(num_blocks, self.now)

    def run_until(self, until: float) -> None:
        """Run every step that starts before `until`."""
        while self.now < until:
            if self.scheduler.is_idle:
                if until < math.inf:
                    self.now = until
                return
            self._take_step()

    def drain(self) -> None:
        """Serve all added sequences."""
        self.run_until(math.inf)

    def _take_step(self) -> None:
        batch = self.scheduler.schedule(self.now)
        if not batch.sequences:
            return
        context = sum(s.start + s.num_tokens for s in batch.sequences)
        attended = sum(s.num_tokens * (2 * s.start + s.num_tokens + 1) // 2 for s in batch.sequences)
        seconds = self._cost.seconds(batch.num_tokens, len(batch.sequences), context, attended)
        self.sums[batch.kind].add(1, batch.num_tokens, len(batch.sequences), context, attended, seconds)
        self.now += seconds
        self._hand_out(batch)
        stats = self.scheduler.take_stats()
        self.recomputed_tokens += stats.recomputed_tokens
        for reason, blocked in stats.blocked_seconds.items():
            self.blocked_seconds[reason] = self.blocked_seconds.get(reason, 0.0) + blocked

    def _hand_out(self, batch: Batch) -> None:
        # Outputs are unique per request: tokens after a shared prompt are not shared.
        tokens: list[int | list[int]] = [TOKEN_RANGE + int(request.request_id) for request in batch.sampling]
        for request, _, status in self.scheduler.update(batch, tokens, self.now):
            sequence = self._sequences[request.request_id]
            if sequence.first_token_at is None:
                sequence.first_token_at = self.now
                sequence.num_cached = request.num_cached_tokens
            else:
                self.gaps.append(self.now - self._last_token[request.request_id])
            self._last_token[request.request_id] = self.now
            if status is not None:
                sequence.finished_at = self.now
                sequence.num_preemptions = request.num_preemptions
                self.finished.append(sequence)


def _policy(policy: EngineModelPolicy, *, caches: bool) -> SchedulingPolicy:
    allowance = policy.allowance or Allowance(0.0)
    return SchedulingPolicy(
        max_num_seqs=policy.max_num_seqs,
        max_num_batched_tokens=policy.max_num_batched_tokens,
        watermark=policy.watermark,
        scheduling_policy="fcfs" if policy.allowance is None else "deadline",
        ttft_target=allowance.seconds,
        ttft_target_per_prompt_token=allowance.seconds_per_prompt_token,
        enable_prefix_caching=caches,
    )

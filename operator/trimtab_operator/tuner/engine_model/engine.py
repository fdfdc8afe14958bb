"""One engine in virtual time: the engine's scheduler over lengths instead of tokens, with fewer simulated steps.

a step  = running sequences in order of arrival, within the budget, of which a prompt leaves one token for every
          decoding sequence; then admission from the head of the queue
a run   = steps in which the same sequences decode and none can be admitted, up to the first of: a sequence ends, the
          blocks run out, a sequence arrives that the next step might admit. Tokens, context and time of k such steps
          are sums with a closed form, and the steps that need blocks follow from each sequence's length modulo the
          block size.

Everything else (preemption, a budget smaller than the running sequences) is simulated step by step, by the rules of
`trimtab_engine.scheduling.scheduler`; a property test compares both. The queue is in order of arrival, or by `deadline`
if the policy has an allowance (`engine_model/waiting.py`). Not modelled: speculative drafts, swapping, priorities, a
threshold for long prefills.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import islice
from operator import attrgetter

from trimtab_operator.tuner.engine_model.blocks import Blocks
from trimtab_operator.tuner.engine_model.cost import StepCost, StepSums
from trimtab_operator.tuner.engine_model.gaps import Gaps
from trimtab_operator.tuner.engine_model.sequence import Sequence
from trimtab_operator.tuner.engine_model.waiting import Allowance, WaitingLines

VICTIM_CANDIDATES = 8  # as in the engine: of the last in order, the cheapest to recompute is preempted
RECOMPUTE_SECONDS_PER_TOKEN = 1e-3  # the engine's default; it only breaks ties between victims

SEQS, TOKENS, KV = "seqs", "tokens", "kv"  # reasons why the head of the queue waits, by the engine's names
CAPACITY, RESIZE = "capacity", "resize"  # reasons of preemptions, by the engine's names

_order = attrgetter("order")


@dataclass(frozen=True, slots=True)
class EngineModelPolicy:
    """Live values of the scheduler, by the engine's names."""

    max_num_seqs: int
    max_num_batched_tokens: int
    watermark: float = 0.0
    allowance: Allowance | None = None
    """TTFT allowance of the queue order `deadline`; None for order of arrival."""
    victim_candidates: int = VICTIM_CANDIDATES
    """Of this many running sequences, the last in order, the cheapest is preempted; 1 is last in, first out."""


@dataclass(slots=True)
class Counters:
    """Counters since the engine started."""

    sums: dict[str, StepSums] = field(
        default_factory=lambda: {"prefill": StepSums(), "decode": StepSums(), "mixed": StepSums()}
    )
    """Sums of steps by kind."""
    arrived: int = 0
    arrived_prompt_tokens: int = 0
    finished: int = 0
    prompt_tokens: int = 0
    """Computed prompt tokens, including cached ones."""
    cached_prompt_tokens: int = 0
    generated_tokens: int = 0
    recomputed_tokens: int = 0
    preempted: dict[str, int] = field(default_factory=lambda: {CAPACITY: 0, RESIZE: 0})
    """Preemptions by reason."""
    blocked_seconds: dict[str, float] = field(default_factory=lambda: {KV: 0.0, SEQS: 0.0, TOKENS: 0.0})
    """Seconds by the reason why the head of the queue waited."""


class EngineModel:
    """Serves sequences. Call run_until(arrival) and add(sequence) in order of arrival.

    `now` is the end of the newest step, which may be after the requested time; sequences added then are considered by
    the next step, as in the engine. Gaps from `slow_gap` on count as slow; `gaps` gets every gap; both cost a little
    time. `finished` grows; the reader may clear it.
    """

    def __init__(
        self,
        cost: StepCost,
        policy: EngineModelPolicy,
        blocks: Blocks,
        *,
        now: float = 0.0,
        slow_gap: float = math.inf,
        gaps: Gaps | None = None,
        records_first_tokens: bool = False,
    ) -> None:
        self.now = now
        self.counters = Counters()
        self.finished: list[Sequence] = []
        self.first_tokens: list[Sequence] = []
        """Sequences with their first token, if `records_first_tokens`; the reader may clear it."""
        self.most_running = 0
        """Maximum number of running sequences so far."""
        self.gaps = gaps
        self._records_first_tokens = records_first_tokens
        self._cost = cost
        self._policy = policy
        self._blocks = blocks
        self._block_size = blocks.block_size
        self._slow_gap = slow_gap
        self._num_added = 0
        self._waiting = WaitingLines(policy.allowance, policy.max_num_batched_tokens, self._num_cached)
        self._decoding: list[tuple[int, int, Sequence]] = []  # a heap of (finish_step, order, sequence)
        self._prefilling: Sequence | None = None  # the one whose prompt did not fit into a step
        self._step = 0
        self._context = 0  # computed tokens of all decoding sequences
        self._needing = [0] * self._block_size  # sequences that need a block, by step number modulo the block size
        self._late: dict[Sequence, float] = {}  # decoding, but not scheduled in the newest step: time of the last token
        self._slow_steps = 0
        self._blocked: str | None = None
        self._is_stuck = False  # the head of the queue cannot be admitted until a sequence ends, or until
        self._stuck_until = math.inf  # another sequence becomes the head
        self._num_just_finished = 0  # at `now`

    # --- reading --------------------------------------------------------------------------------------------------

    @property
    def policy(self) -> EngineModelPolicy:
        """Values in force."""
        return self._policy

    @property
    def cost(self) -> StepCost:
        """Step times."""
        return self._cost

    @property
    def blocks(self) -> Blocks:
        """KV cache, for reading."""
        return self._blocks

    @property
    def num_running(self) -> int:
        """Running sequences."""
        return len(self._decoding) + (self._prefilling is not None)

    @property
    def num_waiting(self) -> int:
        """Sequences in the queue, including preempted ones."""
        return self._waiting.count

    @property
    def is_idle(self) -> bool:
        """True if no sequence runs or waits."""
        return not (self._decoding or self._waiting.count or self._prefilling)

    def in_flight(self, at: float) -> int:
        """Return the sequences that were added and not finished by `at`, which must not precede the newest step's
        start.
        """
        count = len(self._decoding) + (self._prefilling is not None) + self._waiting.count
        return count + self._num_just_finished if self.now > at else count

    @property
    def waiting_tokens(self) -> int:
        """Tokens that waiting sequences must compute before their next token."""
        return sum(sequence.num_tokens for sequence in self._waiting)

    @property
    def waiting(self) -> Iterable[Sequence]:
        """Sequences in the queue, including preempted ones."""
        return self._waiting

    @property
    def prefill_left(self) -> int:
        """Tokens left of the partly computed prompt; 0 if there is none."""
        prefilling = self._prefilling
        return 0 if prefilling is None else prefilling.num_tokens - prefilling.num_computed

    @property
    def context_tokens(self) -> int:
        """Computed tokens of running sequences."""
        return self._context + (0 if self._prefilling is None else self._prefilling.num_computed)

    @property
    def oldest_arrival(self) -> float | None:
        """Arrival time of the oldest sequence in the queue."""
        return self._waiting.oldest_arrival

    def unfinished(self) -> Iterable[tuple[Sequence, int]]:
        """Yield each running or waiting sequence with its output tokens so far."""
        for finish_step, _, sequence in self._decoding:
            yield sequence, sequence.num_output - (finish_step - self._step)
        if self._prefilling is not None:
            yield self._prefilling, self._prefilling.num_generated
        for sequence in self._waiting:
            yield sequence, sequence.num_generated

    def _num_cached(self, sequence: Sequence) -> int:
        """Return the tokens of a waiting sequence in the prefix cache."""
        return self._blocks.find_cached(sequence)[0] * self._block_size

    # --- changes between two steps ------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Add a sequence to the queue. Raise ValueError if the KV cache cannot hold it."""
        self._number(sequence)
        if self._waiting.is_headed_by_late:
            self._is_stuck = False  # the new sequence goes ahead of them
        self._waiting.add(sequence)

    def _number(self, sequence: Sequence) -> None:
        longest = self._blocks.total * self._block_size
        if sequence.num_prompt < 1 or sequence.num_output < 1 or sequence.num_prompt + sequence.num_output > longest:
            raise ValueError(
                f"a request of {sequence.num_prompt} + {sequence.num_output} tokens: both must be at least 1, and the "
                f"KV cache holds {longest} tokens"
            )
        sequence.order = self._num_added
        self._num_added += 1
        self.counters.arrived += 1
        self.counters.arrived_prompt_tokens += sequence.num_prompt

    def add_in_progress(self, sequence: Sequence, num_generated: int) -> None:
        """Add a sequence with this many output tokens, as observed in a running engine; it counts as preempted if no
        slot or blocks are free. Call it before time passes. Raise ValueError as add() does.
        """
        self._number(sequence)
        sequence.num_generated = min(num_generated, sequence.num_output - 1)
        sequence.first_token_at = sequence.last_token_at = self.now
        computed = sequence.num_tokens - 1
        num_found, num_unused = self._blocks.find_cached(sequence)
        num_blocks = -(-computed // self._block_size) - num_found
        if self.num_running >= self._policy.max_num_seqs or num_blocks + num_unused > self._blocks.free:
            self._waiting.requeue(sequence)
            return
        self._blocks.share(sequence, num_found)
        self._blocks.allocate(num_blocks)
        sequence.num_computed = computed
        self._decode(sequence)

    def set_policy(self, policy: EngineModelPolicy) -> None:
        """Apply `policy` from the next step on. Lower limits take effect as sequences finish."""
        self._is_stuck = False
        if policy != self._policy:
            self._waiting.set_policy(policy.allowance, policy.max_num_batched_tokens)
        self._policy = policy

    def resize(self, num_blocks: int) -> None:
        """Set the size of the KV cache. Sequences that no longer fit are preempted."""
        while self._blocks.total - self._blocks.free > num_blocks:
            running = self._running_in_order()
            victim = self._choose_victim(running, 0, set())
            self._preempt(victim, RESIZE)
            self._drop_preempted({victim})
        self._blocks.resize(num_blocks)
        self._is_stuck = False

    # --- time -----------------------------------------------------------------------------------------------------

    def run_until(self, until: float) -> None:
        """Run every step that starts before `until`. If idle, the clock is set to `until`."""
        while self.now < until:
            waits = self._waiting.count
            if self._is_stuck and self.now >= self._stuck_until:
                self._is_stuck = False
            if not self._decoding and self._prefilling is None and not waits:
                if until < math.inf:
                    self.now = until
                    self._num_just_finished = 0
                return
            if self._prefilling is None and not self._late and (self._is_stuck or not waits) and self._decoding:
                self._run(min(until, self._stuck_until) if waits else until)
            else:
                self._take_step()

    def quiet_until(self) -> float:
        """Return a time before which no sequence ends and no step needs scheduling, unless one is added."""
        if not self._decoding:
            return math.inf if self.is_idle else self.now
        if self._prefilling is not None or self._late or (self._waiting.count and not self._is_stuck):
            return self.now
        steps = self._decoding[0][0] - self._step - 1  # the last step ends a sequence: stop before it
        count = len(self._decoding)
        first, increase = self._decode_seconds(count)
        ends = self.now + steps * first + increase * steps * (steps - 1) / 2
        return min(ends, max(self.now, self._stuck_until)) if self._waiting.count else ends

    def drain(self) -> None:
        """Serve all added sequences; `now` is then the end of the last step."""
        self.run_until(math.inf)

    # --- runs of decode steps -------------------------------------------------------------------------------------

    def _decode_seconds(self, count: int) -> tuple[float, float]:
        """Return the time of the next step in which `count` sequences decode, and the increase per later step."""
        cost = self._cost
        per_context = cost.per_context + cost.per_attended
        first = cost.per_step + (cost.per_token + cost.per_sequence) * count + per_context * (self._context + count)
        return first, per_context * count

    def _run(self, until: float) -> None:
        """Run decode steps up to the one that ends a sequence, the one before the blocks run out, or `until`."""
        count = len(self._decoding)
        if count > self._policy.max_num_batched_tokens:
            self._take_step()
            return
        steps = self._decoding[0][0] - self._step
        free = self._blocks.free
        if count * (steps // self._block_size + 1) > free:
            steps = min(steps, self._steps_with(free, count))
            if not steps:
                self._take_step()
                return
        first, increase = self._decode_seconds(count)
        seconds = steps * first + increase * steps * (steps - 1) / 2
        left = until - self.now
        if seconds > left:
            steps = _steps_to_last(left, first, increase, steps)
            seconds = steps * first + increase * steps * (steps - 1) / 2
        self._advance(steps, count, first, increase, seconds)

    def _steps_with(self, free: int, count: int) -> int:
        """Return how many more steps the free blocks allow."""
        size, needing = self._block_size, self._needing
        steps = free // count * size
        free %= count
        while free >= needing[(self._step + steps) % size]:
            free -= needing[(self._step + steps) % size]
            steps += 1
        return steps

    def _advance(self, steps: int, count: int, first: float, increase: float, seconds: float) -> None:
        """Apply a run of decode steps."""
        size, needing, step = self._block_size, self._needing, self._step
        cycles, rest = divmod(steps, size)
        num_blocks = cycles * count
        for index in range(step, step + rest):
            num_blocks += needing[index % size]
        if num_blocks:
            self._blocks.allocate(num_blocks)
        tokens = steps * count
        context = steps * self._context + count * steps * (steps + 1) // 2
        counters = self.counters
        counters.sums["decode"].add(steps, tokens, tokens, context, context, seconds)
        counters.generated_tokens += tokens
        if self._blocked is not None:
            counters.blocked_seconds[self._blocked] += seconds
        if self.gaps is not None:
            self.gaps.add_run(first, increase, steps, count)
        if first + increase * (steps - 1) > self._slow_gap:
            quick = 0
            if first <= self._slow_gap:
                quick = math.floor((self._slow_gap - first) / increase) + 1
            self._slow_steps += steps - quick
        self._step += steps
        self._context += tokens
        self.now += seconds
        self._num_just_finished = 0
        if self._decoding[0][0] == self._step:
            self._end_finished()

    # --- single steps ---------------------------------------------------------------------------------------------

    def _take_step(self) -> None:
        """Schedule and run one step."""
        prefilling = self._prefilling
        count = len(self._decoding)
        budget = self._policy.max_num_batched_tokens
        num_blocks = self._needing[self._step % self._block_size]
        chunk = 0
        if prefilling is not None:
            chunk = min(prefilling.num_tokens - prefilling.num_computed, budget - count)
            num_blocks += -(-(prefilling.num_computed + max(0, chunk)) // self._block_size) - prefilling.num_blocks
        is_served = prefilling is None or chunk > 0
        if count <= budget and num_blocks <= self._blocks.free and is_served:
            if num_blocks:
                self._blocks.allocate(num_blocks)
            self._finish_step(_StepPlan(budget - count - chunk, count, self._context + count, chunk, [], False))
        else:
            self._finish_step(self._contend(budget))

    def _running_in_order(self) -> list[Sequence]:
        """Return the running sequences in scheduling order."""
        running = [sequence for _, _, sequence in self._decoding]
        if self._prefilling is not None:
            running.append(self._prefilling)
        running.sort(key=_order)
        return running

    def _contend(self, budget: int) -> _StepPlan:
        """Schedule the running sequences when not all fit: in order, with victims from the end.

        If the budget suffices, only sequences that need blocks are visited: a sequence scheduled in this step never
        becomes a victim, so the others can be counted.
        """
        running = self._running_in_order()
        if len(running) > budget:
            return self._contend_for_tokens(running, budget)
        victims: set[Sequence] = set()
        prefilling, chunk = self._prefilling, 0
        needing = self._step % self._block_size
        for index, sequence in enumerate(running):
            if sequence is prefilling:
                if sequence not in victims:
                    served = index - sum(victim.order < sequence.order for victim in victims)
                    chunk = self._serve_chunk(running, index, victims, budget - served)
            elif sequence.phase == needing and sequence not in victims:
                self._make_room(running, index, 1, victims)
        count = len(running) - len(victims)
        if prefilling is not None and prefilling not in victims:
            count -= 1
        if victims:
            self._drop_preempted(victims)
        return _StepPlan(budget - count - chunk, count, self._context + count, chunk, [], bool(victims))

    def _contend_for_tokens(self, running: list[Sequence], budget: int) -> _StepPlan:
        """The same sequence by sequence, when the budget does not suffice."""
        prefilling = self._prefilling
        victims: set[Sequence] = set()
        stalled: list[Sequence] = []
        count, context, chunk = 0, 0, 0
        for index, sequence in enumerate(running):
            if budget <= 0:
                stalled = [s for s in running[index:] if s not in victims and s is not prefilling]
                break
            if sequence in victims:
                continue
            if sequence is prefilling:
                chunk = self._serve_chunk(running, index, victims, budget)
                budget -= chunk
                continue
            computed = self._num_computed(sequence)
            if computed % self._block_size == 0 and not self._make_room(running, index, 1, victims):
                break  # no later sequence is left
            budget -= 1
            count += 1
            context += computed + 1
        if victims:
            self._drop_preempted(victims)
        return _StepPlan(budget, count, context, chunk, stalled, bool(victims))

    def _serve_chunk(self, running: list[Sequence], index: int, victims: set[Sequence], budget: int) -> int:
        """Allocate blocks for the next tokens of the partly computed prompt; return how many tokens."""
        prefilling = running[index]
        tokens = self._chunk_with_decodes(running[index + 1 :], victims, budget)
        if tokens <= 0:
            return 0
        num_blocks = -(-(prefilling.num_computed + tokens) // self._block_size) - prefilling.num_blocks
        return tokens if self._make_room(running, index, num_blocks, victims) else 0

    def _make_room(self, running: list[Sequence], index: int, num_blocks: int, victims: set[Sequence]) -> bool:
        """Allocate blocks for the sequence at `index`, preempting later ones if needed. Return False if it is a victim
        itself.
        """
        sequence, blocks = running[index], self._blocks
        while num_blocks > blocks.free:
            victim = self._choose_victim(running, index, victims)
            self._preempt(victim, CAPACITY)
            victims.add(victim)
            if victim is sequence:
                return False  # no later sequence is left
        blocks.allocate(num_blocks)
        return True

    def _chunk_with_decodes(self, behind: list[Sequence], victims: set[Sequence], budget: int) -> int:
        """Return how many prompt tokens a step computes: `behind` are later sequences, which need one token each."""
        prefilling = self._prefilling
        assert prefilling is not None
        num_left = prefilling.num_tokens - prefilling.num_computed
        if num_left == 1 and prefilling.num_computed >= prefilling.num_prompt:
            return 1  # the engine treats it like a decoding sequence
        return min(num_left, budget - sum(s not in victims for s in behind))

    def _num_computed(self, sequence: Sequence) -> int:
        """Return how many tokens of a running sequence are in the KV cache."""
        if sequence is self._prefilling:
            return sequence.num_computed
        return sequence.num_prompt + sequence.num_output - 1 - (sequence.finish_step - self._step)

    def _finish_step(self, plan: _StepPlan) -> None:
        """Admit sequences within the remaining budget, advance the clock, and hand out tokens."""
        prefilling, counters = self._prefilling, self.counters
        done: list[Sequence] = []  # their prompts are computed in this step
        tokens, sequences, context, attended = plan.count, plan.count, plan.context, plan.context
        is_cut = False  # a prompt is computed in part, or by more than one token
        if plan.chunk:
            assert prefilling is not None
            start = prefilling.num_computed
            end = start + plan.chunk
            self._compute(prefilling, end)
            tokens += plan.chunk
            sequences += 1
            context += end
            attended += plan.chunk * (2 * start + plan.chunk + 1) // 2
            is_cut = plan.chunk > 1 or end < prefilling.num_tokens
            num_prefills = int(is_cut)
            has_prompts = is_cut or start < prefilling.num_prompt
            if end == prefilling.num_tokens:
                self._prefilling = None
                done.append(prefilling)
        else:
            num_prefills, has_prompts = 0, False
        self._blocked, self._is_stuck = None, False
        if self._waiting.count:
            if plan.has_victims:
                self._blocked = KV  # the head is a victim of this step: its blocks are just taken
            else:
                for sequence, start, end in self._admit(plan.budget, done):
                    chunk = end - start
                    tokens += chunk
                    sequences += 1
                    context += end
                    attended += chunk * (2 * start + chunk + 1) // 2
                    num_prefills += chunk > 1 or end < sequence.num_tokens
                    has_prompts = True
        if not sequences:  # all running sequences were preempted; the queue is scheduled again
            return
        kind = "decode" if not num_prefills else ("prefill" if num_prefills == sequences else "mixed")
        seconds = self._cost.seconds(tokens, sequences, context, attended)
        if num_prefills:
            seconds += self._cost.per_prefill_step
        counters.sums[kind].add(1, tokens, sequences, context, attended, seconds)
        counters.generated_tokens += plan.count + len(done)
        if self._blocked is not None:
            counters.blocked_seconds[self._blocked] += seconds
        if has_prompts:
            self._waiting.record_step(seconds)
            if self._is_stuck:  # a longer step makes the head late earlier
                self._stuck_until = self._waiting.next_change()
        self._advance_clock(seconds, plan)
        for sequence in done:
            self._begin_decoding(sequence)
        if self._decoding and self._decoding[0][0] == self._step:
            self._end_finished()

    def _compute(self, sequence: Sequence, end: int) -> None:
        """Record its tokens up to `end` as computed; blocks must have been allocated."""
        start = sequence.num_computed
        if start < sequence.num_ever_computed:
            self.counters.recomputed_tokens += min(end, sequence.num_ever_computed) - start
        sequence.num_computed = end
        sequence.num_blocks = -(-end // self._block_size)
        self._blocks.mark_computed(sequence, end)

    def _admit(self, budget: int, done: list[Sequence]) -> list[tuple[Sequence, int, int]]:
        """Admit from the head of the queue, without skipping: (sequence, first token, end) of each."""
        blocks, size, policy = self._blocks, self._block_size, self._policy
        waiting = self._waiting
        admitted: list[tuple[Sequence, int, int]] = []
        num_running = len(self._decoding) + len(done) + (self._prefilling is not None)
        while waiting.count:
            sequence = waiting.head(self.now)
            if num_running >= policy.max_num_seqs:
                self._blocked, self._is_stuck, self._stuck_until = SEQS, True, waiting.next_change()
                break
            if budget <= 0:
                self._blocked = TOKENS
                break
            num_tokens = sequence.num_prompt + sequence.num_generated
            num_found, num_unused = blocks.find_cached(sequence)
            spare = int(policy.watermark * blocks.total) if num_running else 0
            if -(-num_tokens // size) - num_found + num_unused + spare > blocks.free:
                self._blocked, self._is_stuck, self._stuck_until = KV, True, waiting.next_change()
                break
            waiting.pop_head()
            blocks.share(sequence, num_found)
            start = num_found * size
            end = min(num_tokens, start + budget)
            blocks.allocate(-(-end // size) - num_found)
            if sequence.first_token_at is None and not sequence.num_preemptions:
                sequence.num_cached = start
            sequence.num_computed = start
            self._compute(sequence, end)
            admitted.append((sequence, start, end))
            budget -= end - start
            num_running += 1
            if end == num_tokens:
                done.append(sequence)
            else:
                self._prefilling = sequence
        if num_running > self.most_running:
            self.most_running = num_running
        return admitted

    def _advance_clock(self, seconds: float, plan: _StepPlan) -> None:
        """Advance the clock by the step, and give decoding sequences their next token."""
        began = self.now
        self.now = now = began + seconds
        self._num_just_finished = 0
        is_slow = seconds > self._slow_gap
        self._slow_steps += is_slow
        num_gaps = plan.count
        if self._late:
            stalled = set(plan.stalled)
            for sequence in [s for s in self._late if s not in stalled]:
                gap = now - self._late.pop(sequence)
                sequence.slow_base += is_slow - (gap > self._slow_gap)
                num_gaps -= 1
                if self.gaps is not None:
                    self.gaps.add(gap, 1)
        if self.gaps is not None and num_gaps:
            self.gaps.add(seconds, num_gaps)
        self._step += 1
        self._context += plan.count
        if plan.stalled:
            for sequence in plan.stalled:
                self._late.setdefault(sequence, began)
                sequence.slow_base += is_slow
                self._needing[sequence.phase] -= 1
                sequence.finish_step += 1
                sequence.phase = (sequence.phase + 1) % self._block_size
                self._needing[sequence.phase] += 1
            self._decoding = [(s.finish_step, s.order, s) for _, _, s in self._decoding]
            heapify(self._decoding)

    def _begin_decoding(self, sequence: Sequence) -> None:
        """Hand out the token that the end of its prompt has yielded."""
        counters = self.counters
        if sequence.first_token_at is None:
            sequence.first_token_at = self.now
            counters.prompt_tokens += sequence.num_prompt
            counters.cached_prompt_tokens += sequence.num_cached
            if self._records_first_tokens:
                self.first_tokens.append(sequence)
        else:
            gap = self.now - sequence.last_token_at
            sequence.num_slow_gaps += gap > self._slow_gap
            if self.gaps is not None:
                self.gaps.add(gap, 1)
        sequence.num_generated += 1
        self._decode(sequence)

    def _decode(self, sequence: Sequence) -> None:
        """Let it decode from the next step on: its computed tokens are in the KV cache, its newest token is not."""
        sequence.slow_base = self._slow_steps
        sequence.finish_step = self._step + sequence.num_output - sequence.num_generated
        sequence.phase = (self._step - sequence.num_computed) % self._block_size
        self._needing[sequence.phase] += 1
        self._context += sequence.num_computed
        heappush(self._decoding, (sequence.finish_step, sequence.order, sequence))

    def _end_finished(self) -> None:
        """Remove sequences that have all their tokens."""
        heap, step = self._decoding, self._step
        while heap and heap[0][0] == step:
            sequence = heappop(heap)[2]
            num_computed = sequence.num_prompt + sequence.num_output - 1
            self._needing[sequence.phase] -= 1
            self._context -= num_computed
            self._blocks.release(sequence, num_computed, is_requeued=False)
            sequence.num_slow_gaps += self._slow_steps - sequence.slow_base
            sequence.finished_at = self.now
            self.finished.append(sequence)
            self._num_just_finished += 1
        self.counters.finished += self._num_just_finished
        self._is_stuck = False

    # --- preemption -----------------------------------------------------------------------------------------------

    def _choose_victim(self, running: list[Sequence], index: int, victims: set[Sequence]) -> Sequence:
        """Return the victim: among the last sequences after `index`, the cheapest to recompute per freed block."""
        behind = (s for s in reversed(running[index + 1 :]) if s not in victims)
        candidates = list(islice(behind, self._policy.victim_candidates)) or [running[index]]
        size, blocks = self._block_size, self._blocks
        best, best_cost = candidates[0], math.inf
        for sequence in candidates:
            computed = self._num_computed(sequence)
            num_blocks = -(-computed // size)
            num_freed = blocks.count_exclusive(sequence, num_blocks)
            if not num_freed:
                continue
            lost = max(0, computed - (num_blocks - num_freed) * size)
            cost = lost * RECOMPUTE_SECONDS_PER_TOKEN / num_freed
            if cost < best_cost:
                best, best_cost = sequence, cost
        return best

    def _preempt(self, sequence: Sequence, reason: str) -> None:
        """Free its blocks and queue it again. It stays among the running ones until _drop_preempted()."""
        computed = self._num_computed(sequence)
        if sequence is not self._prefilling:
            sequence.num_generated = sequence.num_output - (sequence.finish_step - self._step)
            sequence.last_token_at = self._late.pop(sequence, self.now)
            sequence.num_slow_gaps += self._slow_steps - sequence.slow_base
            self._needing[sequence.phase] -= 1
            self._context -= computed
        self._blocks.release(sequence, computed, is_requeued=True)
        sequence.num_ever_computed = max(sequence.num_ever_computed, computed)
        sequence.num_computed = sequence.num_blocks = 0
        sequence.num_preemptions += 1
        self.counters.preempted[reason] += 1
        self._waiting.requeue(sequence)

    def _drop_preempted(self, victims: set[Sequence]) -> None:
        if self._prefilling in victims:
            self._prefilling = None
        self._decoding = [entry for entry in self._decoding if entry[2] not in victims]
        heapify(self._decoding)


@dataclass(slots=True)
class _StepPlan:
    """Work of a step for the sequences that were running before it."""

    budget: int
    """Tokens left for admission."""
    count: int
    """Decoding sequences."""
    context: int
    """Their total length after the step."""
    chunk: int
    """Tokens of the partly computed prompt."""
    stalled: list[Sequence]
    """Decoding sequences that the budget did not cover."""
    has_victims: bool


def _steps_to_last(seconds: float, first: float, increase: float, most: int) -> int:
    """Return the fewest steps, 1..most, that together take at least `seconds`."""
    if increase > 0:
        linear = first - increase / 2
        root = (math.sqrt(linear * linear + 2 * increase * seconds) - linear) / increase
    else:
        root = seconds / first
    steps = max(1, min(most, math.ceil(root)))
    while steps > 1 and (steps - 1) * first + increase * (steps - 1) * (steps - 2) / 2 >= seconds:
        steps -= 1
    while steps < most and steps * first + increase * steps * (steps - 1) / 2 < seconds:
        steps += 1
    return steps

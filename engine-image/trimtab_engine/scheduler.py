"""The next batch, from waiting requests, running ones and free KV blocks: token-budget scheduling, no phases.

Every request has `num_computed_tokens` chasing its tokens. A step first serves what runs, in order of admission, then
admits from the head of the queue. When blocks run out, the request admitted last is preempted: its blocks are freed
and it is computed again from its first token, at the front of the queue. Pure: time is a parameter, and neither
tensors nor HTTP are known. The same class runs in the server, in tests and in the simulator.

Two rules keep it from standing still. The first running request can take the blocks of all others, so every step moves
it on; and the KV cache always holds one request of max_model_len, so alone it never lacks blocks.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from trimtab_engine.batch import Batch, ScheduledSequence
from trimtab_engine.block_manager import BlockManager, ShrinkPlan
from trimtab_engine.errors import IntegrityError, InvalidRequest
from trimtab_engine.request import Request, RequestStatus
from trimtab_engine.scheduler_stats import BlockedReason, PreemptionReason, SchedulerStats

Sampled = tuple[Request, int, RequestStatus | None]
"""(request, token id, how it finished: None while it goes on). A bare tuple, as one is made per token served."""


@dataclass(frozen=True, slots=True)
class ResizeResult:
    """What a resize asks of the caller: copy the KV of `moves` (source, destination), then unmap what was given up."""

    moves: tuple[tuple[int, int], ...]
    preempted: list[Request]


class Scheduler:
    """Continuous batching with chunked prefill and recompute preemption, first come first served.

    Call schedule(), run the batch, call update(); add, abort, set_limits and resize_kv between steps. An abort may also
    come between schedule() and update(). A Batch is valid until the next schedule(): its entries are used again.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        enable_chunked_prefill: bool = True,
        eos_token_ids: Iterable[int] = (),
    ) -> None:
        self._blocks = block_manager
        self._max_model_len = max_model_len
        self._chunked_prefill = enable_chunked_prefill
        self._eos_token_ids = frozenset(eos_token_ids)
        self._requests: dict[str, Request] = {}
        self._waiting: deque[Request] = deque()
        self._running: list[ScheduledSequence] = []
        self._last_step = 0
        self._blocked: BlockedReason | None = None
        self._blocked_since = 0.0
        self._stats = SchedulerStats()
        self._check_one_request_fits(block_manager.num_total)
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self.set_limits(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)

    # --- what may change between two steps ------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a new request. Raises InvalidRequest when it could never run; nothing else is affected."""
        num_tokens, sampling = request.num_tokens, request.sampling
        if request.request_id in self._requests:
            raise InvalidRequest(f"request id {request.request_id!r} is in use; ids must be unique while alive")
        if num_tokens == 0:
            raise InvalidRequest("the prompt has no tokens; send at least one")
        if num_tokens >= self._max_model_len:
            raise InvalidRequest(
                f"the prompt has {num_tokens} tokens, but max_model_len is {self._max_model_len} and one token of "
                f"output needs room; shorten the prompt to {self._max_model_len - 1} tokens or fewer"
            )
        if sampling.max_tokens < 1:
            raise InvalidRequest(f"max_tokens is {sampling.max_tokens}; it must be 1 or more")
        request.max_num_tokens = min(request.num_prompt_tokens + sampling.max_tokens, self._max_model_len)
        ends = frozenset() if sampling.ignore_eos else self._eos_token_ids
        request.end_token_ids = ends.union(sampling.stop_token_ids) if sampling.stop_token_ids else ends
        self._requests[request.request_id] = request
        self._waiting.append(request)

    def abort(
        self, request_ids: Iterable[str], status: RequestStatus = RequestStatus.FINISHED_ABORTED
    ) -> list[Request]:
        """End these requests now, free their blocks, and return them. Unknown ids are ignored: they may just have
        finished. `status` is how they end (FINISHED_ERROR for one that failed alone)."""
        aborted = []
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._finish(request, status)
                aborted.append(request)
        if aborted:
            self._drop_finished()
        return aborted

    def set_limits(self, *, max_num_seqs: int | None = None, max_num_batched_tokens: int | None = None) -> None:
        """Change limits from the next step on. Lowering drains down: what runs goes on, nothing is admitted."""
        num_seqs = self._max_num_seqs if max_num_seqs is None else max_num_seqs
        num_tokens = self._max_num_batched_tokens if max_num_batched_tokens is None else max_num_batched_tokens
        if num_seqs < 1 or num_tokens < num_seqs:
            raise ValueError(f"max_num_batched_tokens {num_tokens} must be at least max_num_seqs {num_seqs}, that 1")
        if not self._chunked_prefill and num_tokens < self._max_model_len:
            raise ValueError(
                f"without chunked prefill max_num_batched_tokens must be at least max_model_len "
                f"{self._max_model_len}; it is {num_tokens}"
            )
        self._max_num_seqs = num_seqs
        self._max_num_batched_tokens = num_tokens

    def resize_kv(self, num_blocks: int, now: float) -> ResizeResult:
        """Make the KV cache `num_blocks` blocks large. Growing: map the blocks first. Shrinking: afterwards copy the
        moves, then unmap. What does not fit any more is preempted, the request admitted last first."""
        self._check_one_request_fits(num_blocks)
        if num_blocks >= self._blocks.num_total:
            self._blocks.grow(num_blocks)
            return ResizeResult((), [])
        preempted = []
        while self._blocks.num_used > num_blocks:
            preempted.append(self._preempt_last(now, PreemptionReason.RESIZE))
        holders = [sequence.request for sequence in self._running]
        plan = self._blocks.plan_shrink(num_blocks, holders)
        assert isinstance(plan, ShrinkPlan)  # what is in use fits: the loop above saw to it
        self._blocks.apply_shrink(plan, holders)
        return ResizeResult(plan.moves, preempted)

    # --- one step -------------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> Batch:
        """Choose the next step's work and give it its blocks. The batch is empty only when nothing can run."""
        self._book_blocked_time(now)
        self._blocked = None
        sequences: list[ScheduledSequence] = []
        preempted: list[Request] = []
        budget = self._schedule_running(sequences, preempted, now)
        if self._waiting:
            if preempted:
                self._blocked = BlockedReason.KV  # the head is a victim of this step: its blocks are just taken
            else:
                budget = self._admit(sequences, budget, now)
        if not sequences:
            return Batch(self.next_step, sequences, 0, preempted)
        self._last_step += 1
        return Batch(self._last_step, sequences, self._max_num_batched_tokens - budget, preempted)

    def update(self, batch: Batch, token_ids: list[int], now: float) -> list[Sampled]:
        """Append the sampled tokens: one per sequence of the batch that samples, in its order.

        Returns one entry per token, in the same order. An entry whose request was aborted since schedule() carries its
        FINISHED status and its token was dropped. `now` is when the step ended.
        """
        self._book_blocked_time(now)
        sampled: list[Sampled] = []
        keep = sampled.append
        any_finished = False
        num_delivered = len(token_ids)
        sampling = [sequence for sequence in batch.sequences if sequence.samples]
        for sequence, token_id in zip(sampling, token_ids, strict=True):
            request = sequence.request
            if request.status.is_finished:
                num_delivered -= 1
                keep((request, token_id, request.status))
                continue
            tokens = request.token_ids
            tokens.append(token_id)
            if token_id in request.end_token_ids or len(tokens) >= request.max_num_tokens:
                status = self._finish_status(request, token_id)
                if status is not None:
                    self._finish(request, status)
                    any_finished = True
                keep((request, token_id, status))
            else:
                keep((request, token_id, None))
        self._stats.num_generation_tokens += num_delivered
        if any_finished:
            self._drop_finished()
        return sampled

    def _schedule_running(self, sequences: list[ScheduledSequence], preempted: list[Request], now: float) -> int:
        """Give every running request its next tokens, in order of admission. Returns what is left of the budget.

        Victims are popped off the end of the list that is being walked. They come after the request that needs
        their blocks, or are that request, so none was scheduled in this step already.
        """
        budget = self._max_num_batched_tokens
        block_size = self._blocks.block_size
        schedule = sequences.append
        for sequence in self._running:
            if budget <= 0:
                break
            request = sequence.request
            start = request.num_computed_tokens
            num_left = len(request.token_ids) - start
            is_decode = num_left == 1 and start >= request.num_prompt_tokens
            if is_decode:  # the common case, kept short
                end = start + 1
                num_tokens = 1
                samples = True
            elif num_left == 0:  # its newest token is not known yet
                continue
            else:
                num_tokens = min(num_left, budget)
                end = start + num_tokens
                samples = num_tokens == num_left
            if end > len(request.block_ids) * block_size and not self._make_room(request, end, preempted, now):
                break
            sequence.start = start
            sequence.num_tokens = num_tokens
            sequence.samples = samples
            request.num_computed_tokens = end
            budget -= num_tokens
            schedule(sequence)
            if not is_decode:
                self._stats.note_prefill(sequence)
        return budget

    def _make_room(self, request: Request, num_tokens: int, preempted: list[Request], now: float) -> bool:
        """Grow the request's table, preempting from the end of running. False: the request itself had to go."""
        while not self._blocks.allocate(request, num_tokens):
            victim = self._preempt_last(now, PreemptionReason.CAPACITY)
            preempted.append(victim)
            if victim is request:
                return False
        return True

    def _admit(self, sequences: list[ScheduledSequence], budget: int, now: float) -> int:
        """Admit from the head of the queue, never past it, while seats, budget and blocks last. Returns the budget.

        A request is admitted only if all of its tokens fit into the blocks that are free now, even when its first
        chunk is short: admitting more would end in preemption.
        """
        waiting, running, blocks = self._waiting, self._running, self._blocks
        while waiting:
            request = waiting[0]
            num_tokens = request.num_tokens
            if len(running) >= self._max_num_seqs:
                self._blocked = BlockedReason.SEQS
                break
            if budget <= 0 or (num_tokens > budget and not self._chunked_prefill):
                self._blocked = BlockedReason.TOKENS
                break
            if not blocks.can_allocate(num_tokens):
                self._blocked = BlockedReason.KV
                break
            num_scheduled = min(num_tokens, budget)
            blocks.allocate(request, num_scheduled)
            waiting.popleft()
            sequence = ScheduledSequence(request, 0, num_scheduled, num_scheduled == num_tokens)
            request.status = RequestStatus.RUNNING
            request.num_computed_tokens = num_scheduled
            if request.first_scheduled_time is None:
                request.first_scheduled_time = now
            if request.preempted_at is not None:
                self._stats.preempt_stall_seconds.append(now - request.preempted_at)
                request.preempted_at = None
            running.append(sequence)
            sequences.append(sequence)
            budget -= num_scheduled
            self._stats.note_prefill(sequence)
        return budget

    # --- preemption and the end of requests -----------------------------------------------------------------------

    def _preempt_last(self, now: float, reason: PreemptionReason) -> Request:
        """Preempt the request that was admitted last. It keeps its tokens and goes to the front of the queue."""
        request = self._running.pop().request
        self._blocks.free(request)
        request.num_ever_computed_tokens = max(request.num_ever_computed_tokens, request.num_computed_tokens)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.preempted_at = now
        request.status = RequestStatus.PREEMPTED
        self._waiting.appendleft(request)
        self._stats.note_preempted(reason)
        return request

    def _finish_status(self, request: Request, token_id: int) -> RequestStatus | None:
        """Whether the newest token ends the request: end of sequence, then its own stop ids, then length.

        End and stop ids count from min_tokens on; length always does.
        """
        sampling = request.sampling
        if token_id in request.end_token_ids and request.num_output_tokens >= sampling.min_tokens:
            if sampling.ignore_eos or token_id not in self._eos_token_ids:
                request.stop_token_id = token_id
            return RequestStatus.FINISHED_STOPPED
        return RequestStatus.FINISHED_LENGTH if request.num_tokens >= request.max_num_tokens else None

    def _finish(self, request: Request, status: RequestStatus) -> None:
        """Free what the request holds. It stays in its queue until _drop_finished()."""
        request.status = status
        self._blocks.free(request)
        request.num_computed_tokens = 0
        del self._requests[request.request_id]

    def _drop_finished(self) -> None:
        self._running = [sequence for sequence in self._running if not sequence.request.status.is_finished]
        if len(self._running) + len(self._waiting) != len(self._requests):
            self._waiting = deque(request for request in self._waiting if not request.status.is_finished)
        if not self._waiting:
            self._blocked = None

    # --- statistics -----------------------------------------------------------------------------------------------

    def take_stats(self) -> SchedulerStats:
        """What happened since the last call."""
        stats, self._stats = self._stats, SchedulerStats()
        return stats

    def _book_blocked_time(self, now: float) -> None:
        """Book the time since the last call on what has kept the head of the queue waiting."""
        if self._blocked is not None and now > self._blocked_since:
            self._stats.note_blocked(self._blocked, now - self._blocked_since)
        self._blocked_since = now

    @property
    def next_step(self) -> int:
        """The number that the next step will have."""
        return self._last_step + 1

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_unfinished(self) -> int:
        return len(self._requests)

    @property
    def num_blocks_used(self) -> int:
        return self._blocks.num_used

    @property
    def num_blocks_total(self) -> int:
        return self._blocks.num_total

    @property
    def is_idle(self) -> bool:
        return not self._requests

    def remaining_tokens(self) -> int:
        """How many output tokens the unfinished requests may still ask for, at most."""
        return sum(request.max_num_tokens - request.num_tokens for request in self._requests.values())

    def unfinished_request_ids(self) -> list[str]:
        return list(self._requests)

    # --- invariants -----------------------------------------------------------------------------------------------

    def _check_one_request_fits(self, num_blocks: int) -> None:
        """Without this a request could wait for ever, or preempt itself for ever."""
        needed = self._blocks.blocks_for(self._max_model_len)
        if num_blocks < needed:
            raise ValueError(
                f"{num_blocks} KV blocks cannot hold one request of max_model_len {self._max_model_len}, "
                f"which needs {needed}"
            )

    def check_integrity(self) -> None:
        """Raise IntegrityError unless queues, states and block tables agree."""
        running = [sequence.request for sequence in self._running]
        queued = running + list(self._waiting)
        if len(queued) != len(self._requests) or any(self._requests.get(r.request_id) is not r for r in queued):
            raise IntegrityError(
                f"{len(running)} running and {len(self._waiting)} waiting requests are not "
                f"the {len(self._requests)} live ones"
            )
        for request in running:
            if request.status is not RequestStatus.RUNNING:
                raise IntegrityError(f"request {request.request_id} runs, but its status is {request.status.name}")
        for request in self._waiting:
            if request.status not in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
                raise IntegrityError(f"request {request.request_id} waits, but its status is {request.status.name}")
            if request.num_computed_tokens or request.block_ids:
                raise IntegrityError(f"request {request.request_id} waits, but holds computed tokens or blocks")
        for request in queued:
            if not request.num_computed_tokens <= request.num_tokens <= request.max_num_tokens:
                raise IntegrityError(
                    f"request {request.request_id} has {request.num_computed_tokens} computed of {request.num_tokens} "
                    f"tokens and may have {request.max_num_tokens}"
                )
        self._blocks.check_integrity(queued)

"""The token-budget scheduler: selects the next batch from waiting requests, running requests and free KV blocks.

Every request has `num_computed_tokens`, which catches up with its tokens; there are no phases. A step first serves
running requests in queue order; each decode gets its token before any prompt takes a share of the budget. Then the step
admits from the head of the queue, and the remaining budget goes to draft tokens. When blocks run out, a request later
in queue order is preempted: its blocks are freed and recomputed, or moved to the swap space and back.

Pure: time is a parameter; no tensors, no HTTP. The same class runs in the server, in tests and in the simulator.

Two rules guarantee progress. The first running request can take the blocks of all others, so every step advances it.
And the KV cache always holds one request of max_model_len, so a single request never lacks blocks.
"""

from bisect import insort
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

from trimtab_engine.errors import IntegrityError, InvalidRequest
from trimtab_engine.multimodal.items import check_spans
from trimtab_engine.scheduling.adapter import Adapter
from trimtab_engine.scheduling.batch import Batch, Preempted, ScheduledSequence
from trimtab_engine.scheduling.block_manager import BlockManager, CachedPrefix, Copies, ShrinkPlan
from trimtab_engine.scheduling.encoder_cache import EncoderCache, ItemReach
from trimtab_engine.scheduling.policy import SchedulingPolicy
from trimtab_engine.scheduling.preemption import VICTIM_CANDIDATES, PreemptionCosts, cheaper_mode, choose_victim
from trimtab_engine.scheduling.request import Request, RequestStatus
from trimtab_engine.scheduling.stats import BlockedReason, PreemptionReason, SchedulerStats
from trimtab_engine.scheduling.waiting_queue import RANKS, WaitingQueue

MAX_ADAPTER_LOOKAHEAD = 64
"""Number of requests after a head that waits for its adapter that are searched for one without adapter."""
PROMPT_STEP_DECAY = 0.9
"""Decay per prompt step of the longest recent prompt step time."""

Sampled = tuple[Request, int | list[int], RequestStatus | None]
"""(request, new token or list of tokens after drafts, finish status or None). A bare tuple, because one is created per
served token.
"""


@dataclass(frozen=True, slots=True)
class ResizeResult:
    """Work for the caller of resize_kv(): copy the KV of `swap_out` (device, host), then of `moves` (source,
    destination), then unmap the removed blocks.
    """

    moves: tuple[tuple[int, int], ...]
    preempted: list[Preempted]
    swap_out: Copies


class Scheduler:
    """Continuous batching with chunked prefill, prefix caching and preemption.

    Call schedule(), run the batch, call update(). Call add, abort, set_policy and resize_kv between steps; abort is
    also allowed between schedule() and update(). The next schedule() may be called before update(), to prepare a step
    while the previous one runs: the newest token of a request is then still unknown. With pipeline stages several steps
    are in flight, each with about its share of the running requests; a request with a pending token is in none of the
    others.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        policy: SchedulingPolicy,
        *,
        max_model_len: int,
        enable_chunked_prefill: bool = True,
        eos_token_ids: Iterable[int] = (),
        num_stages: int = 1,
        encoder: EncoderCache | None = None,
        max_adapters: int | None = None,
    ) -> None:
        """Create an idle scheduler.

        Args:
            encoder: Encoder cache for images and videos; None if the model computes none.
            max_adapters: Maximum number of different adapters in a step; None if requests have none.
        """
        self.costs = PreemptionCosts()
        """Measured preemption costs; replaced by the engine as it measures."""
        self._blocks = block_manager
        self._encoder = encoder
        self._max_adapters = max_adapters
        self._max_model_len = max_model_len
        self._chunked_prefill = enable_chunked_prefill
        self._num_stages = num_stages
        self._eos_token_ids = frozenset(eos_token_ids)
        self._requests: dict[str, Request] = {}
        self._num_added = 0
        self._waiting = WaitingQueue(policy.scheduling_policy)
        self._running: list[ScheduledSequence] = []
        """Running requests in queue order."""
        self._swap_out: Copies = []
        self._swap_in: Copies = []
        self._num_restored = 0
        """Number of `_swap_in` blocks that come from the host cache."""
        self._has_guesses = False
        """True if some running request has drafts that this step may verify."""
        self._last_step = 0
        self._last_landed = 0.0
        self._prompt_step_seconds = 0.0
        """Decayed maximum of recent prompt step times."""
        self._blocked: BlockedReason | None = None
        self._blocked_since = 0.0
        self._stats = SchedulerStats()
        self._check_one_request_fits(block_manager.num_total)
        self._policy = policy
        self.set_policy(policy)

    # --- changes between two steps --------------------------------------------------------------------------------

    def has_room_for(self, num_tokens: int, adapter: Adapter | None = None) -> bool:
        """Return True if the next schedule() would admit a request with `num_tokens` tokens after all waiting ones."""
        waiting, policy = self._waiting, self._policy
        if len(self._running) + len(waiting) >= policy.max_num_seqs:
            return False
        if adapter is not None and not self._can_run(adapter, self._adapters_in_use() | adapters_of(waiting)):
            return False
        if waiting.num_tokens >= policy.max_num_batched_tokens - len(self._running):
            return False
        if waiting and waiting.head.preempted_at is not None:
            return False
        ahead = self._blocks.blocks_for(waiting.num_tokens, len(waiting)) if waiting else 0
        spare = int(policy.watermark * self._blocks.num_total) if self._running or waiting else 0
        return self._blocks.can_allocate(num_tokens, spare=ahead + spare)

    def add(self, request: Request) -> None:
        """Queue a new request.

        Raises:
            InvalidRequest: If it could never run. Nothing else changes.
        """
        num_tokens, sampling = request.num_tokens, request.sampling
        if request.request_id in self._requests:
            raise InvalidRequest(f"request id {request.request_id!r} is in use; ids must be unique while alive")
        if num_tokens == 0:
            raise InvalidRequest("the prompt has no tokens; send at least one")
        self._check_length(request)
        if request.spans:
            self._check_items(request)
        request.max_num_tokens = min(request.num_prompt_tokens + sampling.max_tokens, self._max_model_len)
        if request.pooling is not None:
            request.max_num_tokens = request.num_prompt_tokens + 1  # its pooled result, which needs no block
        ends = frozenset() if sampling.ignore_eos else self._eos_token_ids
        request.end_token_ids = ends.union(sampling.stop_token_ids) if sampling.stop_token_ids else ends
        request.block_tables = self._blocks.new_tables()
        request.num_out_of_window = [0] * len(request.block_tables)
        request.order = self._num_added
        self._num_added += 1
        self._requests[request.request_id] = request
        self._waiting.add(request)
        self._stats.note_arrived(request.num_prompt_tokens)

    def _check_length(self, request: Request) -> None:
        """Raise InvalidRequest unless the prompt fits, and one token of output where it samples."""
        num_tokens, limit = request.num_tokens, self._max_model_len
        if request.pooling is not None:
            if num_tokens > limit:
                raise InvalidRequest(
                    f"the prompt has {num_tokens} tokens, but max_model_len is {limit}; shorten the prompt"
                )
            return
        if num_tokens >= limit:
            raise InvalidRequest(
                f"the prompt has {num_tokens} tokens, but max_model_len is {limit} and one token of "
                f"output needs room; shorten the prompt to {limit - 1} tokens or fewer"
            )
        if request.sampling.max_tokens < 1:
            raise InvalidRequest(f"max_tokens is {request.sampling.max_tokens}; it must be 1 or more")

    def _adapters_in_use(self) -> set[Adapter]:
        """Return the adapters of running requests, a superset of those in any step."""
        return adapters_of(sequence.request for sequence in self._running)

    def _can_run(self, adapter: Adapter | None, in_use: set[Adapter]) -> bool:
        """Return True if a step may use this adapter in addition to `in_use`."""
        return adapter is None or adapter in in_use or self._max_adapters is None or len(in_use) < self._max_adapters

    def _check_items(self, request: Request) -> None:
        """Raise InvalidRequest unless each of its images and videos can be computed in some step, and all of them in
        one where prompts are not cut.
        """
        if self._encoder is None:
            raise InvalidRequest("the prompt has images or videos, which this model does not support; send text only")
        check_spans(request.spans, request.num_prompt_tokens)
        most = self._encoder.largest_item
        items = {span.item.content_hash: span.item for span in request.spans}.values()
        largest = max(item.num_tokens for item in items)
        if largest > most:
            raise InvalidRequest(
                f"an image or video takes {largest} tokens, and the largest that is computed {most}; send a smaller one"
            )
        together = sum(item.num_tokens for item in items)
        if not self._chunked_prefill and together > most:
            raise InvalidRequest(
                f"the images and videos take {together} tokens together, and without chunked prefill a step computes "
                f"all of them, {most} tokens at most; send fewer or smaller ones"
            )

    def abort(
        self, request_ids: Iterable[str], status: RequestStatus = RequestStatus.FINISHED_ABORTED
    ) -> list[Request]:
        """End these requests, free their blocks, and return them. Unknown ids are ignored: those requests may just have
        finished. `status` is their final status (FINISHED_ERROR for a failed request).
        """
        aborted = []
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._finish(request, status)
                aborted.append(request)
        if aborted:
            self._drop_finished()
        return aborted

    def invalidate_blocks(self, request: Request) -> None:
        """Remove the request's blocks from the prefix cache: their content cannot be trusted."""
        self._blocks.invalidate_blocks(request)
        if self._encoder is not None:
            self._encoder.invalidate_blocks(request)

    def set_policy(self, policy: SchedulingPolicy) -> None:
        """Apply `policy` from the next step on. After lowering limits, running requests continue."""
        if not self._chunked_prefill and policy.max_num_batched_tokens < self._max_model_len:
            raise ValueError(
                f"without chunked prefill max_num_batched_tokens must be at least max_model_len "
                f"{self._max_model_len}; it is {policy.max_num_batched_tokens}"
            )
        if policy.scheduling_policy != self._policy.scheduling_policy:
            self._waiting.reorder(policy.scheduling_policy)
            self._running.sort(key=self._key)
        elif policy != self._policy:
            self._waiting.reset_late()
        if not policy.enable_prefix_caching and self._policy.enable_prefix_caching:
            self._blocks.reset_cache()
        if policy.num_speculative_tokens != self._policy.num_speculative_tokens:
            for sequence in self._running:
                sequence.quiet_until = 0
        self._policy = policy

    def resize_kv(self, num_blocks: int, now: float) -> ResizeResult:
        """Resize the KV cache to `num_blocks` blocks. To grow, map the blocks first; to shrink, copy and unmap
        afterwards. Requests that no longer fit are preempted. No step may be in flight.
        """
        self._check_one_request_fits(num_blocks)
        if num_blocks >= self._blocks.num_total:
            self._blocks.grow(num_blocks)
            return ResizeResult((), [], [])
        preempted: list[Preempted] = []
        while self._blocks.num_used > num_blocks:
            preempted.append(self._preempt_one_of(0, now, PreemptionReason.RESIZE))
            self._drop_preempted()
        holders = [sequence.request for sequence in self._running]
        plan = self._blocks.plan_shrink(num_blocks, holders)
        assert isinstance(plan, ShrinkPlan)  # the loop above made the used blocks fit
        self._blocks.apply_shrink(plan, holders)
        swap_out, self._swap_out = self._swap_out + self._blocks.take_offloaded(), []
        self._blocks.swap_space.settle()
        return ResizeResult(plan.moves, preempted, swap_out)

    def preempt_all(self, now: float) -> list[Preempted]:
        """Take everything off the device; all of it is computed again later. No step may be in flight."""
        preempted = [
            self._preempt(sequence.request, "recompute", PreemptionReason.RESET, now) for sequence in self._running
        ]
        self._running.clear()
        return preempted

    def reset_prefix_cache(self) -> None:
        """Forget cached content that no running request uses, in the KV cache and in the swap space."""
        self._blocks.reset_cache()

    def resize_swap_space(self, num_blocks: int) -> None:
        """Set the number of swap space blocks, within the cap. A value below current use takes effect as requests are
        swapped in.
        """
        self._blocks.swap_space.resize(num_blocks)

    def resize_host_cache(self, num_blocks: int) -> None:
        """Set the number of host blocks for evicted content, within the cap."""
        self._blocks.swap_space.resize_kept(num_blocks)

    # --- one step -------------------------------------------------------------------------------------------------

    def schedule(self, now: float, deferred: Collection[Request] = ()) -> Batch:
        """Choose the next step's work and give it its blocks. The batch is empty only when nothing can run.
        `deferred`: running requests that wait for a later step.
        """
        self._record_blocked_time(now)
        self._blocked = None
        if not (self._swap_out or self._swap_in):  # else the last batch was empty, and took no copies along
            self._blocks.swap_space.settle()
        if self._encoder is not None:
            self._encoder.begin_step()
        batch = Batch(self.next_step, [], 0, [], now, only_decodes=True)
        budget = self._schedule_running(batch, now, deferred)
        if self._waiting:
            if batch.preempted:
                self._blocked = BlockedReason.KV  # the head is a victim of this step: its blocks are just taken
            else:
                budget = self._admit(batch, budget, now)
        if self._has_guesses:
            budget = self._add_drafts(batch, budget)
        if batch.sequences:
            self._last_step += 1
            batch.num_tokens = self._policy.max_num_batched_tokens - budget
            offloaded = self._blocks.take_offloaded()
            batch.num_offloaded, batch.num_restored = len(offloaded), self._num_restored
            batch.swap_out, self._swap_out = self._swap_out + offloaded, []
            batch.swap_in, self._swap_in = self._swap_in, []
            self._num_restored = 0
            self._blocks.swap_space.settle()
            if self._encoder is not None:
                batch.displaced = self._encoder.take_displaced()
        return batch

    def update(self, batch: Batch, token_ids: Sequence[int | list[int]], now: float) -> list[Sampled]:
        """Append sampled tokens.

        Args:
            token_ids: For each request of batch.sampling, in order, its next token, or after drafts the list of
            accepted ones and one more.
            now: The time when the step ended.

        Returns:
            One entry per request, in the same order. A request that ended since schedule() has no token in its entry.
        """
        notable = self.process_output(batch, token_ids, now)
        pairs = zip(batch.sampling, token_ids, strict=True)
        return [notable.get(place) or (request, new, None) for place, (request, new) in enumerate(pairs)]

    def process_output(self, batch: Batch, token_ids: Sequence[int | list[int]], now: float) -> dict[int, Sampled]:
        """Do the same as update(), but return only requests that got other than one token or finished, by index in
        batch.sampling. Nearly all requests get one token and continue, so the result is short. Requests of
        batch.pooling end.
        """
        self._record_blocked_time(now)
        if batch.computes_prompts:
            began = max(batch.scheduled_at, self._last_landed)  # scheduled ahead, it waited for the step before it
            self._prompt_step_seconds = max(now - began, PROMPT_STEP_DECAY * self._prompt_step_seconds)
        self._last_landed = now
        notable: dict[int, Sampled] = {}
        running = RequestStatus.RUNNING
        any_finished = False
        num_delivered = len(token_ids)
        for place, (request, new) in enumerate(zip(batch.sampling, token_ids, strict=True)):
            if new.__class__ is int and request.status is running and new not in request.end_token_ids:
                tokens = request.token_ids
                if len(tokens) + 1 < request.max_num_tokens:
                    tokens.append(new)
                    request.num_pending_tokens -= 1
                    continue
            entry = self._process_request_output(request, new)
            _, delivered, status = entry
            if status is not None or isinstance(delivered, list):
                notable[place] = entry
                any_finished |= status is not None
                num_delivered += len(delivered) - 1 if isinstance(delivered, list) else 0
        self._stats.num_generation_tokens += num_delivered
        for request in batch.pooling:
            request.num_pending_tokens -= 1
            if not request.status.is_finished:
                self._finish(request, RequestStatus.FINISHED_STOPPED)
                any_finished = True
        if any_finished:
            self._drop_finished()
        return notable

    def _process_request_output(self, request: Request, new: int | list[int]) -> Sampled:
        """Handle sampled tokens of any request, including one that was preempted or has ended since."""
        request.num_pending_tokens -= 1
        if request.status.is_finished:
            return request, [], request.status
        if isinstance(new, list):
            status = self._append_verified(request, new)
        else:
            request.token_ids.append(new)
            status = self._finish_status(request, new)
            if status is not None:
                self._finish(request, status)
        self._waiting.update_token_count(request)
        return request, new, status

    def _append_verified(self, request: Request, token_ids: list[int]) -> RequestStatus | None:
        """Append the accepted drafts and the token after them, up to one that ends the request; later tokens are
        removed from `token_ids`. Rejected drafts do not count as computed.
        """
        num_rejected = len(request.draft_token_ids) + 1 - len(token_ids)
        request.draft_token_ids = []
        request.num_computed_tokens -= num_rejected
        self._blocks.truncate(request, request.num_computed_tokens)
        for index, token_id in enumerate(token_ids):
            request.token_ids.append(token_id)
            status = self._finish_status(request, token_id)
            if status is not None:
                del token_ids[index + 1 :]
                self._finish(request, status)
                return status
        return None

    def _schedule_running(self, batch: Batch, now: float, deferred: Collection[Request]) -> int:
        """Schedule the next tokens of every running request in queue order and return the remaining budget.

        A prefill leaves one token of the budget, and with pipeline stages a place in the step, for each decode after
        it: queue order decides preemption, not which decode waits for which prompt. Victims come after the request that
        needs their blocks, or are that request, so no victim was scheduled already.
        """
        budget = self._policy.max_num_batched_tokens
        block_size = self._blocks.block_size
        caching = self._policy.enable_prefix_caching
        schedule = batch.sequences.append
        sampling = batch.sampling.append
        preempted = batch.preempted
        is_staged = self._num_stages > 1
        share = -(-len(self._running) // self._num_stages)
        is_quiet = not is_staged and not self._policy.num_speculative_tokens
        owed: int | None = None  # decodes after the current request; None means not counted before the first prefill
        for index, sequence in enumerate(self._running):
            if budget <= 0:
                break
            request = sequence.request
            if deferred and request in deferred:
                continue
            start = request.num_computed_tokens
            if start < sequence.quiet_until and not preempted:
                sequence.start = start
                request.num_computed_tokens = start + 1
                request.num_pending_tokens += 1
                budget -= 1
                schedule(sequence)
                sampling(request)
                if owed is not None:
                    owed -= 1
                continue
            if preempted and request.status is not RequestStatus.RUNNING:
                continue
            if is_staged:
                if request.num_pending_tokens:
                    continue  # it is in flight
                if len(batch.sequences) >= share:
                    break
            num_known = len(request.token_ids) + request.num_pending_tokens
            num_left = num_known - start
            is_decode = num_left == 1 and start >= request.num_prompt_tokens
            if is_decode:  # the common case, kept short
                if num_known >= request.max_num_tokens:
                    continue  # the step in flight ends it
                if owed is not None:
                    owed -= 1
                end = start + 1
                samples = True
                if is_quiet:
                    sequence.quiet_until = min(start - start % block_size + block_size, request.max_num_tokens - 1)
            elif num_left <= 0:  # its newest token or the outcome of its drafts is still unknown
                continue
            else:
                owed = self._num_decodes_behind(index) if owed is None else owed
                if owed >= budget or (is_staged and len(batch.sequences) + owed >= share):
                    continue
                end = start + self._chunk_of(num_left, budget - owed)
                if request.spans:
                    reach = self._reach(request, start, end)
                    if reach.end == start:
                        continue
                    end = reach.end
                is_last = end == num_known
                samples = is_last and request.pooling is None
            if end > request.num_blocks * block_size:
                if not self._make_room(index, end, preempted, now):
                    break
                owed = None if preempted else owed  # fewer may follow it now
            if request.spans and not is_decode:
                self._take_items(batch, request, reach)
            if caching:  # a decode caches blocks filled earlier; a chunk caches blocks filled now
                if not is_decode:
                    self._blocks.cache_blocks(request, end)
                elif not start % block_size:
                    self._blocks.cache_blocks(request, start)
            if request.draft_token_ids or sequence.draft_token_ids:
                sequence.draft_token_ids = []
                self._has_guesses = True
            sequence.start = start
            sequence.num_tokens = end - start
            sequence.samples = samples
            request.num_computed_tokens = end
            budget -= end - start
            schedule(sequence)
            if is_decode:
                request.num_pending_tokens += 1
                sampling(request)
                continue
            batch.only_decodes = False
            batch.computes_prompts = True
            if is_last:
                _await_outcome(batch, request)
            self._stats.note_prefill(sequence)
        if preempted:
            self._drop_preempted()
        return budget

    def _chunk_of(self, num_left: int, budget: int) -> int:
        """Return the chunk size of a prefill in one step. A long prefill leaves room for others, if there are any.
        Without chunked prefill it is the whole prompt.
        """
        threshold = self._policy.long_prefill_token_threshold if self._chunked_prefill else 0
        if 0 < threshold < num_left and len(self._running) + len(self._waiting) > 1:
            num_left = threshold
        return min(num_left, budget)

    def _reach(self, request: Request, start: int, end: int) -> ItemReach:
        """Return how far a request with images or videos can be computed towards `end`."""
        assert self._encoder is not None  # else it was refused
        return self._encoder.reach(request, start, end)

    def _take_items(self, batch: Batch, request: Request, reach: ItemReach) -> None:
        """Schedule the items that the request needs in this step and hold them as long as it needs them."""
        assert self._encoder is not None
        missing = self._encoder.take(request, reach)
        batch.missing += missing
        self._stats.num_encoded_items += len(missing)
        self._stats.num_encoded_tokens += sum(item.num_tokens for _, item in missing)

    def _num_decodes_behind(self, index: int) -> int:
        """Return how many running requests after `index` take one token of this step."""
        is_staged = self._num_stages > 1
        count = 0
        for sequence in self._running[index + 1 :]:
            request = sequence.request
            if request.status is not RequestStatus.RUNNING or (is_staged and request.num_pending_tokens):
                continue
            num_known = len(request.token_ids) + request.num_pending_tokens
            is_decode = num_known - request.num_computed_tokens == 1 and num_known > request.num_prompt_tokens
            count += is_decode and num_known < request.max_num_tokens
        return count

    def _add_drafts(self, batch: Batch, budget: int) -> int:
        """Add drafts to the step within the remaining budget. Return the rest."""
        self._has_guesses = False
        batch.only_decodes = False
        for sequence in batch.sequences:
            if sequence.request.draft_token_ids:
                self._add_drafts_of(sequence, budget)
                budget -= len(sequence.draft_token_ids)
        return budget

    def _add_drafts_of(self, sequence: ScheduledSequence, budget: int) -> None:
        """Schedule as many of the request's drafts as budget, length and free blocks allow. Drafts never cause
        preemption. The last token of a request is never a draft.
        """
        request, end = sequence.request, sequence.start + sequence.num_tokens
        room = min(self._policy.num_speculative_tokens, budget, request.max_num_tokens - request.num_tokens - 1)
        num_drafts = max(0, min(len(request.draft_token_ids), room)) if end == request.num_tokens else 0
        if num_drafts and self._blocks.has_windows:  # drafts only get room that nothing else needs
            self._blocks.free_out_of_window(request, sequence.start)
        if num_drafts and not self._blocks.allocate(request, end + num_drafts):
            num_drafts = min(num_drafts, request.num_blocks * self._blocks.block_size - end)
        request.draft_token_ids = request.draft_token_ids[:num_drafts]
        sequence.draft_token_ids = request.draft_token_ids
        sequence.num_tokens += num_drafts
        request.num_computed_tokens += num_drafts

    def _make_room(self, index: int, num_tokens: int, preempted: list[Preempted], now: float) -> bool:
        """Grow the tables of the running request at `index`, preempting from there on. False: it had to go itself."""
        request = self._running[index].request
        if self._blocks.has_windows:
            self._blocks.free_out_of_window(request, request.num_computed_tokens)
        while not self._blocks.allocate(request, num_tokens):
            victim = self._preempt_one_of(index, now, PreemptionReason.CAPACITY)
            preempted.append(victim)
            if victim.request is request:
                return False
        return True

    def _admit(self, batch: Batch, budget: int, now: float) -> int:
        """Admit from the head of the queue while sequence slots, budget and blocks last. Return the remaining budget.

        The head is passed only while it waits for its adapter, and only by requests without an adapter, which do not
        prolong that wait. Requests whose adapter is in use do not pass it, so that some adapter becomes unused and the
        head can run. Before each admission late requests are moved from the head. A request is admitted only if all of
        its tokens fit into the free blocks, even if its first chunk is short: admitting more would end in preemption.
        """
        waiting, running, blocks, policy = self._waiting, self._running, self._blocks, self._policy
        is_too_late = partial(self._is_too_late, now) if policy.scheduling_policy == "deadline" else None
        in_use = set() if self._max_adapters is None else self._adapters_in_use()
        while waiting:
            if is_too_late is not None:
                self._stats.num_late += waiting.move_late_from_head(is_too_late)
            request = waiting.head
            if not self._can_run(request.adapter, in_use):
                passing = self._next_without_adapter()
                if passing is None:
                    break
                request = passing
            num_tokens = request.num_tokens
            if request.num_pending_tokens:  # preempted while a step in flight computes its newest token
                self._blocked = BlockedReason.KV
                break
            if len(running) >= policy.max_num_seqs:
                self._blocked = BlockedReason.SEQS
                break
            if budget <= 0:
                self._blocked = BlockedReason.TOKENS
                break
            cached = self._find_cached(request)
            held = blocks.find_swapped(request) if request.is_swapped_out else [] if cached is None else cached.blocks
            start = request.num_computed_tokens if cached is None else cached.num_blocks * blocks.block_size
            if num_tokens - start > budget and not self._chunked_prefill:
                self._blocked = BlockedReason.TOKENS
                break
            spare = int(policy.watermark * blocks.num_total) if running else 0
            if not blocks.can_allocate(num_tokens, held, spare=spare):
                self._blocked = BlockedReason.KV
                break
            end = start + self._chunk_of(num_tokens - start, budget)
            if request.spans:
                reach = self._reach(request, start, end)
                if reach.end == start or (reach.end < end and not self._chunked_prefill):
                    self._blocked = BlockedReason.ENCODER
                    break
                end = reach.end
                self._take_items(batch, request, reach)
            waiting.take(request)
            self._take_on(request, cached, start, end, now)
            if request.adapter is not None:
                in_use.add(request.adapter)
            is_last = end == num_tokens
            sequence = ScheduledSequence(request, start, end - start, is_last and request.pooling is None)
            self._insert_running(sequence)
            batch.sequences.append(sequence)
            if is_last:
                _await_outcome(batch, request)
            budget -= end - start
            batch.only_decodes = False
            batch.computes_prompts = True
            self._stats.note_prefill(sequence)
        if waiting and not self._can_run(waiting.head.adapter, in_use):
            self._blocked = BlockedReason.ADAPTERS
        return budget

    def _next_without_adapter(self) -> Request | None:
        """Return the first request shortly after the head that has no adapter and is not late."""
        near = islice(self._waiting, MAX_ADAPTER_LOOKAHEAD)
        return next((r for r in near if r.adapter is None and not r.is_late), None)

    def _is_too_late(self, now: float, request: Request) -> bool:
        """Return True if a waiting, never admitted request can no longer meet its TTFT target. Its prefix cache hits
        are looked up only if they decide the answer.
        """
        if request.first_scheduled_time is not None:
            return False
        policy, num_tokens, seconds = self._policy, request.num_prompt_tokens, self._prompt_step_seconds
        waited = now - request.arrival_time
        num_steps = self._num_steps(num_tokens)
        if num_steps == 1 or not seconds or not self._uses_prefix_cache(request):
            return policy.is_too_late(waited, num_tokens, num_steps * seconds)
        if not policy.is_too_late(waited, num_tokens, num_steps * seconds):
            return False
        if policy.is_too_late(waited, num_tokens, seconds):
            return True
        num_cached = self._blocks.find_cached(request).num_blocks * self._blocks.block_size
        return policy.is_too_late(waited, num_tokens, self._num_steps(num_tokens - num_cached) * seconds)

    def _num_steps(self, num_tokens: int) -> int:
        """Return the minimum number of steps for `num_tokens` prompt tokens."""
        return -(-num_tokens // self._chunk_of(num_tokens, self._policy.max_num_batched_tokens))

    def _find_cached(self, request: Request) -> CachedPrefix | None:
        """Return the cached prefix of the waiting request. None if it does not use the prefix cache."""
        return (
            self._blocks.find_cached(request)
            if not request.is_swapped_out and self._uses_prefix_cache(request)
            else None
        )

    def _uses_prefix_cache(self, request: Request) -> bool:
        """Return True if the request may use cached blocks. Prompt logprobs and mean pooling need every token to be
        computed.
        """
        needs_all = request.pooling is not None and request.pooling.needs_all_tokens
        return self._policy.enable_prefix_caching and not request.scores_prompt and not needs_all

    def _take_on(self, request: Request, cached: CachedPrefix | None, start: int, end: int, now: float) -> None:
        """Start a waiting request: allocate its blocks up to `end` and record its admission."""
        blocks = self._blocks
        is_new = request.first_scheduled_time is None
        if request.is_swapped_out:
            self._swap_in += blocks.swap_in(request)
        elif cached is not None:
            restored = blocks.share(request, cached)
            self._swap_in += restored
            self._num_restored += len(restored)
            if is_new:
                self._record_cache_lookup(request, start, cached.num_host_blocks * blocks.block_size)
        grown = blocks.allocate(request, end)
        assert grown  # guaranteed by can_allocate
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = end
        if self._policy.enable_prefix_caching:
            # Requests that are admitted next may share these blocks in the step that computes them, and their rows may
            # come first. So every executor must write K and V of all rows of a step in a layer before any of the
            # layer's attention reads them (layers/attention.py says where each one does).
            blocks.cache_blocks(request, end)
        if is_new:
            request.first_scheduled_time = now
        if request.preempted_at is not None:
            self._stats.preempt_stall_seconds.append(now - request.preempted_at)
            request.preempted_at = None

    def _record_cache_lookup(self, request: Request, num_cached: int, num_host_cached: int) -> None:
        """Count the lookup of a new request: `num_cached` tokens found, `num_host_cached` of them in the host cache,
        which is queried for tokens not found on the device.
        """
        request.num_cached_tokens, request.num_host_cached_tokens = num_cached, num_host_cached
        on_device = num_cached - num_host_cached
        self._stats.prefix_cache_queries += request.num_tokens
        self._stats.prefix_cache_hits += on_device
        if self._blocks.swap_space.num_kept_total:
            self._stats.host_cache_queries += request.num_tokens - on_device
            self._stats.host_cache_hits += num_host_cached

    def _insert_running(self, sequence: ScheduledSequence) -> None:
        """Insert into `running` in queue order: a preempted or passed request precedes later ones."""
        running = self._running
        if not running or self._key(running[-1]) <= self._key(sequence):
            running.append(sequence)
        else:
            insort(running, sequence, key=self._key)

    def _key(self, sequence: ScheduledSequence) -> tuple[float, ...]:
        return self._waiting.key(sequence.request)

    # --- preemption and the end of requests -----------------------------------------------------------------------

    def _preempt_one_of(self, first: int, now: float, reason: PreemptionReason) -> Preempted:
        """Preempt a request that is served after the running request at index `first`, or that one if it is the last.

        Of those, the cheapest of the last few: under `priority` of the lowest priority among them. It stays in
        `running` until _drop_preempted().
        """
        after = [s.request for s in self._running[first + 1 :] if s.request.status is RequestStatus.RUNNING]
        candidates = after[-VICTIM_CANDIDATES:] or [self._running[first].request]
        rank = RANKS[self._policy.scheduling_policy]
        candidates = [request for request in candidates if rank(request) == rank(candidates[-1])]
        victim = choose_victim(candidates, self._blocks, self.costs, self._policy.preemption_mode)
        mode = cheaper_mode(victim, self._blocks, self.costs, self._policy.preemption_mode)
        return self._preempt(victim, mode, reason, now)

    def _preempt(self, request: Request, mode: str, reason: PreemptionReason, now: float) -> Preempted:
        """Free the request's blocks and queue it again. A full swap space falls back to recompute."""
        num_tokens = request.num_computed_tokens
        if self._policy.enable_prefix_caching:
            self._blocks.cache_blocks(request, min(num_tokens, request.num_tokens))
        copies = self._blocks.swap_out(request) if mode == "swap" else None
        if copies is None:
            mode = "recompute"
            self._blocks.free(request)
            request.num_ever_computed_tokens = max(request.num_ever_computed_tokens, num_tokens)
            request.num_computed_tokens = 0
        else:
            self._swap_out += copies
        if self._encoder is not None:
            self._encoder.release(request)
        request.draft_token_ids = []
        request.num_preemptions += 1
        request.preempted_at = now
        request.status = RequestStatus.PREEMPTED
        self._waiting.add(request)
        preempted = Preempted(request, mode, reason.value, num_tokens)
        self._stats.note_preempted(preempted)
        return preempted

    def _drop_preempted(self) -> None:
        self._running = [s for s in self._running if s.request.status is RequestStatus.RUNNING]

    def _finish_status(self, request: Request, token_id: int) -> RequestStatus | None:
        """Return the finish status after the newest token, or None: end of sequence, then its own stop ids, then
        length. End and stop ids count from min_tokens on; length always counts.
        """
        sampling = request.sampling
        if token_id in request.end_token_ids and request.num_output_tokens >= sampling.min_tokens:
            if sampling.ignore_eos or token_id not in self._eos_token_ids:
                request.stop_token_id = token_id
            return RequestStatus.FINISHED_STOPPED
        return RequestStatus.FINISHED_LENGTH if request.num_tokens >= request.max_num_tokens else None

    def _finish(self, request: Request, status: RequestStatus) -> None:
        """Free the request's resources. A waiting request leaves the queue; a running one stays until
        _drop_finished().
        """
        if request.status is not RequestStatus.RUNNING:
            self._waiting.remove(request)
        if self._policy.enable_prefix_caching and status is not RequestStatus.FINISHED_ERROR:
            self._blocks.cache_blocks(request, min(request.num_computed_tokens, request.num_tokens - 1))
        request.status = status
        self._blocks.free(request)
        self._blocks.swap_space.release(request.host_block_ids)
        request.num_computed_tokens = 0
        if self._encoder is not None:
            self._encoder.release(request)
        request.spans = ()  # patches of images; steps in flight have their own copies
        del self._requests[request.request_id]

    def _drop_finished(self) -> None:
        if len(self._running) + len(self._waiting) != len(self._requests):
            self._running = [sequence for sequence in self._running if not sequence.request.status.is_finished]
        if not self._waiting:
            self._blocked = None

    # --- statistics -----------------------------------------------------------------------------------------------

    def adapter_names(self) -> tuple[list[str], list[str]]:
        """Return the adapter names of running requests and of waiting requests."""
        return sorted(a.name for a in self._adapters_in_use()), sorted(a.name for a in adapters_of(self._waiting))

    def take_stats(self) -> SchedulerStats:
        """Return the counts since the last call."""
        stats, self._stats = self._stats, SchedulerStats()
        return stats

    def _record_blocked_time(self, now: float) -> None:
        """Add the time since the last call to the reason why the head of the queue waits."""
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
    def num_waiting_late(self) -> int:
        """Number of requests in the late line (policy `deadline`)."""
        return self._waiting.num_late

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens of waiting requests that remain to be computed."""
        return self._waiting.num_tokens

    def oldest_arrival(self) -> float | None:
        """Arrival time of the oldest waiting request. None if none waits."""
        return self._waiting.oldest_arrival

    @property
    def blocks(self) -> BlockManager:
        """The block manager, for reading."""
        return self._blocks

    @property
    def policy(self) -> SchedulingPolicy:
        return self._policy

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

    def running_requests(self) -> list[Request]:
        """Return running requests in queue order."""
        return [sequence.request for sequence in self._running]

    def remaining_tokens(self) -> int:
        """Return the maximum number of output tokens that unfinished requests may still generate."""
        return sum(map(_longest_output, self._requests.values()))

    def longest_remaining(self) -> int:
        """Return the maximum number of output tokens that a single request may still generate."""
        return max(map(_longest_output, self._requests.values()), default=0)

    def unfinished(self) -> list[Request]:
        """Return waiting and running requests in arrival order, for reading."""
        return list(self._requests.values())

    def running_with_grammar(self) -> list[Request]:
        """Return the running requests with a grammar, in queue order."""
        return [sequence.request for sequence in self._running if sequence.request.grammar is not None]

    def unfinished_request_ids(self) -> list[str]:
        return list(self._requests)

    # --- invariants -----------------------------------------------------------------------------------------------

    def _check_one_request_fits(self, num_blocks: int) -> None:
        """Raise unless one request of max_model_len fits. Otherwise a request could wait or preempt itself forever."""
        needed = self._blocks.blocks_for(self._max_model_len)
        if num_blocks < needed:
            raise ValueError(
                f"{num_blocks} KV blocks cannot hold one request of max_model_len {self._max_model_len}, "
                f"which needs {needed}"
            )

    def check_integrity(self) -> None:
        """Raise IntegrityError unless queues, states and block tables agree."""
        running = [sequence.request for sequence in self._running]
        queued = [*running, *self._waiting]
        if len(queued) != len(self._requests) or any(self._requests.get(r.request_id) is not r for r in queued):
            raise IntegrityError(
                f"{len(running)} running and {len(self._waiting)} waiting requests are not "
                f"the {len(self._requests)} live requests"
            )
        for request in running:
            if request.status is not RequestStatus.RUNNING:
                raise IntegrityError(f"request {request.request_id} runs, but its status is {request.status.name}")
        for request in self._waiting:
            if request.status not in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
                raise IntegrityError(f"request {request.request_id} waits, but its status is {request.status.name}")
            if any(request.block_tables) or (request.num_computed_tokens and not request.is_swapped_out):
                raise IntegrityError(f"request {request.request_id} waits, but holds computed tokens or blocks")
        self._waiting.check_integrity()
        if self._running != sorted(self._running, key=self._key):
            raise IntegrityError("the running requests are not in the order of the queue")
        late = [request.request_id for request in running if request.is_late]
        if late:
            raise IntegrityError(f"requests {late} run and are late")
        if self._waiting.num_late and self._policy.scheduling_policy != "deadline":
            raise IntegrityError(f"{self._waiting.num_late} are late under {self._policy.scheduling_policy}")
        if self._max_adapters is not None and len(self._adapters_in_use()) > self._max_adapters:
            raise IntegrityError(f"{len(self._adapters_in_use())} adapters run; a step may have {self._max_adapters}")
        for request in queued:
            num_known = request.num_tokens + request.num_pending_tokens
            if request.num_pending_tokens:
                num_known += len(request.draft_token_ids)  # as many as the step in flight verifies
            if not request.num_computed_tokens <= num_known <= request.max_num_tokens:
                raise IntegrityError(
                    f"request {request.request_id} has {request.num_computed_tokens} computed of {request.num_tokens} "
                    f"tokens and may have {request.max_num_tokens}"
                )
        self._blocks.check_integrity(queued)
        if self._encoder is not None:
            self._encoder.check_integrity(running)


def _await_outcome(batch: Batch, request: Request) -> None:
    """Mark that the step produces the request's next token or pooled result."""
    request.num_pending_tokens += 1
    (batch.sampling if request.pooling is None else batch.pooling).append(request)


def _longest_output(request: Request) -> int:
    """Return how many output tokens the request may still generate."""
    return 0 if request.pooling is not None else request.max_num_tokens - request.num_tokens


def adapters_of(requests: Iterable[Request]) -> set[Adapter]:
    """Return the adapters that the requests use."""
    return {request.adapter for request in requests if request.adapter is not None}

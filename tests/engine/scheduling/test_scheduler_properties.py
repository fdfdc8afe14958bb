"""Property tests of the scheduler with randomized operations.

Requests are added, aborted, preempted, swapped, shared, drafted, scheduled ahead and resized. Each request must end
with its undisturbed tokens, and each pooling request with its vector.

The executor is a stub without arithmetic but with a real KV cache: it writes each scheduled token into the slots of all
groups' block tables, and the next token is a function of the tokens read back. A wrong table, a missed copy, a block
freed too early or a skipped token gives wrong tokens.
"""

import random
import zlib
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import get_args

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from trimtab_engine.config.live.patch import LiveConfig
from trimtab_engine.config.live.values import Envelope, LiveValues
from trimtab_engine.multimodal.items import MultiModalItem, Span
from trimtab_engine.runner.block_table_slots import BlockTableSlots
from trimtab_engine.sampling.pooling import add_up, finished
from trimtab_engine.scheduling.adapter import Adapter
from trimtab_engine.scheduling.batch import Batch
from trimtab_engine.scheduling.block_manager import BlockManager, Copies
from trimtab_engine.scheduling.encoder_cache import EncoderCache, key_of, spans_between
from trimtab_engine.scheduling.policy import PreemptionMode, QueueOrder, SchedulingPolicy
from trimtab_engine.scheduling.pooling import Pooling, PoolingMethod
from trimtab_engine.scheduling.request import Request, RequestStatus
from trimtab_engine.scheduling.sampling import Sampling
from trimtab_engine.scheduling.scheduler import Sampled, Scheduler
from trimtab_engine.scheduling.step_inputs import in_token_order, pooled_tokens
from trimtab_engine.scheduling.swap_space import SwapSpace
from trimtab_modelspec.attention_window import FULL_ATTENTION, AttentionWindow
from trimtab_modelspec.kv_groups import uniform_group
from trimtab_modelspec.memory_formula import MemoryFormula

BLOCK_SIZE = 4
MAX_MODEL_LEN = 32
BLOCKS_PER_REQUEST = MAX_MODEL_LEN // BLOCK_SIZE
CAP_BLOCKS = 4 * BLOCKS_PER_REQUEST
VOCABULARY = 24
EOS = 2


def next_token(prefix: list[int]) -> int:
    """The model: any function of the whole prefix will do."""
    return zlib.crc32(bytes(prefix)) % VOCABULARY


def mark_of(adapter: Adapter | None) -> int:
    """Return an adapter's offset to each token before the model, by its content."""
    return 0 if adapter is None else VOCABULARY * adapter.digest[0]


def undisturbed(prompt: list[int], sampling: Sampling, adapter: Adapter | None = None) -> tuple[list[int], str]:
    """Return the output of a single request with unlimited KV cache, computed without the scheduler."""
    tokens, mark = list(prompt), mark_of(adapter)
    while True:
        token = next_token([mark + seen for seen in tokens])
        tokens.append(token)
        num_output = len(tokens) - len(prompt)
        ends = (token == EOS and not sampling.ignore_eos) or token in sampling.stop_token_ids
        if ends and num_output >= sampling.min_tokens:
            return tokens[len(prompt) :], "stop"
        if num_output >= sampling.max_tokens or len(tokens) >= MAX_MODEL_LEN:
            return tokens[len(prompt) :], "length"


def pooled_undisturbed(prompt: list[int], method: PoolingMethod) -> float:
    """Return the pooled result of a single prompt: a hidden state is the token that would follow."""
    states = [next_token(prompt[: end + 1]) for end in range(len(prompt))]
    return states[-1] if method == "last" else sum(states) / len(states)


@dataclass
class Work:
    """A copy of a scheduled sequence, because the scheduler reuses its own for the next step."""

    request: Request
    tables: list[tuple[list[int], int]]
    """Per group: its blocks, and the number of freed blocks before them."""
    start: int
    end: int
    samples: bool
    drafts: list[int]
    pooled: tuple[int, int] | None
    """First pooled token and their number."""


class ReceivedTables:
    """Receiver of block-table updates for one group."""

    def __init__(self, num_table_slots: int) -> None:
        self.table_slots = BlockTableSlots(num_table_slots)
        self.rows: list[list[int]] = [[] for _ in range(num_table_slots)]
        self.num_told = 0

    def tell(self, tables: list[list[int]], counts: list[int]) -> list[list[int]]:
        """The first blocks of these tables, as they know them."""
        table_slots, news = self.table_slots.table_slot(tables, np.array(counts, np.int64))
        for new in news:
            self.rows[new.table_slot][new.first :] = tables[new.place][new.first : new.last]
            self.num_told += new.last - new.first
        told = [self.rows[table_slot][:count] for table_slot, count in zip(table_slots.tolist(), counts, strict=True)]
        assert told == [table[:count] for table, count in zip(tables, counts, strict=True)]
        return told


@dataclass
class Prepared:
    batch: Batch
    work: list[Work]
    rows: list[Work]
    """Rows in token order."""
    sums: list[tuple[Request, int, int, float]] = field(default_factory=list)
    """(request, position, how many, sum of hidden states), once it has run."""

    @classmethod
    def of(cls, batch: Batch, told: list[ReceivedTables]) -> "Prepared":
        """Return the prepared step; tables are read through their updates."""
        tables: list[list[list[int]]] = []
        for group, who in enumerate(told):
            gone = [s.request.num_out_of_window[group] for s in batch.sequences]
            ends = [-(-(s.start + s.num_tokens) // BLOCK_SIZE) for s in batch.sequences]
            own = [s.request.block_tables[group] for s in batch.sequences]
            tables.append(who.tell(own, [end - first for end, first in zip(ends, gone, strict=True)]))
        work = [
            Work(
                s.request,
                [(own[place], gone) for own, gone in zip(tables, s.request.num_out_of_window, strict=True)],
                s.start,
                s.start + s.num_tokens,
                s.samples,
                s.draft_token_ids,
                pooled_tokens(s),
            )
            for place, s in enumerate(batch.sequences)
        ]
        assert [w.request for w in work if w.samples] == batch.sampling
        work_of = {id(s): own for s, own in zip(batch.sequences, work, strict=True)}
        rows = [work_of[id(s)] for s in in_token_order(batch.sequences, max_decode_tokens=MAX_MODEL_LEN)]
        return cls(batch, work, rows)


Block = list[tuple[int, int] | None]
"""(group, token) of each slot."""


@dataclass
class StubExecutor:
    """A KV cache of token ids, one list per mapped block, and a swap space like it."""

    attention_windows: tuple[AttentionWindow, ...]
    blocks: dict[int, Block] = field(default_factory=dict)
    host: dict[int, Block] = field(default_factory=dict)
    embeddings: dict[bytes, list[int]] = field(default_factory=dict)
    """What it keeps of images, by key."""
    slice_rows: int | None = None
    """None: all tokens of a step are written before any is read, as every executor must do (Scheduler._take_on). A
    number: the step is computed in slices of so many tokens, each of which is written and read before the next."""

    def resize(self, num_blocks: int, moves: Iterable[tuple[int, int]] = (), swap_out: Copies | None = None) -> None:
        self.swap(swap_out or [], [])
        for source, destination in moves:
            self.blocks[destination] = list(self.blocks[source])
        self.blocks = {block: self.blocks.get(block, [None] * BLOCK_SIZE) for block in range(num_blocks)}

    def swap(self, swap_out: Copies, swap_in: Copies) -> None:
        """What goes may go in any order, and what comes may come in any; what comes does so afterwards."""
        assert len({host for _, host in swap_out}) == len(swap_out)
        assert len({device for _, device in swap_in}) == len(swap_in)
        for device, host in reversed(swap_out):
            self.host[host] = list(self.blocks[device])
        for host, device in swap_in:
            self.blocks[device] = list(self.host[host])

    def run(self, prepared: Prepared) -> list[int | list[int]]:
        """Copy, write every scheduled token as a layer does before it reads any, then attend and sample from what is
        there.
        """
        batch = prepared.batch
        assert batch.num_offloaded <= len(batch.swap_out)
        assert batch.num_restored <= len(batch.swap_in)
        self.swap(batch.swap_out, batch.swap_in)
        for key in batch.displaced:
            del self.embeddings[key]
        for key, image in batch.missing:
            assert key not in self.embeddings  # it is computed once, as long as it is kept
            self.embeddings[key] = seen_of(image)
        sampled: dict[int, int | list[int]] = {}
        for rows in self.slices(prepared.rows):
            for work, first, last in rows:
                self.write(work, first, last)
            for work, _, last in rows:
                self.read(work, last)
                if last < work.end:
                    continue
                if work.pooled:
                    prepared.sums.append((work.request, *work.pooled, self.hidden_sum(work, *work.pooled)))
                if work.samples:
                    sampled[id(work)] = self.sample(work)
        return [sampled[id(work)] for work in prepared.work if work.samples]

    def slices(self, rows: list[Work]) -> list[list[tuple[Work, int, int]]]:
        """Parts (work, first position, last position + 1) that are written before any of them is read."""
        size = self.slice_rows or sum(work.end - work.start for work in rows) or 1
        parts: list[list[tuple[Work, int, int]]] = [[]]
        room = size
        for work in rows:
            first = work.start
            while first < work.end:
                if not room:
                    parts.append([])
                    room = size
                last = min(work.end, first + room)
                parts[-1].append((work, first, last))
                room -= last - first
                first = last
        return parts

    def write(self, work: Work, first: int, last: int) -> None:
        """Put the tokens of these positions into their slots, in all groups."""
        tokens = work.request.token_ids + work.drafts
        for span in spans_between(work.request.spans, work.start, work.end):
            tokens[span.offset : span.end] = self.embeddings[key_of(work.request, span.item)]
        if work.request.status.is_finished:
            tokens.append(0)  # it ended while its newest token was in flight: that one was dropped
        mark = mark_of(work.request.adapter)
        for group, (table, num_out_of_window) in enumerate(work.tables):
            for position in range(first, last):
                block = self.blocks[table[position // BLOCK_SIZE - num_out_of_window]]
                block[position % BLOCK_SIZE] = (group, mark + tokens[position])

    def hidden_sum(self, work: Work, position: int, count: int) -> float:
        """Of tokens that this step computes, from what was there as it began and what it has written."""
        whole = self.read(work, position + count)
        return sum(next_token(whole[: end + 1]) for end in range(position, position + count))

    def sample(self, work: Work) -> int | list[int]:
        newest = work.end - len(work.drafts)
        sampled = next_token(self.read(work, newest))
        if not work.drafts:
            return sampled
        accepted = [sampled]
        for index, draft in enumerate(work.drafts):
            if draft != accepted[-1]:
                break
            accepted.append(next_token(self.read(work, newest + index + 1)))
        return accepted

    def read(self, work: Work, end: int) -> list[int]:
        """All tokens up to `end`, from a group that sees all. What the step sees of other groups must be the same."""
        seen = [self.read_group(work, group, end) for group in range(len(self.attention_windows))]
        whole = next(
            tokens
            for tokens, attention_window in zip(seen, self.attention_windows, strict=True)
            if attention_window.window is None
        )
        for tokens in seen:
            assert tokens == whole[end - len(tokens) :]
        return whole

    def read_group(self, work: Work, group: int, end: int) -> list[int]:
        table, num_out_of_window = work.tables[group]
        first = self.attention_windows[group].first_seen(work.start)
        assert first >= num_out_of_window * BLOCK_SIZE, f"{work.request.request_id} let go of what it still sees"
        held = [self.blocks[table[p // BLOCK_SIZE - num_out_of_window]][p % BLOCK_SIZE] for p in range(first, end)]
        tokens = [slot[1] for slot in held if slot is not None and slot[0] == group]
        assert len(tokens) == len(held), f"{work.request.request_id} reads what was never computed"
        return tokens


@dataclass
class Standing:
    """Running requests before a step, in queue order: those that need one token, and those that need more."""

    decodes: list[Request]
    prefills: list[Request]

    @classmethod
    def of(cls, scheduler: Scheduler) -> "Standing":
        decodes, prefills = [], []
        for request in scheduler.running_requests():
            num_known = request.num_tokens + request.num_pending_tokens
            is_decode = request.num_computed_tokens == num_known - 1 >= request.num_prompt_tokens
            if is_decode and num_known < request.max_num_tokens:
                decodes.append(request)
            elif request.num_computed_tokens < num_known - (num_known >= request.max_num_tokens):
                prefills.append(request)
        return cls(decodes, prefills)

    def check(self, batch: Batch, budget: int) -> None:
        """Check that decodes come first: with sufficient budget each gets its token or is preempted by an earlier one;
        otherwise the first ones in the queue do and nothing else is computed. Drafts come last.
        """
        served = {s.request: s for s in batch.sequences}
        left_out = [r for r in self.decodes if r not in served and r.status is RequestStatus.RUNNING]
        if not batch.preempted and left_out:
            assert len(self.decodes) > budget
            assert [s.request for s in batch.sequences] == self.decodes[:budget]
        if any(s.draft_token_ids for s in batch.sequences):
            assert not left_out
            assert all(r in served or r.spans for r in self.prefills if r.status is RequestStatus.RUNNING)


@dataclass
class Turns:
    """Fairness: no decode waits while a later one of its kind is served twice."""

    waits: dict[Request, dict[Request, int]] = field(default_factory=dict)
    """Per skipped decode: how often each later one was served since."""

    def note(self, before: Standing, batch: Batch, scheduler: Scheduler) -> None:
        served = {s.request for s in batch.sequences}
        order = {request: place for place, request in enumerate(scheduler.running_requests())}
        left_out = [r for r in before.decodes if r not in served and r in order]
        self.waits = {request: self.waits.get(request, {}) for request in left_out}
        for request, times in self.waits.items():
            for later in before.decodes:
                if later in served and order.get(later, -1) > order[request]:
                    times[later] = times.get(later, 0) + 1
                    assert times[later] < 2, f"{request.request_id} waits for {later.request_id}"


IMAGES = tuple(
    MultiModalItem("image", bytes([number] * 32), num_tokens, (1, 1, num_tokens), None)
    for number, num_tokens in enumerate([3, 5, 5, 8])
)
PLACEHOLDER = VOCABULARY - 1


def seen_of(image: MultiModalItem) -> list[int]:
    """Return the vision encoder's stub output for an image."""
    return [100 + 10 * image.content_hash[0] + row for row in range(image.num_tokens)]


def a_prompt_with(parts: list[int | MultiModalItem]) -> tuple[list[int], tuple[Span, ...]]:
    """Return a prompt with images between runs of text tokens, as far as they fit."""
    prompt: list[int] = []
    spans: list[Span] = []
    for part in parts:
        if isinstance(part, MultiModalItem) and len(prompt) + part.num_tokens < MAX_MODEL_LEN:
            spans.append(Span(len(prompt), part))
            prompt += [PLACEHOLDER] * part.num_tokens
        elif isinstance(part, int):
            prompt = [*prompt, *range(part)][: MAX_MODEL_LEN - 1]
    return prompt, tuple(spans)


PARTS = st.lists(st.one_of(st.integers(1, 6), st.sampled_from(IMAGES)), min_size=1, max_size=8)
SAMPLING = st.builds(
    lambda max_tokens, min_tokens, stop, ignore_eos: Sampling(
        max_tokens=max_tokens, min_tokens=min(min_tokens, max_tokens), stop_token_ids=stop, ignore_eos=ignore_eos
    ),
    max_tokens=st.integers(1, MAX_MODEL_LEN + 4),
    min_tokens=st.integers(0, 6),
    stop=st.lists(st.integers(0, VOCABULARY - 1), max_size=2, unique=True).map(tuple),
    ignore_eos=st.booleans(),
)
PROMPTS = st.builds(
    lambda shared, own: [*range(shared), *own][: MAX_MODEL_LEN - 1],  # many begin alike
    shared=st.integers(0, 20),
    own=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=MAX_MODEL_LEN - 1),
)
POLICIES = st.builds(
    SchedulingPolicy,
    max_num_seqs=st.integers(1, 6),
    max_num_batched_tokens=st.integers(6, 2 * MAX_MODEL_LEN),
    long_prefill_token_threshold=st.sampled_from([0, 0, 3, 7]),
    watermark=st.sampled_from([0.0, 0.0, 0.1]),
    scheduling_policy=st.sampled_from(get_args(QueueOrder)),
    ttft_target=st.sampled_from([2.0, 6.0, 30.0]),  # a step takes a second
    ttft_target_per_prompt_token=st.sampled_from([0.0, 0.2, 1.0]),
    preemption_mode=st.sampled_from(["recompute", "swap", "auto"]),
    enable_prefix_caching=st.sampled_from([True, True, False]),
    num_speculative_tokens=st.sampled_from([0, 2, 5]),
)


class SchedulerMachine(RuleBasedStateMachine):
    """Rules are engine operations between two steps, and steps; teardown runs all requests to their end."""

    attention_windows: tuple[AttentionWindow, ...] = (FULL_ATTENTION,)
    max_step_tokens = 2 * MAX_MODEL_LEN
    encoder: EncoderCache | None = None
    max_adapters: int | None = None
    num_table_slots = 12
    """Table slots; a step has at most as many sequences."""

    @initialize(
        blocks=st.integers(BLOCKS_PER_REQUEST, CAP_BLOCKS),
        policy=POLICIES,
        chunked=st.booleans(),
        host_blocks=st.sampled_from([0, 3, 12, 40]),
        kept_blocks=st.sampled_from([0, 0, 3, 12, 80]),
    )
    def start(
        self,
        blocks: int,
        policy: SchedulingPolicy,
        chunked: bool,
        host_blocks: int,
        cap: int = CAP_BLOCKS,
        kept_blocks: int = 0,
    ) -> None:
        self.chunked = chunked or self.max_step_tokens < MAX_MODEL_LEN
        self.manager = BlockManager(
            self.in_all_groups(blocks),
            self.in_all_groups(cap),
            BLOCK_SIZE,
            SwapSpace(host_blocks, host_blocks, kept_blocks, kept_blocks),
            attention_windows=self.attention_windows,
            max_num_batched_tokens=self.max_step_tokens,
        )
        self.scheduler = Scheduler(
            self.manager,
            self.possible(policy),
            max_model_len=MAX_MODEL_LEN,
            enable_chunked_prefill=self.chunked,
            eos_token_ids=[EOS],
            encoder=self.encoder,
            max_adapters=self.max_adapters,
        )
        self.executor = StubExecutor(self.attention_windows)
        self.executor.resize(self.manager.num_total)
        self.now = 0.0
        self.alive: dict[str, tuple[Request, list[int]]] = {}
        self.delivered: dict[str, list[int]] = {}
        self.num_added = 0
        self.num_accepted_drafts = self.num_pooled = 0
        self.kept_blocks, self.num_restored = kept_blocks, 0
        self.turns = Turns()
        self.told = [ReceivedTables(self.num_table_slots) for _ in self.attention_windows]

    def in_all_groups(self, blocks: int) -> int:
        """Convert a number of full-attention blocks to blocks of these groups: one request's need, plus the rest for
        each group.
        """
        needed = sum(
            attention_window.num_blocks(MAX_MODEL_LEN, BLOCK_SIZE, self.max_step_tokens)
            for attention_window in self.attention_windows
        )
        return needed + (blocks - BLOCKS_PER_REQUEST) * len(self.attention_windows)

    def possible(self, policy: SchedulingPolicy) -> SchedulingPolicy:
        """Return the policy with budgets that the other values allow."""
        least = policy.max_num_seqs if self.chunked else max(policy.max_num_seqs, MAX_MODEL_LEN)
        most = min(policy.max_num_batched_tokens, self.max_step_tokens)
        return replace(policy, max_num_batched_tokens=max(most, least))

    @rule(prompt=PROMPTS, sampling=SAMPLING, priority=st.integers(0, 2), salt=st.sampled_from(["", "", "a tenant"]))
    def add(self, prompt: list[int], sampling: Sampling, priority: int = 0, salt: str = "") -> None:
        request = Request.of(
            f"r{self.num_added}", prompt, sampling, arrival_time=self.now, priority=priority, cache_salt=salt
        )
        self.num_added += 1
        self.scheduler.add(request)
        self.alive[request.request_id] = (request, prompt)
        self.delivered[request.request_id] = []

    @rule(
        prompt=PROMPTS,
        method=st.sampled_from(["last", "mean"]),
        is_longest=st.booleans(),
        priority=st.integers(0, 2),
        salt=st.sampled_from(["", "", "a tenant"]),
    )
    def pool(
        self, prompt: list[int], method: PoolingMethod, is_longest: bool = False, priority: int = 0, salt: str = ""
    ) -> None:
        """A prompt that is to become a vector. It needs no room for a token of output."""
        prompt = [*prompt, *range(MAX_MODEL_LEN)][:MAX_MODEL_LEN] if is_longest else prompt
        pooling = Pooling(method, normalize=False)
        request = Request.of(
            f"r{self.num_added}",
            prompt,
            Sampling(),
            arrival_time=self.now,
            priority=priority,
            cache_salt=salt,
            pooling=pooling,
        )
        self.num_added += 1
        self.scheduler.add(request)
        self.alive[request.request_id] = (request, prompt)

    @rule(prompts=st.lists(PROMPTS, min_size=4, max_size=8))
    def add_a_crowd(self, prompts: list[list[int]]) -> None:
        """More than fits, so that it has to be preempted."""
        for prompt in prompts:
            self.add(prompt, Sampling(max_tokens=MAX_MODEL_LEN, ignore_eos=True))

    @rule()
    def add_an_urgent_prompt(self) -> None:
        """Add a request with the highest priority that is too long for one step with the others."""
        self.add([1] * (MAX_MODEL_LEN - 2), Sampling(max_tokens=2), priority=-1)

    @rule(seed=st.integers(0, 99))
    def abort(self, seed: int) -> None:
        ids = list(self.alive)[seed % 7 :: 3]
        for request in self.scheduler.abort(ids):
            assert request.status is RequestStatus.FINISHED_ABORTED
            del self.alive[request.request_id]

    @rule(policy=POLICIES)
    def steer(self, policy: SchedulingPolicy) -> None:
        self.scheduler.set_policy(self.possible(policy))

    @rule(blocks=st.integers(BLOCKS_PER_REQUEST, CAP_BLOCKS))
    def resize(self, blocks: int) -> None:
        blocks = self.in_all_groups(blocks)
        if blocks > self.manager.num_total:
            self.executor.resize(blocks)
        result = self.scheduler.resize_kv(blocks, self.now)
        self.executor.resize(blocks, result.moves, result.swap_out)
        assert self.manager.num_total == blocks

    @rule(share=st.sampled_from([0.0, 0.5, 1.0]))
    def resize_host_cache(self, share: float) -> None:
        self.scheduler.resize_host_cache(int(self.kept_blocks * share))

    @rule()
    def forget(self) -> None:
        self.scheduler.reset_prefix_cache()

    @rule(share=st.sampled_from([0.0, 0.5, 1.0]))
    def resize_swap_space(self, share: float) -> None:
        self.scheduler.resize_swap_space(int(share * self.manager.swap_space.cap))

    @rule()
    def reset(self) -> None:
        self.scheduler.preempt_all(self.now)
        self.scheduler.reset_prefix_cache()

    @rule(count=st.integers(1, 8), seed=st.integers(0, 99))
    def steps(self, count: int, seed: int = 0) -> None:
        for step in range(count):
            self.guess(random.Random(seed + step))
            self.step()

    @precondition(lambda self: self.alive)
    @rule(seed=st.integers(0, 99))
    def step_with_an_abort_in_it(self, seed: int) -> None:
        prepared = self.schedule()
        sampled = self.executor.run(prepared)
        self.abort(seed)
        self.process_output(prepared, sampled)

    @precondition(lambda self: self.alive)
    @rule(count=st.integers(2, 12), aborts=st.sampled_from([None, None, 3]))
    def steps_scheduled_ahead(self, count: int, aborts: int | None) -> None:
        """Schedule each step while the previous one is in flight."""
        flight = self.schedule()
        for step in range(count):
            ahead = self.schedule(in_flight=True)
            sampled = self.executor.run(flight)
            if step == aborts:
                self.abort(step)
            self.process_output(flight, sampled)
            self.scheduler.check_integrity()
            flight = ahead
        self.process_output(flight, self.executor.run(flight))

    def guess(self, rng: random.Random) -> None:
        """Give running requests right and wrong drafts, as a proposer does; none at depth 0."""
        if not self.scheduler.policy.num_speculative_tokens:
            return
        for request, prompt in self.alive.values():
            goes_on = request.status is RequestStatus.RUNNING and request.pooling is None
            if goes_on and request.num_computed_tokens == request.num_tokens - 1:
                after = undisturbed(prompt, request.sampling, request.adapter)[0][request.num_output_tokens :]
                wrong = [rng.randrange(VOCABULARY) for _ in range(2)]
                request.draft_token_ids = (after[: rng.randrange(5)] + wrong)[: rng.randrange(7)]

    def step(self) -> None:
        prepared = self.schedule()
        self.process_output(prepared, self.executor.run(prepared))
        self.scheduler.check_integrity()

    def process_output(self, prepared: Prepared, sampled: list[int | list[int]]) -> None:
        """Process output as the engine does: sums are stored first, then the scheduler ends requests."""
        for request, position, count, hidden_sum in prepared.sums:
            add_up((request, position, count), np.array([hidden_sum], np.float32))
        ending = [request for request in prepared.batch.pooling if not request.status.is_finished]
        self.deliver(self.scheduler.update(prepared.batch, sampled, self.now))
        for request in ending:
            assert request.status is RequestStatus.FINISHED_STOPPED
            assert request.pooling is not None
            _, prompt = self.alive.pop(request.request_id)
            vector = np.frombuffer(finished(request.hidden_sum, request.num_summed_tokens, request.pooling), "<f4")
            assert vector == pytest.approx([pooled_undisturbed(prompt, request.pooling.method)])
            self.num_pooled += 1

    def schedule(self, in_flight: bool = False) -> Prepared:
        was_running = self.scheduler.num_running
        self.now += 1.0
        before = Standing.of(self.scheduler)
        batch = self.scheduler.schedule(self.now)
        policy = self.scheduler.policy
        self.num_restored += batch.num_restored
        before.check(batch, policy.max_num_batched_tokens)
        self.turns.note(before, batch, self.scheduler)
        assert batch.num_tokens == sum(s.num_tokens for s in batch.sequences) <= policy.max_num_batched_tokens
        assert in_flight or bool(batch.sequences) == bool(self.alive)  # something always runs
        assert self.scheduler.num_running <= max(policy.max_num_seqs, was_running)
        if not self.chunked:
            assert all(s.samples or s.ends_pooling for s in batch.sequences)
        return Prepared.of(batch, self.told)

    def deliver(self, sampled: list[Sampled]) -> None:
        for request, token, status in sampled:
            new = [token] if isinstance(token, int) else token
            if not new:
                continue  # it ended while the step was in flight
            self.num_accepted_drafts += len(new) - 1
            tokens = self.delivered[request.request_id]
            tokens += new
            expected, reason = undisturbed(self.alive[request.request_id][1], request.sampling, request.adapter)
            assert tokens == expected[: len(tokens)]
            assert (status is not None) == (len(tokens) == len(expected))
            if status is not None:
                assert status.value == reason
                del self.alive[request.request_id]

    @invariant()
    def integrity(self) -> None:
        self.scheduler.check_integrity()
        assert self.scheduler.num_unfinished == len(self.alive)
        assert self.manager.num_free + self.manager.num_used == self.manager.num_total

    def teardown(self) -> None:
        """The first running request moves in every step, so there are at most as many steps as tokens to compute."""
        if not hasattr(self, "scheduler"):
            return
        bound = sum(request.max_num_tokens for request, _ in self.alive.values())
        for _ in range(bound):
            if not self.alive:
                break
            self.step()
        assert not self.alive
        assert self.scheduler.is_idle
        assert self.manager.num_used == 0
        assert self.manager.swap_space.num_used == 0


class MachineWithKVGroups(SchedulerMachine):
    """Layers of two kinds: two groups see a window that is no multiple of a block, one sees all."""

    attention_windows = (AttentionWindow(6), FULL_ATTENTION, AttentionWindow(6))


class MachineWithChunkedAttention(SchedulerMachine):
    """The same where positions are cut into chunks."""

    attention_windows = (AttentionWindow(6, is_chunked=True), FULL_ATTENTION, AttentionWindow(6, is_chunked=True))


class MachineWithShortSteps(MachineWithKVGroups):
    """Steps that are short enough for windows to hold less than a request: the KV cache counts on that."""

    max_step_tokens = 8


class MachineWithImages(MachineWithKVGroups):
    """Prompts with images under a small encoder cache and budget. Placeholders are identical, so a request with wrong
    blocks or embeddings produces wrong tokens.
    """

    @initialize(
        blocks=st.integers(BLOCKS_PER_REQUEST, CAP_BLOCKS),
        policy=POLICIES,
        host_blocks=st.sampled_from([0, 3, 12, 40]),
        kept_blocks=st.sampled_from([0, 0, 3, 12, 80]),
        capacity=st.integers(8, 20),
        step_budget=st.integers(8, 20),
    )
    def start_with(
        self,
        blocks: int,
        policy: SchedulingPolicy,
        host_blocks: int,
        kept_blocks: int,
        capacity: int,
        step_budget: int,
    ) -> None:
        self.encoder = EncoderCache(capacity, step_budget)
        SchedulerMachine.start(self, blocks, policy, True, host_blocks, kept_blocks=kept_blocks)

    start = None  # type: ignore[assignment]  # start_with is the one that hypothesis calls

    @rule(parts=PARTS, sampling=SAMPLING, priority=st.integers(0, 2), salt=st.sampled_from(["", "", "a tenant"]))
    def add_with_images(
        self, parts: list[int | MultiModalItem], sampling: Sampling, priority: int = 0, salt: str = ""
    ) -> None:
        prompt, spans = a_prompt_with([*parts, 1])
        request = Request.of(
            f"r{self.num_added}",
            prompt,
            sampling,
            arrival_time=self.now,
            priority=priority,
            cache_salt=salt,
            spans=spans,
        )
        self.num_added += 1
        self.scheduler.add(request)
        seen = list(prompt)
        for span in spans:
            seen[span.offset : span.end] = seen_of(span.item)
        self.alive[request.request_id] = (request, seen)
        self.delivered[request.request_id] = []

    @rule(crowd=st.lists(PARTS, min_size=4, max_size=8))
    def add_a_crowd_with_images(self, crowd: list[list[int | MultiModalItem]]) -> None:
        for parts in crowd:
            self.add_with_images(parts, Sampling(max_tokens=MAX_MODEL_LEN, ignore_eos=True))

    def schedule(self, in_flight: bool = False) -> Prepared:
        """Check that step budget and cache size are never exceeded; the executor only has computed, not displaced
        embeddings.
        """
        prepared = super().schedule(in_flight)
        assert self.encoder is not None
        assert sum(image.num_tokens for _, image in prepared.batch.missing) <= self.encoder.step_budget
        assert self.encoder.num_kept_tokens <= self.encoder.capacity
        return prepared


class MachineWithAdapters(MachineWithKVGroups):
    """Requests with adapters under max_loras, reloaded with other weights under the same name. Keys and values differ
    by adapter, so wrong cache hits produce wrong tokens.
    """

    @initialize(
        blocks=st.integers(BLOCKS_PER_REQUEST, CAP_BLOCKS),
        policy=POLICIES,
        chunked=st.booleans(),
        host_blocks=st.sampled_from([0, 3, 12, 40]),
        kept_blocks=st.sampled_from([0, 0, 3, 12, 80]),
        max_adapters=st.integers(1, 2),
    )
    def start_with(
        self,
        blocks: int,
        policy: SchedulingPolicy,
        chunked: bool,
        host_blocks: int,
        kept_blocks: int,
        max_adapters: int,
    ) -> None:
        self.max_adapters = max_adapters
        self.loaded = [Adapter(name, slot, bytes([1 + slot])) for slot, name in enumerate("abc")]
        SchedulerMachine.start(self, blocks, policy, chunked, host_blocks, kept_blocks=kept_blocks)

    start = None  # type: ignore[assignment]  # start_with is the one that hypothesis calls

    @rule(slot=st.integers(0, 2), content=st.integers(1, 9))
    def load_again(self, slot: int, content: int) -> None:
        """Reload an adapter; running requests keep the old one, whose slot is irrelevant to the scheduler."""
        self.loaded[slot] = replace(self.loaded[slot], digest=bytes([content]))

    @rule(prompt=PROMPTS, sampling=SAMPLING, slot=st.integers(0, 2), priority=st.integers(0, 2))
    def add_with_adapter(self, prompt: list[int], sampling: Sampling, slot: int, priority: int = 0) -> None:
        request = Request.of(
            f"r{self.num_added}",
            prompt,
            sampling,
            arrival_time=self.now,
            priority=priority,
            adapter=self.loaded[slot],
        )
        self.num_added += 1
        self.scheduler.add(request)
        self.alive[request.request_id] = (request, prompt)
        self.delivered[request.request_id] = []

    @rule(prompts=st.lists(PROMPTS, min_size=3, max_size=6))
    def add_a_crowd_with_adapters(self, prompts: list[list[int]]) -> None:
        for place, prompt in enumerate(prompts):
            self.add_with_adapter(prompt, Sampling(max_tokens=MAX_MODEL_LEN, ignore_eos=True), place % 3)

    def schedule(self, in_flight: bool = False) -> Prepared:
        """Check that no step exceeds max_loras, and that no request with an adapter passes one that waits."""
        assert self.max_adapters is not None
        running = set(self.scheduler.running_requests())
        prepared = super().schedule(in_flight)
        served = [s.request for s in prepared.batch.sequences]
        assert len({r.adapter for r in served if r.adapter is not None}) <= self.max_adapters
        if self.scheduler.policy.scheduling_policy == "fcfs":
            waiting = [r.order for r, _ in self.alive.values() if r.adapter and r.status is not RequestStatus.RUNNING]
            admitted = [r.order for r in served if r.adapter and r not in running]
            assert max(admitted, default=-1) < min(waiting, default=self.num_added)
        return prepared


LIVES = settings(max_examples=300, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
TestSchedulerLives = SchedulerMachine.TestCase
TestSchedulerLives.settings = LIVES
TestLivesOverGroups = MachineWithKVGroups.TestCase
TestLivesOverGroups.settings = settings(LIVES, max_examples=150)
TestLivesOverChunks = MachineWithChunkedAttention.TestCase
TestLivesOverChunks.settings = settings(LIVES, max_examples=100)
TestLivesWithImages = MachineWithImages.TestCase
TestLivesWithImages.settings = settings(LIVES, max_examples=100)
TestLivesWithAdapters = MachineWithAdapters.TestCase
TestLivesWithAdapters.settings = settings(LIVES, max_examples=60)
TestLivesOfShortSteps = MachineWithShortSteps.TestCase
TestLivesOfShortSteps.settings = settings(LIVES, max_examples=150)


@pytest.mark.parametrize("kind", [SchedulerMachine, MachineWithKVGroups, MachineWithShortSteps])
@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize(("mode", "host_blocks"), [("recompute", 0), ("swap", 40), ("swap", 3), ("auto", 40)])
def test_small_kv_cache_preempts_and_keeps_tokens(
    mode: PreemptionMode, host_blocks: int, chunked: bool, kind: type[SchedulerMachine]
) -> None:
    lives = kind()
    policy = SchedulingPolicy(max_num_seqs=6, max_num_batched_tokens=MAX_MODEL_LEN, preemption_mode=mode)
    lives.start(BLOCKS_PER_REQUEST, policy, chunked, host_blocks)
    for index in range(12):
        lives.add([index, 3, 1], Sampling(max_tokens=28, ignore_eos=True))
    lives.teardown()
    preempted = lives.scheduler.take_stats().preempted
    assert sum(preempted.get("recompute", {}).values()) > (10 if host_blocks < 12 else -1)
    assert sum(preempted.get("swap", {}).values()) > (0 if host_blocks else -1)


@pytest.mark.parametrize("kind", [SchedulerMachine, MachineWithKVGroups, MachineWithShortSteps])
@pytest.mark.parametrize("method", ["last", "mean"])
@pytest.mark.parametrize(("mode", "host_blocks"), [("recompute", 0), ("swap", 40), ("auto", 3)])
def test_preempted_pooling_keeps_its_result(
    mode: PreemptionMode, host_blocks: int, method: PoolingMethod, kind: type[SchedulerMachine]
) -> None:
    """Decodes before it in the queue take its blocks between two of its chunks."""
    lives = kind()
    policy = SchedulingPolicy(max_num_seqs=6, max_num_batched_tokens=MAX_MODEL_LEN, preemption_mode=mode)
    lives.start(BLOCKS_PER_REQUEST + 2, replace(policy, long_prefill_token_threshold=3), True, host_blocks)
    for index in range(12):
        lives.add([index, 3, 1], Sampling(max_tokens=28, ignore_eos=True))
        lives.pool([index, *range(12 + index)], method)
        lives.steps(3)
    lives.teardown()
    preempted = lives.scheduler.take_stats().preempted
    assert lives.num_pooled == 12
    assert sum(sum(reasons.values()) for reasons in preempted.values()) > 3


@pytest.mark.parametrize("kind", [SchedulerMachine, MachineWithKVGroups, MachineWithShortSteps])
@pytest.mark.parametrize(("kept_blocks", "host_blocks"), [(4, 0), (400, 0), (400, 40), (20, 3)])
def test_host_cache_restores_keep_tokens(kept_blocks: int, host_blocks: int, kind: type[SchedulerMachine]) -> None:
    """Conversations that take turns, in a KV cache that holds about one of them."""
    lives = kind()
    policy = SchedulingPolicy(
        max_num_seqs=2, max_num_batched_tokens=MAX_MODEL_LEN, preemption_mode="swap" if host_blocks else "recompute"
    )
    lives.start(BLOCKS_PER_REQUEST + 2, policy, True, host_blocks, kept_blocks=kept_blocks)
    for turn in range(24):
        lives.add([turn % 5, *range(17)], Sampling(max_tokens=6, ignore_eos=True))
        lives.steps(7)
    lives.teardown()
    stats = lives.scheduler.take_stats()
    if kept_blocks >= 400:
        assert lives.num_restored > 20
        assert stats.host_cache_hits > 80
    assert stats.host_cache_queries >= stats.host_cache_hits


@pytest.mark.parametrize("kind", [SchedulerMachine, MachineWithKVGroups])
@pytest.mark.parametrize("slice_rows", [None, 3, 8])
def test_executor_with_slices_reads_unwritten_shared_blocks(
    slice_rows: int | None, kind: type[SchedulerMachine]
) -> None:
    """The second prompt shares two blocks with the first in the step that computes them, and its last token comes
    first in the step. An executor that attends slice by slice reads these blocks before it has written them.
    """
    lives = kind()
    policy = SchedulingPolicy(max_num_seqs=6, max_num_batched_tokens=MAX_MODEL_LEN)
    lives.start(CAP_BLOCKS, policy, chunked=True, host_blocks=0)
    lives.executor.slice_rows = slice_rows
    for _ in range(2):
        lives.add(list(range(2 * BLOCK_SIZE + 1)), Sampling(max_tokens=4, ignore_eos=True))
    with nullcontext() if slice_rows is None else pytest.raises(AssertionError, match="never computed"):
        lives.steps(1)
    if slice_rows is None:
        assert lives.scheduler.take_stats().prefix_cache_hits == 2 * BLOCK_SIZE
        lives.teardown()


def test_decode_sends_one_block_per_filled_block() -> None:
    """Every table is sent whole once; a step without table growth sends nothing."""
    lives = SchedulerMachine()
    policy = SchedulingPolicy(max_num_seqs=4, max_num_batched_tokens=MAX_MODEL_LEN)
    lives.start(CAP_BLOCKS, policy, chunked=True, host_blocks=0)
    for index in range(4):
        lives.add([index, 3, 1], Sampling(max_tokens=28, ignore_eos=True))
    told = []
    while lives.alive:
        before = lives.told[0].num_told
        lives.steps(1)
        told.append(lives.told[0].num_told - before)
    assert sum(told) == 4 * -(-30 // BLOCK_SIZE)  # the last of 31 tokens is never computed
    assert max(told) == 4
    assert told.count(0) == len(told) - -(-30 // BLOCK_SIZE)


def test_right_guesses_are_accepted_and_shorten_the_run() -> None:
    lives = SchedulerMachine()
    policy = SchedulingPolicy(max_num_seqs=6, max_num_batched_tokens=MAX_MODEL_LEN, num_speculative_tokens=5)
    lives.start(CAP_BLOCKS, policy, chunked=True, host_blocks=0)
    for index in range(4):
        lives.add([index, 3, 1], Sampling(max_tokens=28, ignore_eos=True))
    lives.steps(30)
    assert lives.num_accepted_drafts > 30
    lives.teardown()


def test_a_thousand_random_patches_under_load_fail_no_request() -> None:
    """Applied as the engine does: each accepted PATCH sets limits and resizes the KV cache between two steps."""
    rng = random.Random(7)
    formula = a_formula()
    live = LiveConfig(
        Envelope(
            max_num_seqs_cap=12,
            max_num_batched_tokens_cap=64,
            gpu_memory_utilization_cap="0.95",
            max_model_len=MAX_MODEL_LEN,
            block_size=BLOCK_SIZE,
            enable_chunked_prefill=True,
            min_utilization=formula.min_utilization,
            num_blocks_cap=formula.at("0.95").num_blocks,
        ),
        LiveValues(max_num_seqs=6, max_num_batched_tokens=32, gpu_memory_utilization="0.5"),
    )
    lives = SchedulerMachine()
    policy = SchedulingPolicy(max_num_seqs=6, max_num_batched_tokens=32)
    lives.start(formula.num_blocks, policy, chunked=True, host_blocks=0, cap=live.envelope.num_blocks_cap)
    accepted = 0
    for _ in range(1000):
        while len(lives.alive) < 16:
            lives.add([rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 20))], Sampling(max_tokens=24))
        patch = {
            name: value
            for name, value in {
                "max_num_seqs": rng.randint(-1, 14),
                "max_num_batched_tokens": rng.randint(1, 70),
                "gpu_memory_utilization": round(rng.uniform(0.1, 1.0), 3),
            }.items()
            if rng.random() < 0.5
        }
        live, status, _ = live.patch(patch)
        accepted += status == 200
        values = live.values
        lives.steer(
            SchedulingPolicy(max_num_seqs=values.max_num_seqs, max_num_batched_tokens=values.max_num_batched_tokens)
        )
        lives.resize(formula.at(values.gpu_memory_utilization).num_blocks)
        lives.step()
    assert accepted > 300
    stats = lives.scheduler.take_stats()
    assert stats.preempted["recompute"]["resize"] > 50
    lives.teardown()


def a_formula() -> MemoryFormula:
    """A device of 2,000 bytes where a block takes 40: 8 blocks for one request, 47 at the cap."""
    return MemoryFormula(
        device_bytes=2000,
        gpu_memory_utilization="0.5",
        other_bytes=0,
        weights_bytes=0,
        activations_peak_bytes=0,
        workspace_bytes=0,
        graphs_bytes=0,
        communicator_bytes=0,
        kv_groups=(uniform_group(1, 1, 5),),
        kv_dtype_bytes=1,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=2048,
    )

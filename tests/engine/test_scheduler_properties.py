"""Whole random lives of a scheduler: whatever is added, aborted, limited and resized, each request ends with the tokens
that it would have had undisturbed.

The executor here is a stub without arithmetic but with a real KV cache: it writes each scheduled token into the slot
that the block table names, and the next token is a function of what it reads back. A wrong table, a missed copy or a
skipped token gives wrong tokens.
"""

import random
import zlib
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from trimtab_engine.batch import Batch
from trimtab_engine.block_manager import BlockManager
from trimtab_engine.live_config import Envelope, LiveConfig, LiveValues
from trimtab_engine.memory import MemoryFormula
from trimtab_engine.messages import SamplingParams
from trimtab_engine.request import Request, RequestStatus
from trimtab_engine.scheduler import Sampled, Scheduler

BLOCK_SIZE = 4
MAX_MODEL_LEN = 32
BLOCKS_PER_REQUEST = MAX_MODEL_LEN // BLOCK_SIZE
CAP_BLOCKS = 4 * BLOCKS_PER_REQUEST
VOCABULARY = 24
EOS = 2


def next_token(prefix: list[int]) -> int:
    """The model: any function of the whole prefix will do."""
    return zlib.crc32(bytes(prefix)) % VOCABULARY


def undisturbed(prompt: list[int], sampling: SamplingParams) -> tuple[list[int], str]:
    """What a request alone on an endless KV cache yields, written down without the scheduler."""
    tokens = list(prompt)
    while True:
        token = next_token(tokens)
        tokens.append(token)
        num_output = len(tokens) - len(prompt)
        ends = (token == EOS and not sampling.ignore_eos) or token in sampling.stop_token_ids
        if ends and num_output >= sampling.min_tokens:
            return tokens[len(prompt) :], "stop"
        if num_output >= sampling.max_tokens or len(tokens) >= MAX_MODEL_LEN:
            return tokens[len(prompt) :], "length"


@dataclass
class StubExecutor:
    """A KV cache of token ids, one list per mapped block."""

    blocks: dict[int, list[int | None]] = field(default_factory=dict)

    def resize(self, num_blocks: int, moves: tuple[tuple[int, int], ...]) -> None:
        for source, destination in moves:
            self.blocks[destination] = list(self.blocks[source])
        self.blocks = {block: self.blocks.get(block, [None] * BLOCK_SIZE) for block in range(num_blocks)}

    def run(self, batch: Batch) -> list[int]:
        """Write every scheduled token, then sample from what the cache holds."""
        sampled = []
        for sequence in batch.sequences:
            request, end = sequence.request, sequence.start + sequence.num_tokens
            assert sequence.num_tokens > 0
            for position in range(sequence.start, end):
                block = request.block_ids[position // BLOCK_SIZE]
                self.blocks[block][position % BLOCK_SIZE] = request.token_ids[position]
            if sequence.samples:
                assert end == request.num_tokens
                sampled.append(next_token([self.read(request, position) for position in range(end)]))
        return sampled

    def read(self, request: Request, position: int) -> int:
        token = self.blocks[request.block_ids[position // BLOCK_SIZE]][position % BLOCK_SIZE]
        assert token is not None, f"position {position} of {request.request_id} was never computed"
        return token


SAMPLING = st.builds(
    lambda max_tokens, min_tokens, stop, ignore_eos: SamplingParams(
        max_tokens=max_tokens, min_tokens=min(min_tokens, max_tokens), stop_token_ids=stop, ignore_eos=ignore_eos
    ),
    max_tokens=st.integers(1, MAX_MODEL_LEN + 4),
    min_tokens=st.integers(0, 6),
    stop=st.lists(st.integers(0, VOCABULARY - 1), max_size=2, unique=True).map(tuple),
    ignore_eos=st.booleans(),
)
PROMPTS = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=MAX_MODEL_LEN - 1)


class SchedulerLives(RuleBasedStateMachine):
    """Rules are what the engine may do between two steps, and a step itself; teardown runs everything to its end."""

    @initialize(
        blocks=st.integers(BLOCKS_PER_REQUEST, CAP_BLOCKS),
        seqs=st.integers(1, 6),
        tokens=st.integers(6, 2 * MAX_MODEL_LEN),
        chunked=st.booleans(),
    )
    def start(self, blocks: int, seqs: int, tokens: int, chunked: bool, cap: int = CAP_BLOCKS) -> None:
        self.chunked = chunked
        self.seqs = seqs
        self.tokens = tokens if chunked else max(tokens, MAX_MODEL_LEN)
        self.manager = BlockManager(blocks, cap, BLOCK_SIZE)
        self.scheduler = Scheduler(
            self.manager,
            max_num_seqs=self.seqs,
            max_num_batched_tokens=self.tokens,
            max_model_len=MAX_MODEL_LEN,
            enable_chunked_prefill=chunked,
            eos_token_ids=[EOS],
        )
        self.executor = StubExecutor()
        self.executor.resize(blocks, ())
        self.now = 0.0
        self.alive: dict[str, tuple[Request, list[int]]] = {}
        self.delivered: dict[str, list[int]] = {}
        self.num_added = 0

    @rule(prompt=PROMPTS, sampling=SAMPLING)
    def add(self, prompt: list[int], sampling: SamplingParams) -> None:
        request = Request.of(f"r{self.num_added}", prompt, sampling, arrival_time=self.now)
        self.num_added += 1
        self.scheduler.add(request)
        self.alive[request.request_id] = (request, prompt)
        self.delivered[request.request_id] = []

    @rule(seed=st.integers(0, 99))
    def abort(self, seed: int) -> None:
        ids = list(self.alive)[seed % 7 :: 3]
        for request in self.scheduler.abort(ids):
            assert request.status is RequestStatus.FINISHED_ABORTED
            del self.alive[request.request_id]

    @rule(seqs=st.integers(1, 6), tokens=st.integers(6, 2 * MAX_MODEL_LEN))
    def set_limits(self, seqs: int, tokens: int) -> None:
        self.seqs = seqs
        self.tokens = tokens if self.chunked else max(tokens, MAX_MODEL_LEN)
        self.scheduler.set_limits(max_num_seqs=self.seqs, max_num_batched_tokens=self.tokens)

    @rule(blocks=st.integers(BLOCKS_PER_REQUEST, CAP_BLOCKS))
    def resize(self, blocks: int) -> None:
        if blocks > self.manager.num_total:
            self.executor.resize(blocks, ())
        result = self.scheduler.resize_kv(blocks, self.now)
        self.executor.resize(blocks, result.moves)
        assert self.manager.num_total == blocks

    @rule(count=st.integers(1, 8))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    @precondition(lambda self: self.alive)
    @rule(seed=st.integers(0, 99))
    def step_with_an_abort_in_it(self, seed: int) -> None:
        batch = self.schedule()
        sampled = self.executor.run(batch)
        self.abort(seed)
        self.deliver(self.scheduler.update(batch, sampled, self.now))

    def step(self) -> None:
        batch = self.schedule()
        self.deliver(self.scheduler.update(batch, self.executor.run(batch), self.now))
        self.scheduler.check_integrity()

    def schedule(self) -> Batch:
        was_running = self.scheduler.num_running
        self.now += 1.0
        batch = self.scheduler.schedule(self.now)
        assert batch.num_tokens == sum(s.num_tokens for s in batch.sequences) <= self.tokens
        assert bool(batch.sequences) == bool(self.alive)  # something always runs
        assert self.scheduler.num_running <= max(self.seqs, was_running)
        if not self.chunked:
            assert all(s.samples for s in batch.sequences)
        return batch

    def deliver(self, sampled: list[Sampled]) -> None:
        for request, token, status in sampled:
            if status is RequestStatus.FINISHED_ABORTED:
                continue
            tokens = self.delivered[request.request_id]
            tokens.append(token)
            expected, reason = undisturbed(self.alive[request.request_id][1], request.sampling)
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


TestSchedulerLives = SchedulerLives.TestCase
TestSchedulerLives.settings = settings(
    max_examples=300, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.mark.parametrize("chunked", [True, False])
def test_a_kv_cache_of_one_request_preempts_often_and_still_yields_the_same_tokens(chunked: bool) -> None:
    lives = SchedulerLives()
    lives.start(blocks=BLOCKS_PER_REQUEST, seqs=6, tokens=MAX_MODEL_LEN, chunked=chunked)
    for index in range(12):
        lives.add([index, 3, 1], SamplingParams(max_tokens=28, ignore_eos=True))
    lives.teardown()
    assert sum(lives.scheduler.take_stats().preempted.values()) > 10


def test_a_thousand_random_patches_under_load_fail_no_request() -> None:
    """As the engine does it: each accepted PATCH sets limits and resizes the KV cache between two steps."""
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
    lives = SchedulerLives()
    lives.start(blocks=formula.num_blocks, seqs=6, tokens=32, chunked=True, cap=live.envelope.num_blocks_cap)
    accepted = 0
    for _ in range(1000):
        while len(lives.alive) < 16:
            lives.add([rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 20))], SamplingParams(max_tokens=24))
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
        lives.set_limits(values.max_num_seqs, values.max_num_batched_tokens)
        lives.resize(formula.at(values.gpu_memory_utilization).num_blocks)
        lives.step()
    assert accepted > 300
    stats = lives.scheduler.take_stats()
    assert stats.preempted["resize"] > 50
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
        num_layers=1,
        num_kv_heads=1,
        head_size=5,
        kv_dtype_bytes=1,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
    )

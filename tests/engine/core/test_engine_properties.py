"""Property tests of whole engines with a tiny model: 20,000 random steps.

Requests arrive, are aborted, preempted, swapped, shared, drafted, constrained by grammars and reconfigured. Each greedy
request must end with its undisturbed tokens, and invariants hold after every step.

If the model's two best tokens are closer than MARGIN, the order of summation may decide: the rest of the request is not
compared, and such cases are counted. Decisions by measured time (swap or recompute) use deterministic clocks.
"""

import random
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engine_builders
import msgspec
import pytest
from calling_recorder import steps_of_a_device, steps_that_follow
from llguidance import LLMatcher
from trimtab_engine.config.speculation import SpeculativeConfig
from trimtab_engine.core.engine import Engine
from trimtab_engine.device import side_stream
from trimtab_engine.memory.reserved import RANK_BYTES
from trimtab_engine.messages.admin import PatchConfig
from trimtab_engine.messages.requests import AddRequest, StepStats
from trimtab_engine.scheduling.sampling import Sampling

STEPS = 2000  # of each of the ten engines
ALIVE = 12  # requests at a time
MARGIN = 1e-3  # between the log-probabilities of the two best tokens
VOCABULARY = 97
MAX_MODEL_LEN = 96
BLOCK_SIZE = 8
BYTES_PER_BLOCK = 2 * 2 * BLOCK_SIZE * 2 * 16 * 4
ONE_REQUEST_BLOCKS = MAX_MODEL_LEN // BLOCK_SIZE
TIGHT = {"num_gpu_blocks_override": 2 * ONE_REQUEST_BLOCKS}
SWAP = {"swap_space_bytes": 40 * BYTES_PER_BLOCK, "swap_space_bytes_cap": 60 * BYTES_PER_BLOCK}
OFFLOAD = {"kv_offload_bytes": 30 * BYTES_PER_BLOCK, "kv_offload_bytes_cap": 60 * BYTES_PER_BLOCK}
GUESSING = {"num_speculative_tokens": 3, "num_speculative_tokens_cap": 4}
NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=4, prompt_lookup_min=2, prompt_lookup_max=4)
DEVICE_BYTES = 4 << 30
GRAMMARS = [LLMatcher.grammar_from_regex(regex) for regex in ("[0-9 ]{1,40}", "[A-F]{9}|[G-M]{20}")]


@dataclass(frozen=True)
class Question:
    """A greedy request and its undisturbed output. `sure`: number of unambiguous tokens; `end`: its finish reason."""

    prompt: list[int]
    sampling: Sampling
    tokens: list[int]
    sure: int
    end: str


@pytest.fixture(scope="module")
def model(model_of: Callable[..., Path]) -> Path:
    return model_of()


@pytest.fixture(autouse=True)
def copies_take_the_time_of_an_uneven_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_stream, "time", SimpleNamespace(perf_counter=engine_builders.uneven(seed=7)))


def an_engine(model: Path, **changes: Any) -> Engine:
    if changes.get("speculative") == "the model itself":
        changes["speculative"] = SpeculativeConfig(method="draft_model", num_speculative_tokens=4, model=str(model))
    settings: dict[str, Any] = {
        "device_memory_bytes": DEVICE_BYTES,
        "max_model_len": MAX_MODEL_LEN,
        "block_size": BLOCK_SIZE,
        "max_num_seqs": 6,
        "max_num_seqs_cap": 10,
        "max_num_batched_tokens": 48,
        "max_num_batched_tokens_cap": 128,
    }
    return engine_builders.an_engine(model, engine_builders.uneven(seed=3), **settings | changes)


@pytest.fixture(scope="module")
def model_with_tokenizer(model: Path, tokenizer_folder: Path) -> Path:
    """The same model. Its grammars are of bytes below VOCABULARY."""
    shutil.copytree(tokenizer_folder, model, dirs_exist_ok=True)
    return model


@pytest.fixture(scope="module")
def questions(model: Path) -> list[Question]:
    """Many begin alike, many repeat themselves."""
    return asked_alone(model, [None])


@pytest.fixture(scope="module")
def held_questions(model_with_tokenizer: Path) -> list[Question]:
    """Likewise, and two of three have a grammar; some of these end before their max_tokens."""
    return asked_alone(model_with_tokenizer, [None, *GRAMMARS])


def asked_alone(model: Path, grammars: list[str | None]) -> list[Question]:
    dice = random.Random(11)
    engine = an_engine(model, num_gpu_blocks_override=200, enable_prefix_caching=False)
    asked = []
    for number in range(60):
        own = [dice.randrange(VOCABULARY - 1) for _ in range(dice.randint(1, 12))] * dice.randint(1, 3)
        prompt = [*range(dice.choice([0, 0, 9, 24, 30])), *own]
        grammar = grammars[number % len(grammars)]
        sampling = Sampling(max_tokens=dice.randint(1, 30), temperature=0.0, ignore_eos=True, grammar=grammar)
        asked.append(alone(engine, f"alone-{number}", prompt, sampling))
    return asked


def alone(engine: Engine, name: str, prompt: list[int], sampling: Sampling) -> Question:
    with_margins = msgspec.structs.replace(sampling, logprobs=2)
    engine.add(AddRequest(name, prompt, with_margins, arrival_time=0.0))
    tokens: list[int] = []
    sure: int | None = None
    end = ""
    while engine.has_work or engine.is_building:
        for output in engine.step().outputs:
            end = output.finish_reason or end
            for position in output.logprobs or []:
                _, best, second = position.logprobs
                if best - second < MARGIN and sure is None:
                    sure = len(tokens)
            tokens += output.token_ids
    return Question(prompt, sampling, tokens, len(tokens) if sure is None else sure, end)


class RandomizedEngine:
    """One engine under random operations."""

    def __init__(self, engine: Engine, questions: list[Question], seed: int) -> None:
        self.engine, self.questions = engine, questions
        self.dice = random.Random(seed)
        self.alive: dict[str, tuple[Question, list[int]]] = {}
        self.num_asked = self.num_ended = self.num_aborted = self.num_doubtful = self.num_patched = 0
        self.preempted: Counter[str] = Counter()
        self.hits = self.host_hits = self.num_accepted = 0
        self.num_in_between, self.is_disturbed = 0, True

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.disturb()
            self.step()
        self.is_disturbed = False
        while self.engine.has_work:
            self.step()
        assert not self.alive

    def disturb(self) -> None:
        dice = self.dice
        while len(self.alive) < ALIVE:
            self.ask()
        if dice.random() < 0.03:
            name = dice.choice(list(self.alive))
            self.engine.abort([name])
            del self.alive[name]
            self.num_aborted += 1
        if dice.random() < 0.1:
            self.patch()

    def ask(self) -> None:
        question = self.dice.choice(self.questions)
        name = f"r{self.num_asked}"
        self.num_asked += 1
        self.engine.add(
            AddRequest(
                name,
                question.prompt,
                question.sampling,
                arrival_time=self.num_asked / 1000,
                priority=self.dice.randint(0, 2),
                cache_salt=self.dice.choice(["", "", "a tenant"]),
            )
        )
        self.alive[name] = (question, [])

    def patch(self) -> None:
        """Some fields to some values; not all go together, and then nothing changes."""
        dice = self.dice
        possible: dict[str, Any] = {
            "max_num_seqs": dice.randint(1, 10),
            "max_num_batched_tokens": dice.randint(1, 128),
            "long_prefill_token_threshold": dice.choice([0, 0, 5, 17]),
            "watermark": dice.choice([0.0, 0.0, 0.05]),
            "scheduling_policy": dice.choice(["fcfs", "priority", "deadline", "deadline"]),
            "ttft_target": dice.choice([0, 0.002, 0.05, 5.0]),
            "ttft_target_per_prompt_token": dice.choice([0, 0.001, 0.1]),
            "preemption_mode": dice.choice(["recompute", "swap", "auto"]),
            "swap_space_bytes": dice.randint(0, 60) * BYTES_PER_BLOCK,
            "kv_offload_bytes": dice.randint(0, 60) * BYTES_PER_BLOCK,
            "num_speculative_tokens": dice.randint(0, 4),
            "enable_prefix_caching": dice.choice([True, True, True, False]),
        }
        live = self.engine.config()["fields"]
        if live["gpu_memory_utilization"]["class"] == "live":
            least = live["gpu_memory_utilization"]["min"]
            possible["gpu_memory_utilization"] = dice.choice([least, least, round(least + dice.random() / 200, 4)])
        names = dice.sample([name for name in possible if name in live], 2)
        status, _ = self.engine.patch_config(PatchConfig({name: possible[name] for name in names}))
        self.num_patched += status == 200

    def come_and_go(self) -> None:
        """While the step was computed, where the next one is scheduled before it is reported."""
        self.num_in_between += 1
        while len(self.alive) < ALIVE + 2:
            self.ask()
        if self.dice.random() < 0.02:
            name = self.dice.choice(list(self.alive))
            self.engine.abort([name])
            del self.alive[name]

    def step(self) -> None:
        step = self.engine.step(self.come_and_go if self.is_disturbed else lambda: None)
        self.engine.check_integrity()
        self.count(step.stats)
        for output in step.outputs:
            if output.request_id not in self.alive:
                continue  # aborted while its step was in flight
            question, tokens = self.alive[output.request_id]
            tokens += output.token_ids
            if output.finish_reason is None:
                continue
            assert tokens[: question.sure] == question.tokens[: question.sure]
            if question.sampling.grammar is None or question.sure == len(question.tokens):
                assert output.finish_reason == question.end
                assert len(tokens) == len(question.tokens)
            self.num_doubtful += tokens != question.tokens
            self.num_ended += 1
            del self.alive[output.request_id]

    def count(self, stats: StepStats) -> None:
        self.hits += stats.prefix_cache_hits
        self.host_hits += stats.host_cache_hits
        self.num_accepted += sum(stats.accepted_per_position)
        for mode, reasons in stats.preempted.items():
            self.preempted[mode] += sum(reasons.values())


def utilization(steps_above_the_reserve: int) -> str:
    """Return a utilization that leaves some hundred MB for the engine above the process reservation."""
    return str((RANK_BYTES * 10_000 // DEVICE_BYTES + steps_above_the_reserve) / 10_000)


def resized() -> dict[str, Any]:
    return {"gpu_memory_utilization": utilization(200), "gpu_memory_utilization_cap": utilization(260)}


@pytest.mark.parametrize(
    ("changes", "preempts"),
    [
        (TIGHT, True),
        ({**TIGHT, **SWAP, "preemption_mode": "swap", "async_scheduling": True}, True),
        ({**TIGHT, **SWAP, "preemption_mode": "auto"}, True),
        (resized, False),
        ({**TIGHT, **SWAP, **GUESSING, "preemption_mode": "auto", "speculative": NGRAM}, True),
        ({**TIGHT, **GUESSING, "speculative": "the model itself"}, True),
        ({**TIGHT, **SWAP, **OFFLOAD, "preemption_mode": "auto", "async_scheduling": True}, True),
    ],
    ids=[
        "recompute",
        "swap, steps overlapping",
        "auto",
        "resized",
        "n-gram drafts",
        "drafts of the model itself",
        "host cache, steps overlapping",
    ],
)
def test_random_operations_keep_tokens_of_finished_requests(
    model: Path, questions: list[Question], changes: Any, preempts: bool
) -> None:
    life = RandomizedEngine(an_engine(model, **(changes() if callable(changes) else changes)), questions, seed=5)
    life.run(STEPS)
    assert life.num_ended > STEPS / 10
    assert life.num_patched > STEPS / 50
    assert life.num_aborted > STEPS / 50
    assert life.hits > STEPS / 10
    assert (life.host_hits > STEPS / 10) == (isinstance(changes, dict) and "kv_offload_bytes" in changes)
    assert life.num_doubtful <= life.num_ended / 50
    assert life.num_accepted > (STEPS / 20 if isinstance(changes, dict) and "speculative" in changes else -1)
    assert sum(life.preempted.values()) > (STEPS / 100 if preempts else -1)


@pytest.mark.parametrize("speculative", [None, NGRAM, "the model itself"], ids=["", "n-gram", "draft model"])
def test_random_operations_with_grammars_on_asynchronous_device(
    model_with_tokenizer: Path, held_questions: list[Question], speculative: Any
) -> None:
    changes = {} if speculative is None else {"speculative": speculative, **GUESSING}
    with steps_of_a_device():
        engine = an_engine(
            model_with_tokenizer, **TIGHT, **SWAP, **OFFLOAD, preemption_mode="auto", async_scheduling=True, **changes
        )
        for number, grammar in enumerate(GRAMMARS):  # concurrent builds would make runs differ
            alone(engine, f"first-{number}", [1], Sampling(max_tokens=1, temperature=0.0, grammar=grammar))
        life = RandomizedEngine(engine, held_questions, seed=6)
        followed, _ = steps_that_follow(engine, lambda: life.run(STEPS))
    assert len(followed) > STEPS / (2 if speculative is None else 20), "the draft depth is sometimes 0"
    assert all(followed)
    assert life.num_accepted > (-1 if speculative is None else STEPS / 20)
    assert (life.num_in_between > STEPS / 4) == (speculative is NGRAM)
    assert {question.end for question in held_questions if question.sampling.grammar is not None} == {"length", "stop"}
    assert life.num_ended > STEPS / 10
    assert life.num_patched > STEPS / 50
    assert life.num_aborted > STEPS / 50
    assert life.hits > STEPS / 10
    assert life.num_doubtful <= life.num_ended / 50
    assert sum(life.preempted.values()) > STEPS / 100

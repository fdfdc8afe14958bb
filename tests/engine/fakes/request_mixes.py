"""Random mixes of requests that share prefixes, and the comparison of each request with the same request alone."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from trimtab_engine.core.engine import Engine
from trimtab_engine.messages.admin import PatchConfig
from trimtab_engine.messages.requests import AddRequest, SequenceOutput, StepStats
from trimtab_engine.scheduling.pooling import Pooling
from trimtab_engine.scheduling.sampling import Sampling, TokenLogprobs

VOCABULARY = 97
SLICE_ROWS = 240
"""Rows that the compiled CPU layers compute at once (kernels/trimtab_kernels/native/product.h)."""
BUDGETS = (24, 97, 240, 241, 300, 481, 720, 1024, 1024, 1024)
"""Values of max_num_batched_tokens."""


@dataclass(frozen=True)
class Question:
    """A request without its name."""

    prompt: list[int]
    sampling: Sampling
    pooling: Pooling | None = None
    adapter: str = ""

    def message(self, request_id: str, cache_salt: str = "", priority: int = 0) -> AddRequest:
        """Return it as the engine core receives it."""
        return AddRequest(
            request_id,
            self.prompt,
            self.sampling,
            arrival_time=0.0,
            priority=priority,
            cache_salt=cache_salt,
            pooling=self.pooling,
            adapter=self.adapter,
        )


@dataclass
class Answer:
    """What the engine returned for a request."""

    tokens: list[int] = field(default_factory=list)
    scores: list[TokenLogprobs] = field(default_factory=list)
    """Per token: the chosen token, then the two likeliest ones."""
    prompt_scores: list[TokenLogprobs] = field(default_factory=list)
    vector: np.ndarray[Any, Any] | None = None
    finish_reason: str | None = None

    def add(self, output: SequenceOutput) -> None:
        """Append what one step brought."""
        assert not output.error, output.error
        self.tokens += output.token_ids
        self.scores += output.logprobs or []
        self.prompt_scores += output.prompt_logprobs or []
        if output.pooled is not None:
            self.vector = np.frombuffer(output.pooled, "<f4")
        self.finish_reason = output.finish_reason


@dataclass
class Tally:
    """What a series of mixes did, and the differences that it found."""

    mixes: int = 0
    requests: int = 0
    tokens: int = 0
    near_ties: int = 0
    cached_tokens: int = 0
    host_cached_tokens: int = 0
    aborted: int = 0
    sliced_steps: int = 0
    """Steps of more than SLICE_ROWS rows."""
    mixed_steps: int = 0
    """Steps with decodes and prompts."""
    accepted_drafts: int = 0
    graph_steps: int = 0
    preempted: Counter[str] = field(default_factory=Counter)
    defects: list[str] = field(default_factory=list)

    def add_step(self, stats: StepStats) -> None:
        """Count one step of an engine."""
        self.cached_tokens += stats.prefix_cache_hits
        self.host_cached_tokens += stats.host_cache_hits
        self.sliced_steps += stats.num_scheduled_tokens > SLICE_ROWS
        self.mixed_steps += stats.kind == "mixed"
        self.accepted_drafts += sum(stats.accepted_per_position)
        self.graph_steps += sum(stats.graph_steps.values())
        for mode, reasons in stats.preempted.items():
            self.preempted[mode] += sum(reasons.values())


def draw_questions(
    count: int,
    *,
    longest: int,
    block_size: int,
    seed: int = 0,
    adapters: Sequence[str] = ("",),
    pools: bool = True,
    max_tokens: int = 4,
) -> list[Question]:
    """Draw requests whose prompts are branches of a few trunks, of at most `longest` tokens. `pools`: some of them ask
    for a vector instead of tokens. Some end one token after a block, so that a request that shares it computes one row.
    """
    dice = random.Random(seed)
    trunks = [[dice.randrange(VOCABULARY - 1) for _ in range(longest)] for _ in range(4)]
    questions: list[Question] = []
    while len(questions) < count:
        kind = dice.random()
        shared = dice.choice(
            [dice.randrange(longest), block_size * dice.randrange(longest // block_size), longest // 4]
        )
        own = dice.choice([0, 1, 1, dice.randrange(1, 24), dice.randrange(1, longest // 2)])
        prompt = dice.choice(trunks)[: max(1, min(shared, longest - own))]
        prompt = prompt + [dice.randrange(VOCABULARY - 1) for _ in range(own)]
        if questions and kind < 0.15:
            prompt = dice.choice(questions).prompt
        sampling: dict[str, Any] = {
            "max_tokens": dice.randint(1, max_tokens),
            "ignore_eos": True,
            "logprobs": 2,
            "temperature": 0.0,
        }
        if dice.random() < 0.3:
            sampling |= {"temperature": 0.8, "seed": dice.randrange(1000), "top_p": dice.choice([1.0, 0.9])}
        pooling = None
        if dice.random() < 0.08:
            sampling["prompt_logprobs"] = 1
        elif pools and dice.random() < 0.15:
            pooling, sampling = Pooling(dice.choice(["last", "mean"])), {}
        questions.append(Question(prompt, Sampling(**sampling), pooling, dice.choice(adapters)))
    return questions


def answer_alone(engine: Engine, questions: Sequence[Question]) -> list[Answer]:
    """Return what the engine answers when it has no other request."""
    answers = []
    for number, question in enumerate(questions):
        answer = Answer()
        engine.add(question.message(f"alone-{number}"))
        while engine.has_work:
            for output in engine.step().outputs:
                answer.add(output)
        answers.append(answer)
    return answers


def run_mix(
    engine: Engine,
    questions: Sequence[Question],
    answers: Sequence[Answer],
    number: int,
    tally: Tally,
    *,
    tolerance: float,
    budgets: Sequence[int] = BUDGETS,
    most: int = 24,
) -> None:
    """Send some of the questions together, compare what comes back with the answers, and count in `tally`. In every
    third mix they are sent again, when the prefix cache has them. `number` decides everything that is random.
    """
    dice = random.Random(number)
    seats = engine.config()["fields"]["max_num_seqs"]["max"]
    knobs = {
        "max_num_batched_tokens": dice.choice(budgets),
        "max_num_seqs": dice.choice([3, seats, seats, seats]),
        "long_prefill_token_threshold": dice.choice([0, 0, 0, 0, 17, 100]),
        "scheduling_policy": dice.choice(["fcfs", "fcfs", "priority"]),
    }
    status, problem = engine.patch_config(PatchConfig(knobs))
    assert status == 200, problem
    chosen = [dice.randrange(len(questions)) for _ in range(dice.randint(2, most))]
    if dice.random() < 0.3:  # choices of one prompt
        chosen += [chosen[0]] * dice.randint(1, 3)
    for turn in range(2 if number % 3 == 0 else 1):
        _run_round(engine, questions, answers, f"{number}-{turn}", f"{number}", chosen, dice, tally, tolerance)
        dice.shuffle(chosen)
    engine.check_integrity()
    tally.mixes += 1


def _run_round(
    engine: Engine,
    questions: Sequence[Question],
    answers: Sequence[Answer],
    name: str,
    salt: str,
    chosen: list[int],
    dice: random.Random,
    tally: Tally,
    tolerance: float,
) -> None:
    """Requests arrive over a few steps; in some rounds one or two are cancelled."""
    late = dice.choice([0, 0, 0, 4])
    arrivals = [(dice.randint(0, late) if place else 0, place) for place in range(len(chosen))]
    cancelled = {dice.randrange(len(chosen)) for _ in range(dice.choice([0, 0, 0, 1, 2]))}
    cancel_at = dice.randint(1, 4)
    found = {f"{name}-{place}": Answer() for place in range(len(chosen))}
    step = 0
    while arrivals or engine.has_work:
        for entry in [entry for entry in arrivals if entry[0] <= step]:
            arrivals.remove(entry)
            question = questions[chosen[entry[1]]]
            engine.add(question.message(f"{name}-{entry[1]}", salt, priority=dice.randint(0, 2)))
        if step == cancel_at and cancelled:
            engine.abort([f"{name}-{place}" for place in cancelled])
        report = engine.step()
        tally.add_step(report.stats)
        for output in report.outputs:
            found[output.request_id].add(output)
        step += 1
    for place, index in enumerate(chosen):
        answer = found[f"{name}-{place}"]
        tally.requests += 1
        if place in cancelled and answer.finish_reason is None:
            tally.aborted += 1
        else:
            assert answer.finish_reason is not None
            assert len(answer.tokens) == len(answers[index].tokens)
        _compare(f"mix {name}, question {index}", questions[index], answer, answers[index], tolerance, tally)


def _compare(name: str, question: Question, found: Answer, expected: Answer, tolerance: float, tally: Tally) -> None:
    """Compare as far as the request came. After a near tie the rest is another text and not compared: there the
    likeliest tokens have the log-probabilities of the reference, and the order of summation decided.
    """
    if found.vector is not None:
        assert expected.vector is not None
        distance = float(np.linalg.norm(found.vector - expected.vector) / np.linalg.norm(expected.vector))
        if not distance <= tolerance:
            tally.defects.append(f"{name}: the vector is {distance:.1e} away")
    for place, (score, other) in enumerate(zip(found.prompt_scores, expected.prompt_scores, strict=False)):
        if not _is_close(score.logprobs[:1], other.logprobs[:1], tolerance):
            tally.defects.append(f"{name}: prompt token {place} has {score.logprobs[0]}, not {other.logprobs[0]}")
            break
    for place, (token, score) in enumerate(zip(found.tokens, found.scores, strict=True)):
        other = expected.scores[place]
        tally.tokens += 1
        if not _is_close(score.logprobs[1:], other.logprobs[1:], tolerance):
            tally.defects.append(
                f"{name}: at token {place} the likeliest have {score.logprobs[1:]}, not {other.logprobs[1:]}"
            )
            break
        if token == expected.tokens[place]:
            continue
        margin = other.logprobs[1] - other.logprobs[2]
        if question.sampling.temperature == 0.0 and margin > 2 * tolerance:
            tally.defects.append(f"{name}: token {place} is {token}, not {expected.tokens[place]}")
        tally.near_ties += 1
        break


def _is_close(found: list[float], expected: list[float], tolerance: float) -> bool:
    return all(abs(a - b) <= tolerance for a, b in zip(found, expected, strict=True))

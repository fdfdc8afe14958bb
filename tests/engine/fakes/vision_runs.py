"""Requests with images through an engine, and where its tokens differ from the reference's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from calling_recorder import noted, steps_of_a_device
from engine_benchmarks.parity import NEAR_TIE, Reference
from trimtab_engine.core.engine import Engine
from trimtab_engine.messages.requests import StepOutputs
from vision_model import VisionPrompt

NUM_TOKENS = 64


class Run:
    """An engine's outputs and step statistics."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tokens: dict[str, list[int]] = {}
        self.errors: dict[str, str] = {}
        self.num_preempted: dict[str, int] = {}
        self.num_cached = self.num_encoded = self.num_accepted = 0
        self.num_graphs = self.num_compiled = 0
        self.num_eager: dict[str, int] = {}

    def add(self, prompts: dict[str, VisionPrompt], **request: Any) -> None:
        for name, prompt in prompts.items():
            self.tokens[name] = []
            self.engine.add(prompt.request(name, NUM_TOKENS, **request))

    def step(self) -> None:
        report: StepOutputs = self.engine.step()
        for output in report.outputs:
            self.tokens[output.request_id] += output.token_ids
            if output.error:
                self.errors[output.request_id] = output.error
        for mode, reasons in report.stats.preempted.items():
            self.num_preempted[mode] = self.num_preempted.get(mode, 0) + sum(reasons.values())
        self.num_cached += report.stats.prefix_cache_hits
        self.num_encoded += report.stats.num_encoded_items
        self.num_accepted += sum(report.stats.accepted_per_position)
        self.num_graphs += sum(report.stats.graph_steps.values())
        self.num_compiled += report.stats.kernel_compilations
        for reason, count in report.stats.eager_steps.items():
            self.num_eager[reason] = self.num_eager.get(reason, 0) + count
        self.engine.check_integrity()

    def to_the_end(self) -> Run:
        while self.engine.has_work:
            self.step()
        return self


def defects(tokens: dict[str, list[int]], expected: dict[str, Reference]) -> list[str]:
    """Return differences at unambiguous reference tokens."""
    found = []
    for name, own in tokens.items():
        wanted = expected[name]
        pairs = zip(own, wanted.tokens, wanted.gaps, strict=True)
        first = next(((place, gap) for place, (a, b, gap) in enumerate(pairs) if a != b), None)
        if first is not None and first[1] >= NEAR_TIE:
            found.append(f"{name}: token {first[0]} differs, where the gap is {first[1]:.1e}")
    return found


def check_with_the_steps_of_a_device(
    an_engine: Callable[[], Engine], prompts: dict[str, VisionPrompt], expected: dict[str, Reference], *, is_eager: bool
) -> None:
    """The reference's tokens; steps that compute or place images are eager, and all others replay graphs, unless all
    are eager.
    """
    with steps_of_a_device():
        run = Run(an_engine())
        run.add(prompts)
        assert defects(run.to_the_end().tokens, expected) == []
    assert run.num_graphs == 0 if is_eager else run.num_graphs > 60
    assert (run.num_eager.keys() >= {"images"}) != is_eager


def graphs_over_ranks(
    an_engine: Callable[[], Engine], prompts: dict[str, VisionPrompt], expected: dict[str, Reference], folder: Path
) -> list[str]:
    """Return the step notes of each of two ranks, checked to be equal, of an engine with the reference's tokens."""
    with steps_of_a_device(folder):
        engine = an_engine()
        try:
            run = Run(engine)
            run.add(prompts)
            assert defects(run.to_the_end().tokens, expected) == []
        finally:
            engine.close()
    one, other = noted(folder)
    assert one == other
    return one

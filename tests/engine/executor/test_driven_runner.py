"""The core's rank: messages to other ranks, and agreement with other cores."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trimtab_engine.executor.block_table_deltas import BlockTableDelta, BlockTableSender
from trimtab_engine.executor.driven_runner import DrivenRunner
from trimtab_engine.executor.messages import Step
from trimtab_engine.parallel.wave import Wave
from trimtab_engine.scheduling.step_inputs import GroupInputs, StepInputs, StepShape


class OtherCore:
    """A group of this core and another one with a fixed contribution."""

    device = "cpu"

    def __init__(self, num_tokens: int, per_sequence: int) -> None:
        self._other = torch.tensor([[num_tokens, per_sequence, 0]])

    def all_gather(self, said: torch.Tensor) -> torch.Tensor:
        return torch.cat((said, self._other))


def a_runner(other: OtherCore | None, *, num_blocks: int = 8) -> tuple[DrivenRunner, list[Any]]:
    """Return a runner without a model, and its sent messages."""
    runner = object.__new__(DrivenRunner)
    sent: list[Any] = []
    parts: dict[str, Any] = {
        "workers": SimpleNamespace(send=sent.append),
        "table_sender": BlockTableSender(1, 8, 4),
        "wave": None if other is None else Wave(other),  # type: ignore[arg-type]  # what a wave needs of a group
        "steps": SimpleNamespace(),
        "kv_cache": SimpleNamespace(num_blocks=num_blocks),
        "facts": SimpleNamespace(vocab_size=5),
    }
    for name, part in parts.items():
        setattr(runner, name, part)
    return runner, sent


def decodes(count: int) -> StepInputs:
    zeros = [0] * count
    return StepInputs(zeros, zeros, [], [GroupInputs([([0], 1) for _ in zeros], [])])


def test_step_reaches_every_rank_with_feed() -> None:
    runner, sent = a_runner(None)
    inputs = decodes(2)
    runner.send(inputs, [(1, 0)])
    bare = StepInputs([0, 0], [0, 0], [], [GroupInputs([([], 1)] * 2, [])])
    assert sent == [Step(bare, [BlockTableDelta([0, 1], [(0, 0, [0]), (1, 0, [0])])], [(1, 0)])]
    assert inputs.shape == StepShape(2, 1)


@pytest.mark.parametrize(
    ("own", "num_blocks", "other", "agreed"),
    [
        (2, 8, OtherCore(5, 1), StepShape(5, 1)),
        (0, 8, OtherCore(5, 1), StepShape(5, 1)),  # padding of the other's kind
        (0, 0, OtherCore(8, 4), StepShape(8, None)),  # asleep: there is no block that such padding could read
        (2, 8, OtherCore(0, 0), StepShape(2, 1)),
    ],
)
def test_cores_in_lockstep_send_the_shape_that_they_agree_on(
    own: int, num_blocks: int, other: OtherCore, agreed: StepShape
) -> None:
    runner, sent = a_runner(other, num_blocks=num_blocks)
    runner.send(decodes(own))
    assert [step.inputs.shape for step in sent] == [agreed]


def test_a_wave_s_end_is_no_step() -> None:
    runner, sent = a_runner(OtherCore(0, 0))
    inputs = decodes(0)
    runner.send(inputs)
    assert sent == []
    logits = runner.run(inputs)
    assert logits is not None
    assert logits.shape == (0, 5)

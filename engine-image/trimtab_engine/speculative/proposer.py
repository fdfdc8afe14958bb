"""What the engine asks of a proposer, whichever it is: drafts between two steps, or as a step begins."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from trimtab_engine.scheduling.batch import Batch
from trimtab_engine.scheduling.request import Request
from trimtab_engine.scheduling.step_inputs import StepInputs

PLACEHOLDER = 0  # a token id that schedules room for a draft until propose() knows it


@dataclass(frozen=True, slots=True)
class Proposals:
    """How the drafts of a step were drawn.

    `probabilities` has, for each request whose drafts were drawn at random, one row [vocab_size] per draft: the
    distribution that it was drawn from. Every other draft is certain: its distribution is all on itself.
    """

    probabilities: dict[Request, list[torch.Tensor]] = field(default_factory=dict)


class Proposer(Protocol):
    """Makes drafts. `depth` is the live num_speculative_tokens; with 0 nothing is proposed."""

    waits_for_device: bool
    """Whether propose() waits for what it has the device compute."""

    def prepare(self, requests: Sequence[Request], depth: int) -> None:
        """Between two steps: set request.draft_token_ids of these running requests, whose newest token is not computed
        yet. What is set is scheduled as far as budget, blocks and lengths allow."""

    def propose(self, batch: Batch) -> Proposals:
        """With the blocks of the step in place: make the drafts final, in each sequence's draft_token_ids. Not called
        at depth 0."""

    def learn(self, batch: Batch, inputs: StepInputs, new: Mapping[Request, list[int]]) -> None:
        """As the step ends, behind propose(): what it was computed from, and the tokens that each request that samples
        got of it. The model's hidden states are those of this step."""


def room_for_drafts(request: Request, depth: int) -> int:
    """How many drafts could be of use: the step yields one token more than it accepts, up to max_num_tokens."""
    return max(0, min(depth, request.max_num_tokens - request.num_tokens - 1))

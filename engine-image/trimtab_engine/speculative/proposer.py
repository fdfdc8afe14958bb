"""Interface of proposers: drafts between two steps, or at the start of a step."""

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
    """Distribution of a step's drafts.

    `probabilities` has one row [vocab_size] per draft for each request with randomly drawn drafts: the distribution
    that the draft was drawn from. Every other draft is deterministic, with probability 1.
    """

    probabilities: dict[Request, list[torch.Tensor]] = field(default_factory=dict)


class Proposer(Protocol):
    """Makes drafts. `depth` is the live num_speculative_tokens; with 0 nothing is proposed."""

    waits_for_device: bool
    """True if propose() waits for the device."""

    def prepare(self, requests: Sequence[Request], depth: int) -> None:
        """Set request.draft_token_ids of these running requests between two steps, before their newest token is
        computed. Drafts are scheduled as far as budget, blocks and lengths allow.
        """

    def propose(self, batch: Batch) -> Proposals:
        """Finalise the drafts in each sequence's draft_token_ids, once the step's blocks are allocated. Not called at
        depth 0.
        """

    def learn(self, batch: Batch, inputs: StepInputs, new: Mapping[Request, list[int]]) -> None:
        """Process the end of a step, after propose(): its input, and the tokens that each sampled request got. The
        model's hidden states are those of this step.
        """


def room_for_drafts(request: Request, depth: int) -> int:
    """Return the maximum useful number of drafts: a step yields one token more than it accepts, up to
    max_num_tokens.
    """
    return max(0, min(depth, request.max_num_tokens - request.num_tokens - 1))

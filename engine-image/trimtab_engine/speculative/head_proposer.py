"""Drafts from a head that reads the target's hidden states (EAGLE, multi-token prediction layers).

```
end of a step    the head computes each accepted token, with the hidden state of the previous one
                 | … | newest - 1 |            its row predicts the token after the newest
next step        | draft 1 | draft 2 | …       the first from that row, then each from the previous draft's row
```
The head uses the target's block tables in the step that computed the tokens, so the blocks are always allocated. Tokens
computed at depth 0 have no hidden state for the head, and are not computed later: such a request gets no drafts until
it is recomputed. In a shared prefix the last token of a block was computed with another request's next token, which
lowers the acceptance rate slightly but never changes output: every draft is verified.
"""

from collections.abc import Mapping, Sequence

import torch

from trimtab_engine.runner.head_runner import HeadRunner
from trimtab_engine.runner.model_runner import ModelRunner
from trimtab_engine.scheduling.batch import Batch, ScheduledSequence
from trimtab_engine.scheduling.request import Request
from trimtab_engine.scheduling.step_inputs import StepInputs
from trimtab_engine.speculative.choice import choose_drafts
from trimtab_engine.speculative.proposer import PLACEHOLDER, Proposals, room_for_drafts


class HeadProposer:
    """Proposes with `head`, from the hidden states of `target`."""

    waits_for_device = True

    def __init__(self, head: HeadRunner, target: ModelRunner) -> None:
        self._head, self._target = head, target
        self._num_read: dict[Request, int] = {}
        """Per request: for how many of its positions, from the first on, the head has keys and values."""
        self._newest: dict[Request, torch.Tensor] = {}
        """The head's row of the last of them [hidden_size], for requests that may get drafts."""
        target.keep_hidden()

    def prepare(self, requests: Sequence[Request], depth: int) -> None:
        """Schedule room for as many drafts as it will make. None for a request that it has not read whole."""
        if depth == 0:
            known = (*self._num_read, *requests)
            self._num_read = {request: 0 for request in known if not request.status.is_finished}
            self._newest = {}
        for request in requests:
            is_read = request in self._newest and self._num_read[request] == request.num_tokens - 1
            request.draft_token_ids = [PLACEHOLDER] * room_for_drafts(request, depth) if is_read else []

    @torch.inference_mode()
    def propose(self, batch: Batch) -> Proposals:
        """Replace placeholders with drafts, one position of all sequences at a time."""
        proposals = Proposals()
        active = [s for s in batch.sequences if s.draft_token_ids and s.request in self._newest]
        wanted = {s.request: len(s.draft_token_ids) for s in active}
        for sequence in active:
            sequence.draft_token_ids.clear()
        hidden = torch.stack([self._newest[s.request] for s in active]) if active else torch.empty(0)
        while active:
            tokens = choose_drafts(
                self._head.logits(hidden), active, proposals, eos_token_ids=self._target.facts.eos_token_ids
            )
            for sequence, token in zip(active, tokens, strict=True):
                sequence.draft_token_ids.append(token)
            going_on = [i for i, s in enumerate(active) if len(s.draft_token_ids) < wanted[s.request]]
            active = [active[i] for i in going_on]
            if active:
                hidden = self._follow(active, hidden[going_on])
        return proposals

    def _follow(self, active: list[ScheduledSequence], hidden: torch.Tensor) -> torch.Tensor:
        """Return the head's next rows: of the newest drafts, after its own rows. hidden [sequences, hidden_size]."""
        drafted = {s.request: (place, s.draft_token_ids) for place, s in enumerate(active)}
        steps = self._head.token_order(
            [ScheduledSequence(s.request, s.request.num_tokens + len(s.draft_token_ids) - 2, 1, False) for s in active]
        )
        inputs = self._head.flatten(steps)
        order = [drafted[step.request][0] for step in steps]
        inputs.token_ids = [drafted[step.request][1][-1] for step in steps]
        padding = self._head.padded(len(order)) - len(order)
        before = torch.nn.functional.pad(hidden[order], (0, 0, 0, padding))
        rows = self._head.run(inputs, before)
        back = [0] * len(order)
        for row, place in enumerate(order):
            back[place] = row
        return rows[back]

    @torch.inference_mode()
    def learn(self, batch: Batch, inputs: StepInputs, new: Mapping[Request, list[int]]) -> None:
        """Compute the step's tokens, each with the hidden state of the previous token: those of the prompt, and
        `new`.
        """
        self._forget_finished()
        token_ids: list[int] = []
        newest: list[tuple[Request, int]] = []
        for sequence in self._head.token_order(batch.sequences):
            request, start = sequence.request, sequence.start
            behind = request.token_ids[start + 1 : start + 1 + sequence.num_tokens]
            if sequence.samples:
                behind += new[request][: sequence.num_tokens - len(behind)]
            reads_on = start <= self._num_read.get(request, request.num_cached_tokens)
            self._num_read[request] = start + len(behind) if reads_on else 0
            self._newest.pop(request, None)
            if sequence.samples and reads_on and behind:
                newest.append((request, len(token_ids) + len(behind) - 1))
            token_ids += behind + [0] * (sequence.num_tokens - len(behind))  # drafts that fell: overwritten later
        step = StepInputs(token_ids, inputs.positions, [], inputs.groups)
        rows = self._head.run(step, self._target.take_hidden())[[row for _, row in newest]]
        self._newest |= {request: row for (request, _), row in zip(newest, rows, strict=True)}

    def _forget_finished(self) -> None:
        self._num_read = {r: count for r, count in self._num_read.items() if not r.status.is_finished}
        self._newest = {r: row for r, row in self._newest.items() if not r.status.is_finished}

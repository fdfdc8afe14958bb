"""Drafts from a second, smaller model with the same vocabulary: its KV cache uses the target's block ids, its prompt
chunks run in the same step as the target's, and at the start of a step it proposes one token after another for the
whole batch.

```
target's tokens   |--------- computed ---------| newest | draft 1 | … | draft k |
draft model's     |------ computed ------| behind      -> draft 1 ; draft 1 -> draft 2 ; …
                            0 or 1 ______|
```
It is one token behind if all of its drafts were accepted, as it has not computed its own last draft. While
num_speculative_tokens is 0 it computes nothing; afterwards it catches up with the tokens that still fit into steps next
to the target's, and drafts nothing for a request until then. Tokens that it never computed (in a shared block that was
computed at depth 0) lower the acceptance rate, but never change output: every draft is verified.
"""

from collections.abc import Mapping, Sequence

import torch

from trimtab_engine.runner.model_runner import ModelRunner
from trimtab_engine.scheduling.batch import Batch, ScheduledSequence
from trimtab_engine.scheduling.request import Request
from trimtab_engine.scheduling.step_inputs import StepInputs
from trimtab_engine.speculative.choice import choose_drafts
from trimtab_engine.speculative.proposer import PLACEHOLDER, Proposals, room_for_drafts


class DraftModel:
    """Proposer that runs `runner`'s model. It computes at most `max_tokens_per_step` tokens, or as many as the target;
    `eos_token_ids` are the target's.
    """

    waits_for_device = True

    def __init__(self, runner: ModelRunner, *, max_tokens_per_step: int, eos_token_ids: tuple[int, ...]) -> None:
        self._runner = runner
        self._eos_token_ids = eos_token_ids
        self._max_tokens_per_step = max_tokens_per_step
        self._num_computed: dict[Request, int] = {}
        """Per request: how many of its tokens the draft model has read."""

    def prepare(self, requests: Sequence[Request], depth: int) -> None:
        """Schedule room: as many placeholders as it will propose. None where it has to catch up."""
        if depth == 0:
            known = (*self._num_computed, *requests)
            self._num_computed = {request: 0 for request in known if not request.status.is_finished}
        for request in requests:
            request.draft_token_ids = [PLACEHOLDER] * self._depth(request, depth)

    def _depth(self, request: Request, depth: int) -> int:
        num_tokens = request.num_tokens
        is_behind = self._num_computed.get(request, 0) < num_tokens - 2
        room = self._runner.facts.max_model_len - num_tokens
        return 0 if is_behind else max(0, min(room_for_drafts(request, depth), room))

    @torch.inference_mode()
    def propose(self, batch: Batch) -> Proposals:
        """Compute the target's tokens, then draft."""
        self._num_computed = {r: n for r, n in self._num_computed.items() if not r.status.is_finished}
        reading = self._read(batch)
        proposals = Proposals()
        if reading:
            logits = self._run(reading)
            drafting = [s for s in batch.sequences if s.draft_token_ids]
            self._draft(logits, drafting, proposals)
        return proposals

    def learn(self, batch: Batch, inputs: StepInputs, new: Mapping[Request, list[int]]) -> None:
        """Nothing: it reads tokens, and those as the next step begins."""

    def _run(self, sequences: list[ScheduledSequence]) -> torch.Tensor:
        """Compute logits of these rows; the target reports the prompt's log-probabilities."""
        inputs, _ = self._runner.flatten(sequences)
        inputs.scored = []
        logits = self._runner.run(inputs)
        assert logits is not None  # one rank has all stages
        return logits

    def _read(self, batch: Batch) -> list[ScheduledSequence]:
        """Return the tokens to compute before the first draft: the step's, and those it is behind."""
        reading = []
        spare = max(0, self._max_tokens_per_step - batch.num_tokens)
        for sequence in batch.sequences:
            request = sequence.request
            read = sequence.start if sequence.start == request.num_cached_tokens else 0  # unless it is known better
            done = min(self._num_computed.get(request, read), sequence.start)
            self._num_computed[request] = done
            known = min(sequence.start + sequence.num_tokens, request.num_tokens)
            if known > self._runner.facts.max_model_len:
                continue
            behind = min(sequence.start - done, spare)
            spare -= behind
            end = done + behind + known - sequence.start
            reading.append(ScheduledSequence(request, done, end - done, samples=bool(sequence.draft_token_ids)))
            self._num_computed[request] = end
        return reading

    def _draft(self, logits: torch.Tensor, drafting: list[ScheduledSequence], proposals: Proposals) -> None:
        """Replace the placeholders, one position of all sequences after another. `logits` are the first position's."""
        wanted = [len(sequence.draft_token_ids) for sequence in drafting]
        for sequence in drafting:
            sequence.draft_token_ids.clear()
        for position in range(max(wanted, default=0)):
            active = [sequence for sequence, count in zip(drafting, wanted, strict=True) if count > position]
            if position:
                logits = self._run([_next_token(sequence) for sequence in active])
            tokens = choose_drafts(logits, active, proposals, eos_token_ids=self._eos_token_ids)
            for sequence, token in zip(active, tokens, strict=True):
                sequence.draft_token_ids.append(token)
        for sequence, count in zip(drafting, wanted, strict=True):
            self._num_computed[sequence.request] += max(0, count - 1)


def _next_token(sequence: ScheduledSequence) -> ScheduledSequence:
    """The step of the draft model that reads the newest draft."""
    drafts = sequence.draft_token_ids
    start = sequence.request.num_tokens + len(drafts) - 1
    return ScheduledSequence(sequence.request, start, 1, samples=True, draft_token_ids=drafts)

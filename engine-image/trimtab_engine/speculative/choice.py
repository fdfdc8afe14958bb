"""Selection of draft tokens from a model's logits: the sampler's own choice, which maximises the acceptance rate."""

import torch

from trimtab_engine.sampling.rows import DraftedRequest, SampledRow
from trimtab_engine.sampling.sampler import choose, draw, target_probabilities
from trimtab_engine.scheduling.batch import ScheduledSequence
from trimtab_engine.speculative.proposer import Proposals

ROWS_AT_ONCE = 16  # of random draws: float64 copies of more rows would only take more memory


@torch.inference_mode()
def choose_drafts(
    logits: torch.Tensor, active: list[ScheduledSequence], proposals: Proposals, *, eos_token_ids: tuple[int, ...]
) -> list[int]:
    """Return one draft per row, after the existing drafts of each sequence. Random, unseeded choices record their
    distribution in `proposals`.
    """
    logits = logits.float()
    rows: list[SampledRow] = [DraftedRequest(s.request, list(s.draft_token_ids)) for s in active]
    token_ids: list[int | None] = [None] * len(rows)
    drawn = [i for i, row in enumerate(rows) if row.sampling.temperature > 0 and row.sampling.seed is None]
    for first in range(0, len(drawn), ROWS_AT_ONCE):
        part = drawn[first : first + ROWS_AT_ONCE]
        probabilities = target_probabilities(logits[part], [rows[i] for i in part], eos_token_ids=eos_token_ids)
        for i, token, own in zip(part, draw(probabilities).tolist(), probabilities.float(), strict=True):
            token_ids[i] = token
            proposals.probabilities.setdefault(active[i].request, []).append(own)
    chosen = [i for i, token in enumerate(token_ids) if token is None]
    if chosen:
        part_logits = logits[chosen] if drawn else logits
        picked = choose(part_logits, [rows[i] for i in chosen], eos_token_ids=eos_token_ids)
        for i, token in zip(chosen, picked, strict=True):
            token_ids[i] = token
    return [token for token in token_ids if token is not None]

"""Rejection sampling of drafts: output tokens have the same distribution as without speculation.

- A deterministic draft (of an n-gram, of a greedy request) and every draft of a seeded request is compared with the
  sampler's own token at that position, and accepted if they are equal. For a deterministic draft d this is rejection
  sampling: it is accepted with probability p(d), and its replacement follows p without d. For seeded requests draft and
  target use the same noise at the same position, so the tokens equal those of the same seed without speculation.
- A draft drawn from a distribution q is accepted if u < p(d) / q(d), u uniform; the first rejected one is replaced by a
  draw from max(p - q, 0), renormalised; if all are accepted, one more token is drawn from p (Leviathan et al. 2023,
  arXiv:2211.17192, theorem 1). In float64, so that rounding errors are far below sampling noise.

p is the sampler's distribution at that position: penalties, masks, temperature, top-k, top-p and min-p are applied
first, with the drafts before the position counted as output.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from trimtab_engine.sampling.failures import Failure, failures_of
from trimtab_engine.sampling.logprobs import report_logprobs
from trimtab_engine.sampling.rows import DraftedRequest, SampledRow
from trimtab_engine.sampling.sampler import TokenMasks, apply_masks, draw, sample, target_probabilities
from trimtab_engine.scheduling.batch import ScheduledSequence
from trimtab_engine.scheduling.sampling import TokenLogprobs
from trimtab_engine.speculative.proposer import Proposals

ROWS_AT_ONCE = 16
"""Rows judged together in float64, at least one sequence's: more would only take more memory."""


@dataclass(frozen=True, slots=True)
class Verified:
    """One sequence's new tokens: the accepted drafts, and one more. `logprobs` has an entry for each, or is None."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    failure: Failure | None = None
    """Reason why no token could be chosen after its newest token, or after accepted drafts."""


@torch.inference_mode()
def verify(
    logits: torch.Tensor,
    sequences: list[ScheduledSequence],
    proposals: Proposals,
    *,
    eos_token_ids: tuple[int, ...] = (),
    masks: TokenMasks | None = None,
) -> list[Verified]:
    """Verify a step's drafts. `sequences` are those that sample; logits [rows, vocab_size] has 1 + number of drafts
    rows for each, in order, and may be changed in place. `masks` are for rows of it.
    """
    logits = logits.float()
    if masks is not None:
        apply_masks(logits, masks)
    rows = [drafted_rows(sequence) for sequence in sequences]
    firsts = [0]
    for own in rows:
        firsts.append(firsts[-1] + len(own))
    drawn = [i for i, s in enumerate(sequences) if s.draft_token_ids and s.request in proposals.probabilities]
    results: list[Verified | None] = [None] * len(sequences)
    for group in _groups(drawn, [len(own) for own in rows]):
        index = [row for i in group for row in range(firsts[i], firsts[i + 1])]
        judged = _reject(
            logits[index],
            [rows[i] for i in group],
            [sequences[i].draft_token_ids for i in group],
            [proposals.probabilities[sequences[i].request] for i in group],
            eos_token_ids,
        )
        for i, verified in zip(group, judged, strict=True):
            results[i] = verified
    rest = [i for i, result in enumerate(results) if result is None]
    index = [row for i in rest for row in range(firsts[i], firsts[i + 1])]
    compared = _compare(
        logits if len(index) == logits.shape[0] else logits[index],
        [rows[i] for i in rest],
        [sequences[i].draft_token_ids for i in rest],
        eos_token_ids,
    )
    for i, verified in zip(rest, compared, strict=True):
        results[i] = verified
    return [result for result in results if result is not None]


def drafted_rows(sequence: ScheduledSequence) -> list[SampledRow]:
    """Return the request, with accepted drafts, of each of the sequence's rows of logits."""
    drafts = sequence.draft_token_ids
    return [sequence.request, *(DraftedRequest(sequence.request, drafts[: n + 1]) for n in range(len(drafts)))]


def _groups(indices: list[int], sizes: list[int]) -> list[list[int]]:
    """Split into groups of at most ROWS_AT_ONCE rows; a sequence with more rows is a group by itself."""
    groups: list[list[int]] = []
    used = ROWS_AT_ONCE
    for index in indices:
        if used + sizes[index] > ROWS_AT_ONCE:
            groups.append([])
            used = 0
        groups[-1].append(index)
        used += sizes[index]
    return groups


def _compare(
    logits: torch.Tensor, rows: list[list[SampledRow]], drafts: list[list[int]], eos_token_ids: tuple[int, ...]
) -> list[Verified]:
    """Sample every row; accept drafts while they equal the sampled token."""
    if not rows:
        return []
    sampled = sample(logits, [row for own in rows for row in own], eos_token_ids=eos_token_ids)
    results, first = [], 0
    for own, guesses in zip(rows, drafts, strict=True):
        token_ids = sampled.token_ids[first : first + len(own)]
        tokens, failure = _until_failure(token_ids[: 1 + _num_equal(token_ids, guesses)], sampled.failed, first)
        positions = sampled.logprobs[first : first + len(tokens)]
        logprobs = [entry for entry in positions if entry is not None]
        results.append(Verified(tokens, logprobs if len(logprobs) == len(tokens) else None, failure))
        first += len(own)
    return results


def _until_failure(tokens: list[int], failed: Mapping[int, Failure], first: int) -> tuple[list[int], Failure | None]:
    """Return the tokens before the first row, counted from `first`, without a valid token.

    After the end of a grammar there is no valid token if the end token is banned as well: a request whose drafts reach
    it has ended before it. A request that has not ended fails in its next step, where that row is its first.
    """
    place = next((n for n in range(len(tokens)) if first + n in failed), None)
    if place is None:
        return tokens, None
    return (tokens[:1], failed[first]) if place == 0 else (tokens[:place], None)


def _num_equal(token_ids: list[int], drafts: list[int]) -> int:
    """Return the number of leading drafts that equal the sampled tokens."""
    return next((n for n, draft in enumerate(drafts) if token_ids[n] != draft), len(drafts))


def _reject(
    logits: torch.Tensor,
    rows: list[list[SampledRow]],
    drafts: list[list[int]],
    draft_rows: list[list[torch.Tensor]],
    eos_token_ids: tuple[int, ...],
) -> list[Verified]:
    """Rejection sampling for a few sequences. draft_rows: per sequence and draft, the row that it was drawn from."""
    flat = [row for own in rows for row in own]
    raw = logits.log_softmax(dim=-1) if any(row.sampling.logprobs is not None for row in flat) else None
    target = target_probabilities(logits, flat, eos_token_ids=eos_token_ids)
    failed = failures_of(logits.amax(dim=-1).cpu())
    token_ids = reject(target, drafts, torch.stack([q for own in draft_rows for q in own]).double())
    results, first = [], 0
    for own, drawn in zip(rows, token_ids, strict=True):
        tokens, failure = _until_failure(drawn, failed, first)
        wanted = own[0].sampling.logprobs
        logprobs = None
        if raw is not None and wanted is not None:
            chosen = torch.tensor(tokens, dtype=torch.int64, device=raw.device)
            logprobs = report_logprobs(raw[first : first + len(tokens)], chosen, wanted)
        results.append(Verified(tokens, logprobs, failure))
        first += len(own)
    return results


def reject(target: torch.Tensor, drafts: list[list[int]], draft: torch.Tensor) -> list[list[int]]:
    """The rejection rule. target [sum(1 + drafts), vocab_size] float64, p of every row in order of the sequences;
    draft [sum(drafts), vocab_size] float64, q of every draft in the same order. Returns each sequence's tokens.
    """
    device = target.device
    ids = torch.tensor([token for own in drafts for token in own], dtype=torch.int64, device=device)
    counts = [len(own) for own in drafts]
    firsts = [0]
    for count in counts:
        firsts.append(firsts[-1] + count)
    # The row of draft n of sequence i is that of the token before it: one more row per earlier sequence.
    row_of_draft = torch.tensor([firsts[i] + i + n for i, count in enumerate(counts) for n in range(count)])
    p = target[row_of_draft.to(device), ids]
    q = draft.gather(1, ids.unsqueeze(1)).squeeze(1)
    stands = (torch.rand(len(ids), dtype=torch.float64, device=device) * q < p).tolist()
    accepted = [
        next((n for n in range(count) if not stands[first + n]), count)
        for first, count in zip(firsts, counts, strict=False)
    ]
    last_rows = torch.tensor([firsts[i] + i + n for i, n in enumerate(accepted)], device=device)
    last = target[last_rows]
    fallen = [i for i, (n, count) in enumerate(zip(accepted, counts, strict=True)) if n < count]
    if fallen:
        last[fallen] = _residual(last[fallen], draft[[firsts[i] + accepted[i] for i in fallen]])
    extra: list[int] = draw(last).tolist()
    return [[*own[:n], token] for own, n, token in zip(drafts, accepted, extra, strict=True)]


def _residual(target: torch.Tensor, draft: torch.Tensor) -> torch.Tensor:
    """max(p - q, 0), not normalised. Where rounding leaves nothing of it, p and q are equal, and p is returned."""
    residual = (target - draft).clamp_min_(0)
    return torch.where(residual.sum(dim=-1, keepdim=True) > 0, residual, target)

"""Sampling of token ids from logits for a whole batch. Reads each request's parameters and tokens, never its state.

Order, as in vLLM V1: grammar masks → log-probabilities of these logits (if requested) → allowed_token_ids → bad_words
→ min_tokens → logit_bias → penalties → greedy choice, or temperature → min-p → top-k and top-p → random choice. A
seeded request draws from a generator of (seed, number of output tokens), so its tokens depend neither on the rest of
the batch nor on preemptions nor on speculation.

A row of logits belongs to a request, or to a request with some of its drafts counted as output (speculative/).
"""

import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from trimtab_kernels.apply_penalties import apply_penalties
from trimtab_kernels.apply_token_bitmask import WORD_BITS, apply_token_bitmask
from trimtab_kernels.argmax import argmax
from trimtab_kernels.keep_likely_tokens import keep_likely_tokens
from trimtab_kernels.sample import sample_triton

from trimtab_engine.device.transfer import send
from trimtab_engine.sampling.choice_columns import Array, ChoiceColumns, Chooser, kept_by_top_k, packed_parameters
from trimtab_engine.sampling.failures import Failure, failures_of
from trimtab_engine.sampling.forbidden_tokens import bans_of
from trimtab_engine.sampling.logprobs import report_rows
from trimtab_engine.sampling.rows import SampledRow
from trimtab_engine.scheduling.sampling import Sampling, TokenLogprobs

ROWS_AT_ONCE = 16
"""Rows sampled together unless all are plainly greedy: sorting takes several copies of their logits."""
SMALLEST_EXPONENTIAL = 1e-20  # keeps the division in exponential sampling finite


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One token per row of logits; logprobs if requested."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    failed: dict[int, Failure] = field(default_factory=dict)
    """Rows without a valid token. Their values in token_ids are undefined."""


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Grammar masks: bitmask [num_masked, num_words] int32 (token t: bit t % 32 of word t // 32), for `rows`."""

    bitmask: torch.Tensor
    rows: list[int]


def apply_masks(logits: torch.Tensor, masks: TokenMasks) -> None:
    """Set logits of tokens that a grammar forbids to -inf in place, before any other processing."""
    rows = torch.tensor(masks.rows, dtype=torch.int64)
    apply_token_bitmask(logits, send(masks.bitmask, logits.device), send(rows, logits.device))


@torch.inference_mode()
def sample(
    logits: torch.Tensor,
    requests: Sequence[SampledRow],
    *,
    eos_token_ids: tuple[int, ...] = (),
    masks: TokenMasks | None = None,
) -> SampledTokens:
    """logits [len(requests), vocab_size], which may be changed. `eos_token_ids` are masked below min_tokens."""
    if masks is not None:
        apply_masks(logits, masks)
    if all(_is_plain_greedy(request) for request in requests):
        chosen, best = argmax(logits)  # NaN is the largest
        return SampledTokens(chosen.tolist(), [None] * len(requests), failures_of(best.cpu()))
    logits = logits.float()
    whole = SampledTokens([], [])
    for first in range(0, len(requests), ROWS_AT_ONCE):
        part = _sample_rows(logits[first : first + ROWS_AT_ONCE], requests[first : first + ROWS_AT_ONCE], eos_token_ids)
        whole.token_ids.extend(part.token_ids)
        whole.logprobs.extend(part.logprobs)
        whole.failed.update({first + row: failure for row, failure in part.failed.items()})
    return whole


def choose(logits: torch.Tensor, requests: Sequence[SampledRow], *, eos_token_ids: tuple[int, ...] = ()) -> list[int]:
    """Return only the tokens that `sample` chooses."""
    token_ids: list[int] = []
    for first in range(0, len(requests), ROWS_AT_ONCE):
        part = slice(first, first + ROWS_AT_ONCE)
        token_ids += _choose_rows(logits[part], requests[part], eos_token_ids).tolist()
    return token_ids


def target_probabilities(
    logits: torch.Tensor, requests: Sequence[SampledRow], *, eos_token_ids: tuple[int, ...] = ()
) -> torch.Tensor:
    """Return the distribution of random requests, [rows, vocab_size] float64. Changes logits in place."""
    _adjust(logits, requests, eos_token_ids)
    _limit(logits, requests)
    return logits.softmax(dim=-1, dtype=torch.float64)


def draw(probabilities: torch.Tensor) -> torch.Tensor:
    """A random token per row, [rows] int64. probabilities [rows, vocab_size] need not be normalised.

    Exponential sampling: argmax of p / Exp(1) is a draw from p.
    """
    noise = torch.empty_like(probabilities).exponential_().clamp_min_(SMALLEST_EXPONENTIAL)
    return (probabilities / noise).argmax(dim=-1)


def _is_plain_greedy(request: SampledRow) -> bool:
    p = request.sampling
    return p.temperature == 0 and p.logprobs is None and not _is_adjusted(request)


def _is_adjusted(request: SampledRow) -> bool:
    """Return True if the request's logits are edited before the choice."""
    p = request.sampling
    return (
        has_penalties(p)
        or bool(p.logit_bias or p.allowed_tokens or p.bad_words)
        or request.num_output_tokens < p.min_tokens
    )


def has_penalties(p: Sampling) -> bool:
    """Return True if the request's logits depend on its previous tokens."""
    return p.presence_penalty != 0 or p.frequency_penalty != 0 or p.repetition_penalty != 1


def _sample_rows(logits: torch.Tensor, requests: Sequence[SampledRow], eos_token_ids: tuple[int, ...]) -> SampledTokens:
    """`sample` for a few rows."""
    params = [request.sampling for request in requests]
    wants_logprobs = any(p.logprobs is not None for p in params)
    raw = logits.log_softmax(dim=-1) if wants_logprobs else None
    chosen = _choose_rows(logits, requests, eos_token_ids)
    token_ids: list[int] = chosen.tolist()
    logprobs: list[TokenLogprobs | None] = [None] * len(requests)
    if raw is not None:
        logprobs = report_rows(raw, chosen, [p.logprobs for p in params])
    return SampledTokens(token_ids, logprobs, failures_of(best_logits(logits, chosen).cpu()))


def _choose_rows(logits: torch.Tensor, requests: Sequence[SampledRow], eos_token_ids: tuple[int, ...]) -> torch.Tensor:
    """A token per row, [rows] int64."""
    _adjust(logits, requests, eos_token_ids)
    return choose_limited(logits, requests)


def choose_limited(logits: torch.Tensor, requests: Sequence[Chooser]) -> torch.Tensor:
    """Greedy or random, by temperature, min-p, top-k and top-p; nothing else changes the logits any more."""
    if logits.is_cuda:
        return _draw_by_kernel(logits, requests)
    chosen = logits.argmax(dim=-1)
    random_rows = [row for row, request in enumerate(requests) if request.sampling.temperature > 0]
    if random_rows:
        index = torch.tensor(random_rows, dtype=torch.int64, device=logits.device)
        picked = _draw(logits.index_select(0, index), [requests[row] for row in random_rows])
        chosen.index_copy_(0, index, picked)
    return chosen


def best_logits(logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return [rows] float32 that marks failed rows: the largest logit on the CPU (NaN if any is NaN), or the chosen
    token's logit on a device, where the host must not wait and the whole row is NaN then.
    """
    return _logits_of(logits, chosen) if logits.is_cuda else logits.amax(dim=-1)


def _logits_of(logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """[rows] float32: the logit of each row's token. One look per row, where `amax` reads all of them once more."""
    return logits.gather(1, chosen.unsqueeze(1)).squeeze(1).float()


def _adjust(logits: torch.Tensor, requests: Sequence[SampledRow], eos_token_ids: tuple[int, ...]) -> None:
    """Apply the edits of logits that precede both greedy and random choice."""
    _restrict(logits, requests)
    _ban(logits, requests, eos_token_ids)
    _add_biases(logits, requests)
    _penalise(logits, requests)


def _restrict(logits: torch.Tensor, requests: Sequence[SampledRow]) -> None:
    """Apply allowed_tokens, which have the layout of grammar masks."""
    rows = [row for row, request in enumerate(requests) if request.sampling.allowed_tokens]
    if rows:
        bitmask = np.zeros((len(rows), -(-logits.shape[1] // WORD_BITS)), np.int32)
        for mask, row in zip(bitmask.view(np.uint8), rows, strict=True):
            allowed = requests[row].sampling.allowed_tokens
            mask[: len(allowed)] = np.frombuffer(allowed, np.uint8)
        apply_masks(logits, TokenMasks(torch.from_numpy(bitmask), rows))


def _add_biases(logits: torch.Tensor, requests: Sequence[SampledRow]) -> None:
    for row, request in enumerate(requests):
        bias = request.sampling.logit_bias
        if bias:
            index = torch.tensor(list(bias), dtype=torch.int64, device=logits.device)
            logits[row].index_add_(0, index, torch.tensor(list(bias.values()), device=logits.device))


def _ban(logits: torch.Tensor, requests: Sequence[SampledRow], eos_token_ids: tuple[int, ...]) -> None:
    """No token that would end a request below its min_tokens, none that would complete one of its bad_words."""
    bans = [
        (row, token)
        for row, request in enumerate(requests)
        for token, _ in bans_of(request, eos_token_ids=eos_token_ids, vocab_size=logits.shape[1])
    ]
    if bans:
        rows, tokens = zip(*bans, strict=True)
        logits[list(rows), list(tokens)] = float("-inf")


def _penalise(logits: torch.Tensor, requests: Sequence[SampledRow]) -> None:
    """Presence, frequency and repetition penalties, for the rows that have any."""
    for row, request in enumerate(requests):
        p = request.sampling
        if not has_penalties(p):
            continue
        counts = Counter(request.token_ids[request.num_prompt_tokens :])
        seen = set(request.token_ids) if p.repetition_penalty != 1 else set[int]()
        apply_penalties(
            logits[row],
            output_ids=torch.tensor(list(counts), dtype=torch.int64, device=logits.device),
            output_counts=torch.tensor(list(counts.values()), dtype=torch.float32, device=logits.device),
            seen_ids=torch.tensor(list(seen), dtype=torch.int64, device=logits.device),
            presence=p.presence_penalty,
            frequency=p.frequency_penalty,
            repetition=p.repetition_penalty,
        )


def _draw(logits: torch.Tensor, requests: Sequence[Chooser]) -> torch.Tensor:
    """A random token per row, [rows] int64. On the CPU."""
    _limit(logits, requests)
    probabilities = logits.softmax(dim=-1)
    # Exponential sampling: argmax of p / Exp(1) is a draw from p; each row can have its own generator.
    noise = torch.empty_like(probabilities)
    if any(request.sampling.seed is None for request in requests):
        noise.exponential_()
    for row, request in enumerate(requests):
        if request.sampling.seed is not None:
            noise[row].exponential_(
                generator=_generator(request.sampling.seed, request.num_output_tokens, logits.device)
            )
    return probabilities.div_(noise.clamp_min_(SMALLEST_EXPONENTIAL)).argmax(dim=-1)


def _draw_by_kernel(logits: torch.Tensor, requests: Sequence[Chooser]) -> torch.Tensor:
    packed = [packed_parameters(request.sampling, logits.shape[1]) for request in requests]
    columns = ChoiceColumns.of(packed, [0] * len(requests), logits.device)
    return draw_by_kernel(logits, columns, np.array([request.num_output_tokens for request in requests], np.int64))


def draw_by_kernel(logits: torch.Tensor, columns: ChoiceColumns, num_output_tokens: Array) -> torch.Tensor:
    """The choice in one Triton kernel, greedy rows too, which sorts nothing and does not wait for the device. Numbers
    differ from the CPU's; the distribution does not.
    """
    seeds = columns.seeds_on(logits.device, num_output_tokens)
    token_ids, _ = sample_triton(logits, columns.temperature, columns.top_k, columns.top_p, columns.min_p, seeds)
    return token_ids


def _limit(logits: torch.Tensor, requests: Sequence[Chooser]) -> None:
    """Apply temperature, then min-p, top-k and top-p: excluded tokens become -inf."""
    params = [request.sampling for request in requests]
    device = logits.device
    logits.div_(torch.tensor([p.temperature for p in params], device=device).unsqueeze(1))
    if any(p.top_k or p.top_p < 1 or p.min_p for p in params):
        keep_likely_tokens(
            logits,
            top_k=torch.tensor([kept_by_top_k(p, logits.shape[1]) for p in params], device=device),
            top_p=torch.tensor([p.top_p for p in params], device=device),
            min_p=torch.tensor([p.min_p for p in params], device=device),
        )


def _generator(seed: int, position: int, device: torch.device) -> torch.Generator:
    """torch's CPU generator uses only the low 32 bits of its seed, so the whole key is hashed into them."""
    return torch.Generator(device=device).manual_seed(zlib.crc32(f"{seed} {position}".encode()))

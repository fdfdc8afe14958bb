"""Logits to token ids, for a whole batch at once. It reads each request's parameters and tokens, never its state.

Order, as in vLLM V1: grammar masks → log-probabilities of these logits (when asked for) → allowed_token_ids → bad_words
→ min_tokens → logit_bias → penalties → greedy choice, or temperature → min-p → top-k and top-p → random choice. A
seeded request draws from a generator of (seed, number of output tokens), so its tokens depend neither on the rest of
the batch nor on preemptions nor on speculation.

A row of logits belongs to a request, or to a request with some of its drafts taken for output (speculative/), whose
next token is judged as if they were.
"""

import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from trimtab_kernels.apply_penalties import apply_penalties
from trimtab_kernels.apply_token_bitmask import apply_token_bitmask
from trimtab_kernels.keep_likely_tokens import keep_likely_tokens
from trimtab_kernels.sample import sample_triton

from trimtab_engine.graphs.transfer import send
from trimtab_engine.messages import SamplingParams, TokenLogprobs
from trimtab_engine.speculative.drafted_request import SampledRow

ROWS_AT_ONCE = 16
"""Rows sampled together unless all are plainly greedy: sorting takes several copies of their logits."""
SMALLEST_EXPONENTIAL = 1e-20  # keeps the division in exponential sampling finite


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One token per row of the logits; logprobs where the request asks for them."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """What grammars allow: bitmask [num_masked, num_words] int32 (token t: bit t % 32 of word t // 32), for `rows`."""

    bitmask: torch.Tensor
    rows: list[int]


def apply_masks(logits: torch.Tensor, masks: TokenMasks) -> None:
    """Before anything else is done with the logits: -inf in place, for what a grammar does not allow."""
    apply_token_bitmask(logits, masks.bitmask.to(logits.device), masks.rows)


@torch.inference_mode()
def sample(
    logits: torch.Tensor,
    requests: Sequence[SampledRow],
    *,
    eos_token_ids: tuple[int, ...] = (),
    masks: TokenMasks | None = None,
) -> SampledTokens:
    """logits [len(requests), vocab_size] float32, changed in place. `eos_token_ids` are masked below min_tokens."""
    if masks is not None:
        apply_masks(logits, masks)
    if all(_is_plain_greedy(request) for request in requests):
        return SampledTokens(logits.argmax(dim=-1).tolist(), [None] * len(requests))
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs | None] = []
    for first in range(0, len(requests), ROWS_AT_ONCE):
        part = _sample_rows(logits[first : first + ROWS_AT_ONCE], requests[first : first + ROWS_AT_ONCE], eos_token_ids)
        token_ids += part.token_ids
        logprobs += part.logprobs
    return SampledTokens(token_ids, logprobs)


def needs_host(request: SampledRow) -> bool:
    """Whether choosing its next token takes more than its logits and its parameters: its tokens, or a report."""
    p = request.sampling
    return (
        p.logprobs is not None
        or _has_penalties(p)
        or bool(p.logit_bias or p.allowed_token_ids or p.bad_words)
        or request.num_output_tokens < p.min_tokens
    )


@torch.inference_mode()
def sample_on_device(logits: torch.Tensor, requests: Sequence[SampledRow]) -> torch.Tensor:
    """`sample` for requests that need no host: the tokens [rows] int64, which nobody has waited for."""
    if all(request.sampling.temperature == 0 for request in requests):
        return logits.argmax(dim=-1)
    return _choose_limited(logits, requests)


def choose(logits: torch.Tensor, requests: Sequence[SampledRow], *, eos_token_ids: tuple[int, ...] = ()) -> list[int]:
    """The tokens alone, as `sample` chooses them."""
    token_ids: list[int] = []
    for first in range(0, len(requests), ROWS_AT_ONCE):
        part = slice(first, first + ROWS_AT_ONCE)
        token_ids += _choose_rows(logits[part], requests[part], eos_token_ids).tolist()
    return token_ids


def target_probabilities(
    logits: torch.Tensor, requests: Sequence[SampledRow], *, eos_token_ids: tuple[int, ...] = ()
) -> torch.Tensor:
    """What rows of random requests are drawn from, [rows, vocab_size] float64. Changes logits in place."""
    _adjust(logits, requests, eos_token_ids)
    _limit(logits, requests)
    return logits.softmax(dim=-1, dtype=torch.float64)


def draw(probabilities: torch.Tensor) -> torch.Tensor:
    """A random token per row, [rows] int64. probabilities [rows, vocab_size] need not be normalised.

    Exponential sampling: argmax of p / Exp(1) is a draw from p.
    """
    noise = torch.empty_like(probabilities).exponential_().clamp_min_(SMALLEST_EXPONENTIAL)
    return (probabilities / noise).argmax(dim=-1)


def report_logprobs(raw: torch.Tensor, chosen: torch.Tensor, wanted: int) -> list[TokenLogprobs]:
    """For rows of one request that wants `wanted` logprobs; raw [rows, vocab_size] are the unmodified ones."""
    return [entry for entry in report_rows(raw, chosen, [wanted] * len(chosen)) if entry is not None]


def _is_plain_greedy(request: SampledRow) -> bool:
    return request.sampling.temperature == 0 and not needs_host(request)


def _has_penalties(p: SamplingParams) -> bool:
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
    return SampledTokens(token_ids, logprobs)


def _choose_rows(logits: torch.Tensor, requests: Sequence[SampledRow], eos_token_ids: tuple[int, ...]) -> torch.Tensor:
    """A token per row, [rows] int64."""
    _adjust(logits, requests, eos_token_ids)
    return _choose_limited(logits, requests)


def _choose_limited(logits: torch.Tensor, requests: Sequence[SampledRow]) -> torch.Tensor:
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


def _adjust(logits: torch.Tensor, requests: Sequence[SampledRow], eos_token_ids: tuple[int, ...]) -> None:
    """What changes the logits themselves, whether the choice is greedy or random."""
    _restrict(logits, requests)
    _mask_below_min_tokens(logits, requests, eos_token_ids)
    _add_biases(logits, requests)
    _penalise(logits, requests)


def _restrict(logits: torch.Tensor, requests: Sequence[SampledRow]) -> None:
    """Only allowed_token_ids, where there are any, and no token that would complete one of bad_words."""
    for row, request in enumerate(requests):
        p = request.sampling
        if p.allowed_token_ids:
            index = torch.tensor(p.allowed_token_ids, dtype=torch.int64, device=logits.device)
            kept = logits[row].index_select(0, index)
            logits[row].fill_(float("-inf")).index_copy_(0, index, kept)
        if p.bad_words:
            logits[row, _ends_of_bad_words(request)] = float("-inf")


def _ends_of_bad_words(request: SampledRow) -> list[int]:
    """Last tokens of the words of which the output has all the others just now."""
    output = request.token_ids[request.num_prompt_tokens :]
    return [
        word[-1]
        for word in request.sampling.bad_words
        if len(word) <= len(output) + 1 and tuple(output[len(output) + 1 - len(word) :]) == word[:-1]
    ]


def _add_biases(logits: torch.Tensor, requests: Sequence[SampledRow]) -> None:
    for row, request in enumerate(requests):
        bias = request.sampling.logit_bias
        if bias:
            index = torch.tensor(list(bias), dtype=torch.int64, device=logits.device)
            logits[row].index_add_(0, index, torch.tensor(list(bias.values()), device=logits.device))


def _mask_below_min_tokens(
    logits: torch.Tensor, requests: Sequence[SampledRow], eos_token_ids: tuple[int, ...]
) -> None:
    """A request below its min_tokens can choose no token that would end it."""
    rows: list[int] = []
    columns: list[int] = []
    for row, request in enumerate(requests):
        if request.num_output_tokens >= request.sampling.min_tokens:
            continue
        ends = [t for t in request.sampling.stop_token_ids if t < logits.shape[1]]
        ends += [] if request.sampling.ignore_eos else eos_token_ids
        rows += [row] * len(ends)
        columns += ends
    if rows:
        logits[rows, columns] = float("-inf")


def _penalise(logits: torch.Tensor, requests: Sequence[SampledRow]) -> None:
    """Presence, frequency and repetition penalties, for the rows that have any."""
    for row, request in enumerate(requests):
        p = request.sampling
        if not _has_penalties(p):
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


def _draw(logits: torch.Tensor, requests: Sequence[SampledRow]) -> torch.Tensor:
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


def _draw_by_kernel(logits: torch.Tensor, requests: Sequence[SampledRow]) -> torch.Tensor:
    """The choice in one Triton kernel, greedy rows too, which sorts nothing and does not wait for the device. A request
    without a seed takes one from torch's generator. Numbers differ from the CPU's; the distribution does not."""
    params = [request.sampling for request in requests]
    fresh = torch.randint(1 << 62, (len(params),)).tolist()
    seeds = [
        number if p.seed is None else zlib.crc32(f"{p.seed} {request.num_output_tokens}".encode())
        for number, p, request in zip(fresh, params, requests, strict=True)
    ]
    rest = [0] * (-len(params) % 4)  # every part starts on 16 bytes, as the kernel was compiled for
    parts = [
        torch.tensor(seeds + rest, dtype=torch.int64).view(torch.int32),
        *(
            torch.tensor(values + rest, dtype=torch.float32).view(torch.int32)
            for values in ([p.temperature for p in params], [p.top_p for p in params], [p.min_p for p in params])
        ),
        torch.tensor([p.top_k or logits.shape[1] for p in params] + rest, dtype=torch.int32),
    ]
    packed = send(torch.cat(parts), logits.device)  # one copy for all of them
    rows, size = len(params), len(params) + len(rest)
    own, temperature, top_p, min_p, top_k = (
        packed[first : first + count]
        for first, count in ((0, 2 * rows), *(((2 + part) * size, rows) for part in range(4)))
    )
    token_ids, _ = sample_triton(
        logits,
        temperature.view(torch.float32),
        top_k,
        top_p.view(torch.float32),
        min_p.view(torch.float32),
        own.view(torch.int64),
    )
    return token_ids


def _limit(logits: torch.Tensor, requests: Sequence[SampledRow]) -> None:
    """Temperature, then min-p, top-k and top-p: what a random choice is left with, -inf elsewhere."""
    params = [request.sampling for request in requests]
    device = logits.device
    logits.div_(torch.tensor([p.temperature for p in params], device=device).unsqueeze(1))
    if any(p.top_k or p.top_p < 1 or p.min_p for p in params):
        keep_likely_tokens(
            logits,
            top_k=torch.tensor([p.top_k or logits.shape[1] for p in params], dtype=torch.int64, device=device),
            top_p=torch.tensor([p.top_p for p in params], device=device),
            min_p=torch.tensor([p.min_p for p in params], device=device),
        )


def _generator(seed: int, position: int, device: torch.device) -> torch.Generator:
    """torch's CPU generator uses only the low 32 bits of its seed, so the whole key is hashed into them."""
    return torch.Generator(device=device).manual_seed(zlib.crc32(f"{seed} {position}".encode()))


def report_rows(raw: torch.Tensor, chosen: torch.Tensor, wanted: Sequence[int | None]) -> list[TokenLogprobs | None]:
    """The chosen token first, then the `wanted` most likely ones, per row; None where nothing is wanted."""
    most = max(count for count in wanted if count is not None)
    own = raw.gather(1, chosen.unsqueeze(1))
    ranks = (raw > own).sum(dim=1).add_(1).tolist()
    top_values, top_ids = raw.topk(most, dim=-1)
    rows = zip(
        wanted, chosen.tolist(), own.squeeze(1).tolist(), top_ids.tolist(), top_values.tolist(), ranks, strict=True
    )
    return [
        None if count is None else TokenLogprobs([token, *ids[:count]], [value, *values[:count]], rank)
        for count, token, value, ids, values, rank in rows
    ]

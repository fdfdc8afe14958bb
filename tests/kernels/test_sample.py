"""sample in the interpreter: the kept set equals sorting's, and draws follow the probabilities."""

from dataclasses import replace

import pytest
import torch
from trimtab_kernels.argmax import TILE_TOKENS
from trimtab_kernels.launch.arrivals import arrival_counters
from trimtab_kernels.launch.device_facts import H200
from trimtab_kernels.sample import MAX_CANDIDATES, sample_reference, sample_triton

ROWS = 3
LARGE = TILE_TOKENS + 1000
"""A vocabulary that two CTAs share, and that is large enough for the candidate path."""
ONE_PROGRAM = replace(H200, num_sms=1)


def limits(
    rows: int = ROWS, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, vocab: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.full((rows,), temperature),
        torch.full((rows,), top_k or vocab, dtype=torch.int32),
        torch.full((rows,), top_p),
        torch.full((rows,), min_p),
    )


@pytest.mark.parametrize("vocab", [1, 1000])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.0, 0, 1.0, 0.0),
        (0.7, 1, 1.0, 0.0),
        (1.3, 5, 1.0, 0.0),
        (1.0, 0, 0.9, 0.0),
        (1.0, 0, 1.0, 0.2),
        (2.0, 40, 0.5, 0.01),
        (0.5, 3, 0.99, 0.5),
    ],
)
def test_sample_kept_set_equals_sorting(vocab: int, temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    logits = torch.randn(ROWS, vocab + 3, generator=torch.Generator().manual_seed(vocab))[:, :vocab] * 3
    chosen = limits(temperature=temperature, top_k=min(top_k, vocab), top_p=top_p, min_p=min_p, vocab=vocab)
    check_kept(logits, *chosen)


def check_kept(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """Check the kept set and return the drawn tokens."""
    chosen = temperatures, top_k, top_p, min_p
    token_ids, thresholds = sample_triton(logits, *chosen, torch.arange(ROWS))
    kept = sample_reference(logits, *chosen)
    temperature = float(temperatures[0])
    scaled = logits.float() * (1 / temperature if temperature else 1.0)
    ours = (scaled >= thresholds.unsqueeze(1)) & (scaled > float("-inf"))
    # The two sum probabilities in different orders: at the edge, one token may differ, by less than 1e-5 of the mass.
    differs = (ours != kept).any(dim=1)
    edge = scaled.softmax(dim=-1)[ours != kept]
    assert int(differs.sum()) <= 1, "only the edge of a set may differ"
    assert edge.numel() == 0 or float(edge.max()) < 0.05
    assert bool(ours.gather(1, token_ids.unsqueeze(1)).all()), "a token was drawn from outside the set"
    assert not arrival_counters(logits.device, 8).any(), "the next launch counts from 0"
    return token_ids


def large_logits(spread: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(ROWS, LARGE, generator=torch.Generator().manual_seed(3)) * spread).to(dtype)


CASES = [
    pytest.param({"top_k": 50}, 3.0, id="among candidates: top-k"),
    pytest.param({"top_k": 50, "top_p": 0.8, "min_p": 0.01}, 3.0, id="among candidates: all limits"),
    pytest.param({"top_p": 0.9}, 5.0, id="among candidates: top-p, with only a sum for the other tokens"),
    pytest.param({"min_p": 0.1}, 3.0, id="among candidates: min-p"),
    pytest.param({"top_k": MAX_CANDIDATES + 1}, 3.0, id="in the whole row: top-k of more than there are"),
    pytest.param({"top_p": 0.95}, 0.5, id="in the whole row: top-p of a flat row"),
    pytest.param({"min_p": 0.01}, 0.5, id="in the whole row: min-p of a flat row"),
    pytest.param({"top_p": 0.5, "min_p": 0.001}, 0.5, id="in the whole row: top-p above a low min-p"),
]


@pytest.mark.parametrize(("wanted", "spread"), CASES)
def test_sample_large_vocabulary_equals_sorting(wanted: dict[str, float], spread: float) -> None:
    check_kept(large_logits(spread), *limits(vocab=LARGE, **wanted))  # type: ignore[arg-type]


@pytest.mark.parametrize(("wanted", "spread"), [*CASES, pytest.param({}, 3.0, id="no limits")])
def test_sample_result_does_not_depend_on_split(wanted: dict[str, float], spread: float) -> None:
    logits, chosen = large_logits(spread), limits(vocab=LARGE, **wanted)  # type: ignore[arg-type]
    several = sample_triton(logits, *chosen, torch.arange(ROWS))
    alone = sample_triton(logits, *chosen, torch.arange(ROWS), facts=ONE_PROGRAM)
    for one, other in zip(several, alone, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("wanted", [{"top_k": 50}, {"min_p": 0.1}, {"top_p": 0.9}])
def test_sample_among_candidates_equals_draw_over_row(wanted: dict[str, float]) -> None:
    """A token's random numbers are the same whether it is drawn among candidates or among all tokens."""
    logits, chosen = large_logits(5.0), limits(vocab=LARGE, **wanted)  # type: ignore[arg-type]
    token_ids, thresholds = sample_triton(logits, *chosen, torch.arange(ROWS))
    left = logits.masked_fill(logits < thresholds.unsqueeze(1), float("-inf"))
    plain, _ = sample_triton(left, *limits(vocab=LARGE), torch.arange(ROWS))
    assert token_ids.tolist() == plain.tolist()


@pytest.mark.parametrize("wanted", [{"top_k": 3}, {"top_p": 0.9}, {"top_k": 40, "top_p": 0.9, "min_p": 0.1}, {}])
def test_sample_draws_allowed_token_of_large_masked_row(wanted: dict[str, float]) -> None:
    logits = torch.full((ROWS, LARGE), float("-inf"))
    logits[:, [17, TILE_TOKENS, LARGE - 1]] = torch.tensor([1.0, 2.0, 1.5])
    check_kept(logits, *limits(vocab=LARGE, **wanted))  # type: ignore[arg-type]
    one = torch.full((ROWS, LARGE), float("-inf"))
    one[:, TILE_TOKENS + 1] = -3.0
    assert check_kept(one, *limits(vocab=LARGE, **wanted)).tolist() == [TILE_TOKENS + 1] * ROWS  # type: ignore[arg-type]


def test_sample_keeps_ties_beyond_candidate_limit() -> None:
    logits = torch.zeros(ROWS, LARGE)
    logits[:, 5] = -1.0
    check_kept(logits, *limits(vocab=LARGE, top_k=2))
    _, thresholds = sample_triton(logits, *limits(vocab=LARGE, top_k=2), torch.arange(ROWS))
    assert thresholds.tolist() == [0.0] * ROWS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", [{}, {"temperature": 0.0}, {"top_k": 50, "top_p": 0.9}])
def test_sample_reads_logits_in_their_own_dtype(wanted: dict[str, float], dtype: torch.dtype) -> None:
    logits, chosen = large_logits(3.0, dtype), limits(vocab=LARGE, **wanted)  # type: ignore[arg-type]
    ours = sample_triton(logits, *chosen, torch.arange(ROWS))
    widened = sample_triton(logits.float(), *chosen, torch.arange(ROWS))
    for one, other in zip(ours, widened, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("wanted", [{}, {"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.5}])
@pytest.mark.parametrize("vocab", [100, LARGE])
def test_sample_row_without_choice_returns_cause_as_logit(value: float, wanted: dict[str, float], vocab: int) -> None:
    logits = torch.full((ROWS, vocab), value)
    token_ids, _ = sample_triton(logits, *limits(vocab=vocab, **wanted), torch.arange(ROWS))  # type: ignore[arg-type]
    assert bool(((token_ids >= 0) & (token_ids < vocab)).all())
    assert not arrival_counters(logits.device, 8).any()


@pytest.mark.parametrize("wanted", [{}, {"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.5}])
@pytest.mark.parametrize("vocab", [100, LARGE])
def test_sample_nan_row_is_reported_for_any_ban(wanted: dict[str, float], vocab: int) -> None:
    """A ban of the first or last token (such as an early end) must not look as if the client had forbidden all
    tokens.
    """
    logits = torch.full((ROWS, vocab), float("nan"))
    logits[:, [0, vocab - 1]] = float("-inf")
    logits[1, 1:] = float("-inf")
    logits[1, vocab // 2] = float("nan")
    token_ids, _ = sample_triton(logits, *limits(vocab=vocab, **wanted), torch.arange(ROWS))  # type: ignore[arg-type]
    assert logits.gather(1, token_ids.unsqueeze(1)).isnan().all()


def test_sample_rows_of_all_kinds_share_launch() -> None:
    logits = large_logits(3.0)
    chosen = (
        torch.tensor([0.0, 1.0, 0.7]),
        torch.tensor([LARGE, LARGE, 40], dtype=torch.int32),
        torch.tensor([1.0, 1.0, 0.9]),
        torch.zeros(3),
    )
    together, thresholds = sample_triton(logits, *chosen, torch.arange(ROWS))
    for row in range(ROWS):
        own = [limit[row : row + 1] for limit in (*chosen, torch.arange(ROWS))]
        alone, threshold = sample_triton(logits[row : row + 1], *own)
        assert (int(together[row]), float(thresholds[row])) == (int(alone), float(threshold))
    assert int(together[0]) == int(logits[0].argmax())


def test_sample_vocabulary_of_several_blocks() -> None:
    logits = torch.randn(1, 4097, generator=torch.Generator().manual_seed(1)) * 3
    logits[0, 4096] = 20.0
    chosen = limits(1, temperature=2.0, top_k=40, vocab=4097)
    _, thresholds = sample_triton(logits, *chosen, torch.tensor([3]))
    assert torch.equal(logits / 2 >= thresholds.unsqueeze(1), sample_reference(logits, *chosen))
    greedy, _ = sample_triton(logits, *limits(1, temperature=0.0, vocab=4097), torch.tensor([3]))
    assert greedy.tolist() == [4096]


def test_sample_keeps_all_ties_at_threshold() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, -1.0, float("-inf")]]).repeat(ROWS, 1)
    _, thresholds = sample_triton(logits, *limits(top_k=2, vocab=6), torch.arange(ROWS))
    assert thresholds.tolist() == [2.0] * ROWS


def test_sample_never_draws_masked_tokens() -> None:
    logits = torch.full((ROWS, 50), float("-inf"))
    logits[:, 17] = -3.0
    token_ids, _ = sample_triton(logits, *limits(top_p=0.9, vocab=50), torch.arange(ROWS))
    assert token_ids.tolist() == [17] * ROWS


def test_sample_draws_follow_probabilities() -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.15, 0.1])
    rows = 200
    token_ids, _ = sample_triton(probabilities.log().repeat(rows, 1), *limits(rows, vocab=4), torch.arange(rows) * 7919)
    counts = torch.bincount(token_ids, minlength=4)
    chi_squared = float(((counts - rows * probabilities) ** 2 / (rows * probabilities)).sum())
    assert chi_squared < 16.3, "3 degrees of freedom: exceeded by chance once in a thousand; the seeds are fixed"


def test_sample_draw_does_not_depend_on_batch_position() -> None:
    logits = torch.randn(1, 300)
    alone, _ = sample_triton(logits, *limits(1, vocab=300), torch.tensor([42]))
    many, _ = sample_triton(logits.repeat(3, 1), *limits(3, vocab=300), torch.tensor([1, 42, 5]))
    assert int(many[1]) == int(alone[0])


def test_sample_rejects_wrong_dtypes() -> None:
    chosen = limits(vocab=10)
    with pytest.raises(ValueError, match="top_k int32"):
        sample_triton(torch.randn(ROWS, 10), chosen[0], chosen[1].long(), *chosen[2:], torch.arange(ROWS))

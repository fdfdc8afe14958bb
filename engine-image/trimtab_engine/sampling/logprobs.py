"""Log-probability reports of chosen tokens: their log-probabilities, ranks and the top tokens.

They are made where the logits are, as one tensor, and become plain values on the host, perhaps later.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from trimtab_engine.device.transfer import Mark, receive
from trimtab_engine.scheduling.sampling import TokenLogprobs


def score_rows(raw: torch.Tensor, chosen: torch.Tensor, most: int) -> torch.Tensor:
    """Log-probabilities raw [rows, vocab_size] float32 and the tokens chosen there -> [rows, 2 + 2 * most] int32:

    ```
    chosen's log-probability, most likely ones' (bits of float32) | chosen's rank, most likely tokens' ids
    ```
    A vocabulary of fewer tokens than are wanted is reported whole.
    """
    most = min(most, raw.shape[1])
    own = raw.gather(1, chosen.unsqueeze(1))
    ranks = (raw > own).sum(dim=1, keepdim=True).add_(1)
    values, ids = raw.topk(most, dim=-1)
    return torch.cat([own.view(torch.int32), values.view(torch.int32), ranks.int(), ids.int()], dim=1)


def reports_of(judged: torch.Tensor, chosen: Sequence[int], wanted: Sequence[int | None]) -> list[TokenLogprobs | None]:
    """Return judge_rows' results on the host: per row the chosen token first, then the `wanted` top tokens; None if
    none are wanted.
    """
    half = judged.shape[1] // 2
    values, ids = judged[:, :half].view(torch.float32).tolist(), judged[:, half:].tolist()
    return [
        None if count is None else TokenLogprobs([token, *own_ids[1 : 1 + count]], own_values[: 1 + count], own_ids[0])
        for count, token, own_values, own_ids in zip(wanted, chosen, values, ids, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class ScoresInFlight:
    """Reports of tokens that the host knows, a prompt's own ones, on their way to it."""

    arrived: Mark
    parts: list[tuple[torch.Tensor, list[int], list[int]]] = field(default_factory=list)
    """(judged, token ids, number of top tokens for each)."""

    def add(self, raw: torch.Tensor, chosen: torch.Tensor, token_ids: list[int], wanted: list[int]) -> None:
        """raw [rows, vocab_size] and chosen [rows], which are token_ids, on the device."""
        self.parts.append((receive(score_rows(raw, chosen, max(wanted))), token_ids, wanted))
        self.arrived.set()

    def result(self) -> list[TokenLogprobs]:
        """Wait for them."""
        self.arrived.wait()
        reports = [report for part in self.parts for report in reports_of(*part)]
        return [report for report in reports if report is not None]


def report_rows(raw: torch.Tensor, chosen: torch.Tensor, wanted: Sequence[int | None]) -> list[TokenLogprobs | None]:
    """Both at once. At least one row wants a report."""
    most = max(count for count in wanted if count is not None)
    return reports_of(score_rows(raw, chosen, most).cpu(), chosen.tolist(), wanted)


def report_logprobs(raw: torch.Tensor, chosen: torch.Tensor, wanted: int) -> list[TokenLogprobs]:
    """Return the reports of one request's rows with `wanted` logprobs; raw [rows, vocab_size] are the unmodified
    logits.
    """
    return [entry for entry in report_rows(raw, chosen, [wanted] * len(chosen)) if entry is not None]

"""Samples tokens of a whole step on the device without synchronisation: the same operations as the sampler, with token
counts kept on the device too. The host has already applied grammar masks to the logits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from trimtab_kernels.argmax import argmax
from trimtab_kernels.edit_logits import NONE, ban_tokens, edit_logits

from trimtab_engine.device.inference import in_inference_mode
from trimtab_engine.device.transfer import receive, send, send_together
from trimtab_engine.sampling.choice_columns import Choice, ChoiceColumns, Chooser, PlainRows, packed_parameters
from trimtab_engine.sampling.forbidden_tokens import Ban, bans_of
from trimtab_engine.sampling.logprobs import reports_of, score_rows
from trimtab_engine.sampling.sampler import ROWS_AT_ONCE, best_logits, choose_limited, draw_by_kernel
from trimtab_engine.sampling.token_table import DeviceRow, RowIndices, TokenTable
from trimtab_engine.scheduling.request import Request
from trimtab_engine.scheduling.sampling import Sampling, TokenLogprobs


@dataclass(frozen=True, slots=True)
class ReportsInFlight:
    """Log-probabilities of some rows, being copied to the host. `wanted`: number of top tokens for each."""

    rows: list[int]
    wanted: list[int]
    judged: torch.Tensor

    def put_into(self, reports: list[TokenLogprobs | None], token_ids: list[int]) -> None:
        """They have arrived."""
        found = reports_of(self.judged, [token_ids[row] for row in self.rows], self.wanted)
        for row, report in zip(self.rows, found, strict=True):
            reports[row] = report


@dataclass(frozen=True, slots=True)
class ChosenTokens:
    """One token per row, on the device, and its reports."""

    token_ids: torch.Tensor
    """[rows] int64."""
    best: torch.Tensor
    """[rows] float32: marks rows without a valid token (sampling/failures.py)."""
    reports: list[ReportsInFlight]


def likeliest(logits: torch.Tensor) -> ChosenTokens:
    """Result for plain greedy requests."""
    return ChosenTokens(*argmax(logits), [])


@dataclass(frozen=True, slots=True)
class Edit:
    """Edits of the logits in the step's row `index` before sampling."""

    row: DeviceRow
    index: int
    places: RowIndices | None
    bans: list[Ban]


class DeviceSampler:
    """Chooses the tokens of one step after another, in their order."""

    def __init__(
        self, vocab_size: int, eos_token_ids: tuple[int, ...], *, max_num_seqs: int, device: torch.device
    ) -> None:
        self._vocab_size, self._eos_token_ids, self._device = vocab_size, eos_token_ids, device
        self._table = TokenTable(vocab_size, max_num_seqs, device)
        self.draws_by_kernel = device.type == "cuda"
        self._columns: tuple[list[Request], ChoiceColumns | None] = ([], None)
        """Of the requests of the last call."""

    @property
    def num_bytes(self) -> int:
        """On the device."""
        return self._table.words.nbytes

    def can_sample(self, requests: Sequence[Request]) -> bool:
        """Return True if these requests can be rows of one step here."""
        return self._table.has_room_for([request for request in requests if not request.is_plain])

    def warm_up(self, last_tokens: torch.Tensor, dtype: torch.dtype) -> None:
        """Compile the kernels that edit logits, and the samplers for a model of this dtype, edited or not."""
        logits = torch.zeros(1, self._vocab_size, device=self._device)
        for own in (logits, logits.to(dtype)):
            argmax(own)
            if self.draws_by_kernel:
                choose_limited(own, [Choice(Sampling(temperature=1.0), 0)])
        zero = torch.zeros(1, dtype=torch.int32, device=self._device)
        none, half = zero + NONE, torch.full((1,), 0.5, device=self._device)
        ban_tokens(logits, zero, zero, none, zero, last_tokens)
        edit_logits(logits, self._table.words, zero, none, none, half, half, half)

    @in_inference_mode
    def sample(
        self, logits: torch.Tensor, rows: Sequence[DeviceRow] | PlainRows, last_tokens: torch.Tensor
    ) -> ChosenTokens:
        """logits [rows, vocab_size], which may be changed in place; last_tokens: those chosen last, where the rows'
        sources point.
        """
        if isinstance(rows, PlainRows):
            chosen = self._choose_plain(logits, rows)
            return ChosenTokens(chosen, best_logits(logits, chosen), [])
        logits = logits.float()
        edits = self._edits(rows)
        if not edits or all(row.sampling.logprobs is None for row in rows):
            return self._sample(logits, rows, 0, edits, last_tokens)
        # Reports are of the logits as they were: a few rows at a time, so that the copies stay small.
        parts = []
        for first in range(0, len(rows), ROWS_AT_ONCE):
            part = slice(first, first + ROWS_AT_ONCE)
            own = [edit for edit in edits if first <= edit.index < first + ROWS_AT_ONCE]
            parts.append(self._sample(logits[part], rows[part], first, own, last_tokens))
        return ChosenTokens(
            torch.cat([part.token_ids for part in parts]),
            torch.cat([part.best for part in parts]),
            [report for part in parts for report in part.reports],
        )

    def _edits(self, rows: Sequence[DeviceRow]) -> list[Edit]:
        """In row order, for rows that request any."""
        lent = self._table.assign_rows(rows)
        edits = []
        for index, row in enumerate(rows):
            p = row.request.sampling
            if p.min_tokens or p.bad_words or row.request in lent:
                bans = bans_of(
                    row.request,
                    eos_token_ids=self._eos_token_ids,
                    vocab_size=self._vocab_size,
                    has_unknown_token=row.source is not None,
                )
                edit = Edit(row, index, lent.get(row.request), list(bans))
                edits += [edit] if edit.bans or edit.places is not None else []
        return edits

    def _sample(
        self, logits: torch.Tensor, rows: Sequence[DeviceRow], first: int, edits: list[Edit], last_tokens: torch.Tensor
    ) -> ChosenTokens:
        """Some rows of a step, the first of which is its row `first`."""
        reported = [index for index, row in enumerate(rows) if row.sampling.logprobs is not None]
        before = logits.log_softmax(dim=-1) if edits and reported else None
        self._edit(logits, first, edits, last_tokens)
        chosen = self._choose(logits, rows)
        self._count(chosen, first, edits)
        reports = []
        for start in range(0, len(reported), ROWS_AT_ONCE):
            part = reported[start : start + ROWS_AT_ONCE]
            index = send(torch.tensor(part, dtype=torch.int64), self._device)
            raw = logits.index_select(0, index).log_softmax(dim=-1) if before is None else before.index_select(0, index)
            wanted = [rows[row].sampling.logprobs or 0 for row in part]
            judged = score_rows(raw, chosen.index_select(0, index), max(wanted))
            reports.append(ReportsInFlight([first + row for row in part], wanted, receive(judged)))
        return ChosenTokens(chosen, best_logits(logits, chosen), reports)

    def _choose(self, logits: torch.Tensor, rows: Sequence[DeviceRow]) -> torch.Tensor:
        """Greedy or random, when nothing is done to the logits any more."""
        if all(row.request.sampling.temperature == 0 for row in rows):
            return argmax(logits)[0]
        if self.draws_by_kernel:
            num_output_tokens = np.array([row.num_output_tokens for row in rows], np.int64)
            return draw_by_kernel(logits, self._columns_of([row.request for row in rows]), num_output_tokens)
        choosers: Sequence[Chooser] = rows
        return choose_limited(logits, choosers)

    def _choose_plain(self, logits: torch.Tensor, rows: PlainRows) -> torch.Tensor:
        if self.draws_by_kernel:
            columns = self._columns_of(rows.requests)
            return draw_by_kernel(logits, columns, rows.ends - columns.num_prompt_tokens)
        return choose_limited(logits, rows.choices())

    def _columns_of(self, requests: list[Request]) -> ChoiceColumns:
        """Return the sampling inputs of these requests, rebuilt only if the requests changed since the last call."""
        before, columns = self._columns
        if columns is None or before != requests:
            num_prompt_tokens = [request.num_prompt_tokens for request in requests]
            columns = ChoiceColumns.of(self._parameters_of(requests), num_prompt_tokens, self._device)
            self._columns = requests, columns
        return columns

    def _parameters_of(self, requests: Sequence[Request]) -> list[bytes]:
        """Return the values computed at a request's first call. The request keeps them, so that they end with it."""
        for request in requests:
            if not request.packed_parameters:
                request.packed_parameters = packed_parameters(request.sampling, self._vocab_size)
        return [request.packed_parameters for request in requests]

    def _edit(self, logits: torch.Tensor, first: int, edits: list[Edit], last_tokens: torch.Tensor) -> None:
        """Sample in at most two launches, for any parameters."""
        if not edits:
            return
        bans = [
            (edit.index - first, token, *_condition(edit.row, needed)) for edit in edits for token, needed in edit.bans
        ]
        placed = [(edit.index - first, edit.row.sampling, edit.places) for edit in edits if edit.places is not None]
        penalties = [(p.presence_penalty, p.frequency_penalty, p.repetition_penalty) for _, p, _ in placed]
        rows, tokens, sources, needed, edited, biases, counts, *weights = send_together(
            [
                *_columns(bans, 4, torch.int32),
                *_columns([(index, *places.table_rows) for index, _, places in placed], 3, torch.int32),
                *_columns(penalties, 3, torch.float32),
            ],
            self._device,
        )
        if bans:
            ban_tokens(logits, rows, tokens, sources, needed, last_tokens)
        if placed:
            edit_logits(logits, self._table.words, edited, biases, counts, *weights)

    def _count(self, chosen: torch.Tensor, first: int, edits: list[Edit]) -> None:
        """Count the chosen tokens of requests with counts."""
        counting = [
            (edit.index - first, edit.places.counts, edit.places)
            for edit in edits
            if edit.places is not None and edit.places.counts is not None
        ]
        if counting:
            columns = _columns([(index, row) for index, row, _ in counting], 2, torch.int64)
            indices, counts = send_together(columns, self._device)
            self._table.count([places for _, _, places in counting], counts, chosen.index_select(0, indices))


def _condition(row: DeviceRow, needed: int | None) -> tuple[int, int]:
    """Index and required value of the newest token; NONE if there is no condition."""
    if needed is None:
        return NONE, 0
    assert row.source is not None  # it is not known
    return row.source, needed


def _columns(rows: Sequence[Sequence[float]], width: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Values that belong together, one kind after another, however many there are."""
    columns = zip(*rows, strict=True) if rows else [()] * width
    return [torch.tensor(column, dtype=dtype) for column in columns]

"""Per-vocabulary-token state of requests on the device: a row of biases, written when a request is first sampled there,
and a row of counts, updated by each sampled token (trimtab_kernels/edit_logits.py).

A request keeps its rows until it ends or another request needs them. If it has lost them, or its last tokens were
sampled elsewhere, they are rewritten from its tokens. A request whose newest token is still in flight was in the
previous step and has kept its rows, so all tokens are known whenever rows are rewritten.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch
from trimtab_kernels.edit_logits import NONE

from trimtab_engine.device.transfer import write
from trimtab_engine.sampling.sampler import has_penalties
from trimtab_engine.scheduling.request import Request
from trimtab_engine.scheduling.sampling import Sampling

TABLE_BYTES = 128 << 20
"""Bytes of all rows: 256 of a vocabulary of 128k. Steps of requests that need more wait for the host."""
MOST_ROWS = 2  # of one request: biases and counts
ROW_MULTIPLE = 4  # tokens: rows start on 16 bytes
IN_OUTPUT, IN_PROMPT = 2, 1
"""Increments of a count for an output token, and for presence in the prompt."""


@dataclass(slots=True)
class DeviceRow:
    """A request whose next token is sampled on the device. `source`: index of its newest token among the last sampled
    tokens, if the host does not know it yet; None if it does.
    """

    request: Request
    source: int | None = None

    @property
    def sampling(self) -> Sampling:
        return self.request.sampling

    @property
    def num_tokens(self) -> int:
        return self.request.num_tokens + (self.source is not None)

    @property
    def num_output_tokens(self) -> int:
        return self.request.num_output_tokens + (self.source is not None)


@dataclass(slots=True)
class RowIndices:
    """A request's rows of the table. `num_counted`: how many of its tokens are in its counts."""

    biases: int | None
    counts: int | None
    num_counted: int = 0

    @property
    def rows(self) -> list[int]:
        return [row for row in (self.biases, self.counts) if row is not None]

    @property
    def table_rows(self) -> tuple[int, int]:
        """Kernel arguments: biases, counts."""
        return (
            NONE if self.biases is None else self.biases,
            NONE if self.counts is None else self.counts,
        )


def has_biases(p: Sampling) -> bool:
    """Return True if the edits are the same at every token."""
    return bool(p.logit_bias or p.allowed_tokens)


class TokenTable:
    """The rows and their owners. `words` [rows, vocab_size rounded up] int32."""

    def __init__(self, vocab_size: int, max_num_seqs: int, device: torch.device) -> None:
        width = -(-vocab_size // ROW_MULTIPLE) * ROW_MULTIPLE
        num_rows = min(MOST_ROWS * max_num_seqs, max(MOST_ROWS, TABLE_BYTES // (4 * width)))
        self.words = torch.zeros(num_rows, width, dtype=torch.int32, device=device)
        self._free = list(range(num_rows))
        self._lent: WeakKeyDictionary[Request, RowIndices] = WeakKeyDictionary()
        """Rows of requests, which this table does not keep alive."""
        self._two = torch.full((1,), IN_OUTPUT, dtype=torch.int32, device=device)

    def has_room_for(self, requests: Sequence[Request]) -> bool:
        """Return True if all of them can have rows at once. Most steps are small enough to skip the check."""
        num_rows: int = self.words.shape[0]
        if MOST_ROWS * len(requests) <= num_rows:
            return True
        return sum(_num_rows(request.sampling) for request in requests) <= num_rows

    def assign_rows(self, rows: Sequence[DeviceRow]) -> dict[Request, RowIndices]:
        """Return the row indices of requests that need one, up to date for the next launch."""
        asking = [row for row in rows if _num_rows(row.request.sampling)]
        if not asking:
            return {}
        missing = [row.request for row in asking if row.request not in self._lent]
        if missing:
            self._make_room(sum(_num_rows(request.sampling) for request in missing), {row.request for row in asking})
        for request in missing:
            p = request.sampling
            places = RowIndices(
                self._free.pop() if has_biases(p) else None, self._free.pop() if has_penalties(p) else None
            )
            self._lent[request] = places
            if places.biases is not None:
                write(self.words[places.biases], biases_of(p, self.words.shape[1]).view(torch.int32))
        for row in asking:
            places = self._lent[row.request]
            if places.counts is not None and places.num_counted != row.num_tokens:
                assert row.source is None, "its newest token was chosen here, and counted"
                write(self.words[places.counts], counts_of(row.request, self.words.shape[1]))
                places.num_counted = row.num_tokens
        return {row.request: self._lent[row.request] for row in asking}

    def count(self, places: Sequence[RowIndices], counts: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Their next tokens have been chosen. counts [n] int64: their rows of counts; token_ids [n] int64."""
        self.words.view(-1).index_add_(0, counts * self.words.shape[1] + token_ids, self._two.expand(len(places)))
        for own in places:
            own.num_counted += 1

    def _make_room(self, num_rows: int, asking: set[Request]) -> None:
        """Reclaim rows: from finished requests first, then from requests outside this step."""
        if len(self._free) >= num_rows:
            return
        lent = {row for places in self._lent.values() for row in places.rows}
        self._free = [row for row in range(self.words.shape[0]) if row not in lent]
        rest = [request for request in self._lent if request not in asking]
        for request in sorted(rest, key=lambda r: not r.status.is_finished):
            if len(self._free) >= num_rows and not request.status.is_finished:
                return
            self._free += self._lent.pop(request).rows


def _num_rows(p: Sampling) -> int:
    return has_biases(p) + has_penalties(p)


def biases_of(p: Sampling, width: int) -> torch.Tensor:
    """[width] float32: logit_bias, and -inf for tokens that allowed_tokens exclude."""
    biases = torch.zeros(width)
    if p.allowed_tokens:
        bits = np.unpackbits(np.frombuffer(p.allowed_tokens, np.uint8), bitorder="little", count=width)
        biases.masked_fill_(torch.from_numpy(bits) == 0, float("-inf"))
    if p.logit_bias:
        biases[list(p.logit_bias)] += torch.tensor(list(p.logit_bias.values()))
    return biases


def counts_of(request: Request, width: int) -> torch.Tensor:
    """[width] int32: how often each token is in its output, and whether it is in its prompt."""
    output = torch.tensor(request.token_ids[request.num_prompt_tokens :], dtype=torch.int64)
    prompt = torch.tensor(list(set(request.token_ids[: request.num_prompt_tokens])), dtype=torch.int64)
    counts = torch.zeros(width, dtype=torch.int32)
    counts.index_add_(0, output, torch.full_like(output, IN_OUTPUT, dtype=torch.int32))
    return counts.index_add_(0, prompt, torch.full_like(prompt, IN_PROMPT, dtype=torch.int32))

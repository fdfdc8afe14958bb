"""The two layers that are as wide as the vocabulary, split by its rows among tensor-parallel ranks."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from trimtab_kernels.native.matrix import StoredRows
from trimtab_kernels.native.quantised import QuantisedBlocks

from trimtab_engine.layers.linear import Linear
from trimtab_engine.parallel.groups import RankGroup

Placed = tuple[torch.Tensor, torch.Tensor]
"""Embeddings from outside the table: (index [rows] int64 in a step, embeddings [rows, hidden_size])."""
Table = torch.Tensor | StoredRows | QuantisedBlocks
"""[rows, hidden_size]: in the computing dtype, or as the checkpoint has it, in one part."""


class VocabularyEmbedding:
    """table: rows [first, first + rows) of the vocabulary. With a group each rank looks up its own, and they sum."""

    def __init__(self, table: Table, first: int, group: RankGroup | None) -> None:
        self._table, self._first, self._group = table, first, group

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[num_tokens] int64 -> [num_tokens, hidden_size]."""
        if self._group is None:
            return self._rows(token_ids)
        local = token_ids - self._first
        elsewhere = (local < 0) | (local >= self._table.shape[0])
        hidden = self._rows(local.masked_fill_(elsewhere, 0))
        return self._group.all_reduce(hidden.masked_fill_(elsewhere.unsqueeze(1), 0))

    def _rows(self, index: torch.Tensor) -> torch.Tensor:
        if isinstance(self._table, QuantisedBlocks):
            return self._table.select_rows(lambda rows: rows.index_select(0, index)).restored()
        if isinstance(self._table, StoredRows):
            return F.embedding(index, self._table.parts[0]).float()
        return F.embedding(index, self._table)


class LmHead:
    """Output layer: hidden states to logits. With a group the first rank gets the whole vocabulary, the others None."""

    def __init__(self, table: Table, vocab_size: int, group: RankGroup | None) -> None:
        if group is not None:  # the last part of the vocabulary may be short, but a gather wants equal shapes
            missing = -(-vocab_size // group.size) - table.shape[0]
            table = _padded(table, partial(_with_rows, missing=missing))
        self._linear, self._vocab_size, self._group = Linear(table), vocab_size, group

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Return [rows, hidden_size] -> [rows, vocab_size] float32; on CUDA with one rank, the dtype of the hidden
        states: the sampler there reads that dtype, and a float32 copy would cost three times as much as sampling.
        """
        logits = self._linear(hidden)
        if self._group is None:
            return logits if logits.is_cuda else logits.float()
        whole = self._group.gather_columns(logits.float())
        return None if whole is None else whole[:, : self._vocab_size]


def _padded(table: Table, pad: Callable[[torch.Tensor], torch.Tensor]) -> Table:
    if isinstance(table, QuantisedBlocks):
        return table.select_rows(pad)
    return pad(table) if isinstance(table, torch.Tensor) else StoredRows((pad(table.parts[0]),))


def _with_rows(tensor: torch.Tensor, missing: int) -> torch.Tensor:
    """Pad with this number of zero rows."""
    return F.pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, missing))

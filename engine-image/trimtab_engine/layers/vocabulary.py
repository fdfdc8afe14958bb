"""The two layers that are as wide as the vocabulary, split by its rows among tensor-parallel ranks."""

import torch
import torch.nn.functional as F

from trimtab_engine.layers.linear import Linear
from trimtab_engine.parallel.groups import RankGroup

Placed = tuple[torch.Tensor, torch.Tensor]
"""What takes its embedding from elsewhere: (index [rows] int64 in a step, embeddings [rows, hidden_size])."""


class VocabularyEmbedding:
    """table: rows [first, first + rows) of the vocabulary. With a group each rank looks up its own, and they sum."""

    def __init__(self, table: torch.Tensor, first: int, group: RankGroup | None) -> None:
        self._table, self._first, self._group = table, first, group

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[num_tokens] int64 -> [num_tokens, hidden_size]."""
        if self._group is None:
            return F.embedding(token_ids, self._table)
        local = token_ids - self._first
        elsewhere = (local < 0) | (local >= self._table.shape[0])
        hidden = F.embedding(local.masked_fill_(elsewhere, 0), self._table)
        return self._group.all_reduce(hidden.masked_fill_(elsewhere.unsqueeze(1), 0))


class LmHead:
    """Hidden states to logits. With a group the first rank gets those of the whole vocabulary, the others none."""

    def __init__(self, table: torch.Tensor, vocab_size: int, group: RankGroup | None) -> None:
        if group is not None:  # the last part of the vocabulary may be short, but a gather wants equal shapes
            rows = -(-vocab_size // group.size)
            table = F.pad(table, (0, 0, 0, rows - table.shape[0]))
        self._linear, self._vocab_size, self._group = Linear(table), vocab_size, group

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """[rows, hidden_size] -> [rows, vocab_size] float32."""
        logits = self._linear(hidden).float()
        if self._group is None:
            return logits
        whole = self._group.gather_columns(logits)
        return None if whole is None else whole[:, : self._vocab_size]

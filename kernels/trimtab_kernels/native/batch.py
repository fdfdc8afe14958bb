"""A step's inputs for the compiled layers: the rows of each sequence, and the block tables."""

from array import array
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class NativeBatch:
    """sequences [num_sequences, 4] int64: first row, number of rows, tokens before them, start of the block table in
    `tables` [number of blocks] int32.
    """

    sequences: torch.Tensor
    tables: torch.Tensor
    block_size: int


def build_native_batch(
    decodes: list[tuple[list[int], int]], chunks: list[tuple[list[int], int, int]], *, block_size: int
) -> NativeBatch:
    """Build a batch from decodes, (block table, context length with the new token), and chunks, (block table, tokens
    before, tokens now), in the order of their rows.
    """
    sequences, tables, row = array("q"), array("i"), 0
    for table, length in decodes:
        sequences.extend((row, 1, length - 1, len(tables)))
        tables.extend(table[: -(-length // block_size)])
        row += 1
    for table, before, now in chunks:
        sequences.extend((row, now, before, len(tables)))
        tables.extend(table[: -(-(before + now) // block_size)])
        row += now
    if not sequences:
        return NativeBatch(torch.empty(0, 4, dtype=torch.int64), torch.empty(0, dtype=torch.int32), block_size)
    return NativeBatch(
        torch.frombuffer(sequences, dtype=torch.int64).view(-1, 4),
        torch.frombuffer(tables, dtype=torch.int32),
        block_size,
    )

"""A step's inputs where graphs expect them: tensors on the device that never move, filled by one copy per step.

```
pinned host  | token_ids positions slots sources sampled | seq_lens query_starts | block tables of this step |
                                          one copy, not waited for
device       | token_ids positions slots sources sampled | seq_lens query_starts | landing place |
                 fixed places: what graphs read                            └─> tables [max_seqs, max_blocks]
```
There are two pinned buffers, taken in turn: the host writes one while the device may still read the other, and waits
only for a copy that was begun two steps ago.

Rows of padding, up to a graph's size, have slot -1 (nothing is written) and, as sequences, length 0 (nothing is read).
Where a sequence of padding has several rows its length is their number, and it reads block 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from struct import Struct
from typing import Any

import numpy as np
import torch
from trimtab_kernels.paged_batch import PagedBatch

from trimtab_engine.device.transfer import Mark, copy_to_device, pinned_bytes
from trimtab_engine.runner.graphs.plan import GraphKey
from trimtab_engine.scheduling.step_inputs import GroupInputs, StepInputs

Array = np.ndarray[Any, Any]
Feed = Sequence[tuple[int, int]]
"""(index in token_ids, row of the tokens that the step before sampled): known only on the device."""
NO_SLOT = -1
KNOWN = -1  # in `sources`: the token is in token_ids


@dataclass(frozen=True, slots=True)
class Capacity:
    """The largest step that fits. `max_blocks`: of one sequence's block table."""

    max_tokens: int
    max_seqs: int
    max_rows: int
    max_blocks: int

    @property
    def longs(self) -> dict[str, int]:
        """int64 values by name."""
        # Even counts: every part starts on 16 bytes, as kernels were compiled for.
        tokens, rows = self.max_tokens + self.max_tokens % 2, self.max_rows + self.max_rows % 2
        return {"token_ids": tokens, "positions": tokens, "slots": tokens, "sources": tokens, "sampled": rows}

    @property
    def ints(self) -> dict[str, int]:
        """int32 values by name. The block tables of a step come last, as many as there are."""
        tables = self.max_seqs * self.max_blocks
        return {"seq_lens": self.max_seqs, "query_starts": self.max_seqs + 1, "packed_tables": tables}


class StepBuffers:
    """The inputs of one step at a time, for steps up to `capacity`, of a model whose layers are one KV group."""

    def __init__(self, capacity: Capacity, device: torch.device) -> None:
        self._capacity = capacity
        num_longs, num_ints = sum(capacity.longs.values()), sum(capacity.ints.values())
        size = 8 * num_longs + 4 * num_ints
        self._fixed_bytes = size - 4 * capacity.ints["packed_tables"]
        self._bytes = torch.zeros(size, dtype=torch.uint8, device=device)
        self._hosts = [_Host(size, capacity, device) for _ in range(2)]
        self._turn = 0
        self.longs = _views(self._bytes[: 8 * num_longs].view(torch.int64), capacity.longs)
        self.ints = _views(self._bytes[8 * num_longs :].view(torch.int32), capacity.ints)
        self._tables = torch.zeros(capacity.max_seqs, capacity.max_blocks, dtype=torch.int32, device=device)
        self._uniform_starts: dict[int, torch.Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """On the device."""
        return self._bytes.nbytes + self._tables.nbytes

    def fill(self, inputs: StepInputs, feed: Feed, key: GraphKey | None, block_size: int) -> PagedBatch:
        """Write a step's inputs and start their copy. Returns the step as attention takes it: with `key` up to its
        size. Raises ValueError where the step is larger than the capacity."""
        own = inputs.groups[0]
        num_tokens, num_seqs = len(inputs.token_ids), len(own.decodes) + len(own.chunks)
        if num_tokens > self._capacity.max_tokens or num_seqs > self._capacity.max_seqs:
            raise ValueError(f"{num_tokens} tokens of {num_seqs} sequences do not fit {self._capacity}")
        host = self._next_host()
        rows = num_tokens if key is None else key.num_tokens
        host.write_tokens(inputs, feed, rows)
        per_sequence = None if key is None else key.tokens_per_sequence
        padded_seqs = num_seqs if per_sequence is None else rows // per_sequence
        width = host.write_sequences(own, padded_seqs, per_sequence or 1, block_size)
        used = self._fixed_bytes + 4 * padded_seqs * width
        copy_to_device(self._bytes[:used], host.bytes[:used])
        host.copied.set()
        if padded_seqs and width:
            packed = self.ints["packed_tables"][: padded_seqs * width].view(padded_seqs, width)
            self._tables[:padded_seqs, :width].copy_(packed)
        if per_sequence is not None:
            return self.uniform_batch(rows, per_sequence, 0)
        return self._batch(num_tokens, own)

    def uniform_batch(self, rows: int, tokens_per_sequence: int, max_context: int) -> PagedBatch:
        """A batch of equal sequences, as a whole-decode graph reads it; `max_context` bounds their lengths."""
        num_seqs = rows // tokens_per_sequence
        tables, lengths = self._tables[:num_seqs], self.ints["seq_lens"][:num_seqs]
        if tokens_per_sequence == 1:
            return PagedBatch(rows, num_seqs, tables, lengths, self.ints["query_starts"][:1], max_context, 0)
        starts = self._uniform_starts.get(tokens_per_sequence)
        if starts is None:
            most = self._capacity.max_seqs + 1
            starts = torch.arange(most, dtype=torch.int32, device=self._bytes.device) * tokens_per_sequence
            self._uniform_starts[tokens_per_sequence] = starts
        return PagedBatch(rows, 0, tables, lengths, starts[: num_seqs + 1], 0, tokens_per_sequence)

    def _batch(self, num_tokens: int, inputs: GroupInputs) -> PagedBatch:
        """Any mix of decodes and chunks, of exactly the step's size."""
        num_decodes = len(inputs.decodes)
        num_seqs = num_decodes + len(inputs.chunks)
        return PagedBatch(
            num_tokens=num_tokens,
            num_decodes=num_decodes,
            block_tables=self._tables[:num_seqs],
            seq_lens=self.ints["seq_lens"][:num_seqs],
            query_starts=self.ints["query_starts"][: len(inputs.chunks) + 1],
            max_decode_len=max((length for _, length in inputs.decodes), default=0),
            max_query_len=max((now for _, _, now in inputs.chunks), default=0),
        )

    def _next_host(self) -> "_Host":
        self._turn = 1 - self._turn
        host = self._hosts[self._turn]
        host.copied.wait()
        return host


class _Host:
    """One pinned buffer, and views of it that plain lists are written to."""

    def __init__(self, size: int, capacity: Capacity, device: torch.device) -> None:
        self.bytes = pinned_bytes(size, device)
        self.copied = Mark(device)
        num_longs = sum(capacity.longs.values())
        whole = self.bytes.numpy()
        self._longs = _arrays(whole[: 8 * num_longs].view(np.int64), capacity.longs)
        self._ints = _arrays(whole[8 * num_longs :].view(np.int32), capacity.ints)

    def write_tokens(self, inputs: StepInputs, feed: Feed, rows: int) -> None:
        """Token by token, padded to `rows`."""
        num_tokens = len(inputs.token_ids)
        for name, values, padding in (
            ("token_ids", inputs.token_ids, 0),
            ("positions", inputs.positions, 0),
            ("slots", inputs.groups[0].slots, NO_SLOT),
        ):
            array = self._longs[name]
            array[:num_tokens] = values
            array[num_tokens:rows] = padding
        sources = self._longs["sources"]
        sources[:rows] = KNOWN
        for index, row in feed:
            sources[index] = row
        self._longs["sampled"][: len(inputs.sampled)] = inputs.sampled

    def write_sequences(self, inputs: GroupInputs, padded_seqs: int, padding_length: int, block_size: int) -> int:
        """Sequence by sequence, padded to `padded_seqs`. Returns the width of the block tables."""
        tables = [table for table, _ in inputs.decodes] + [table for table, _, _ in inputs.chunks]
        lengths = [length for _, length in inputs.decodes] + [before + now for _, before, now in inputs.chunks]
        num_seqs = len(lengths)
        own = self._ints["seq_lens"]
        own[:num_seqs] = lengths
        own[num_seqs:padded_seqs] = padding_length if padding_length > 1 else 0
        starts = self._ints["query_starts"]
        starts[0] = 0
        starts[1 : len(inputs.chunks) + 1] = np.cumsum([now for _, _, now in inputs.chunks], dtype=np.int32)
        counts = [-(-length // block_size) for length in lengths]
        width = max(counts, default=0)
        if padded_seqs > num_seqs and padding_length > 1:
            width = max(width, -(-padding_length // block_size))
        packed = self._ints["packed_tables"]
        packed[num_seqs * width : padded_seqs * width] = 0
        for row, (table, count) in enumerate(zip(tables, counts, strict=True)):
            _int32s(count).pack_into(packed.data, 4 * width * row, *table[:count])
        return width


@cache
def _int32s(count: int) -> Struct:
    """Writes plain integers in half the time that numpy needs to look at each."""
    return Struct(f"{count}i")


def _views(whole: torch.Tensor, sizes: dict[str, int]) -> dict[str, torch.Tensor]:
    return {name: whole[first:last] for name, first, last in _places(sizes)}


def _arrays(whole: Array, sizes: dict[str, int]) -> dict[str, Array]:
    return {name: whole[first:last] for name, first, last in _places(sizes)}


def _places(sizes: dict[str, int]) -> list[tuple[str, int, int]]:
    """Name, first and last + 1 of values that lie in a row."""
    lasts = list(accumulate(sizes.values()))
    return [(name, last - size, last) for (name, size), last in zip(sizes.items(), lasts, strict=True)]

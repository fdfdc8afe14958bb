"""Fixed-address device tensors for step inputs, filled by one copy per step.

```
pinned host  | token_ids positions slots sources sampled | seq_lens query_starts | slots | new blocks and their indices|
                                          one asynchronous copy
device       | token_ids positions slots sources sampled | seq_lens query_starts | slots | new blocks and their indices|
                 fixed addresses, read by graphs                                     │         └─> rows of all slots
                                                           tables [max_seqs, max_blocks] <─┘ the rows of this step
```
Block tables stay on the device (device_block_tables.py): new blocks are written to the slots' rows, then the rows of
the step's sequences are gathered in order. Both happen on the device.

KV slots, lengths, table slots and tables exist per KV group: if a window has freed blocks, a table and its counts start
after them. Groups with chunked attention also have the number of tokens before each table (`gone`).

Two pinned buffers alternate: the host writes one while the device may still read the other, and waits only for a copy
started two steps ago.

If adapters are served, each row also has the slot of its adapter (`adapters`), or -1.

Padding rows, up to a graph's size, have slot -1 (nothing is written); padding sequences have length 0 (nothing is
read). A padding sequence with several rows has their number as its length and reads block 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import numpy as np
import torch
from trimtab_kernels.lora import NONE
from trimtab_kernels.paged_batch import PagedBatch

from trimtab_engine.device.transfer import Leading, Mark, copy_to_device, pinned_bytes, send_together
from trimtab_engine.runner.decode_step import KNOWN, DecodeStep
from trimtab_engine.runner.graphs.device_block_tables import DeviceBlockTables, NewBlocks, merge_new_blocks
from trimtab_engine.runner.graphs.plan import GraphKey
from trimtab_engine.scheduling.step_inputs import GroupInputs, StepInputs

Array = np.ndarray[Any, Any]
Feed = Sequence[tuple[int, int]]
"""(index in token_ids, row of the tokens that the step before sampled): known only on the device."""
NO_SLOT = -1
NEW_BLOCK_BYTES = 8 + 4  # its place, int64, and itself, int32
NEW_PER_SEQUENCE, MORE_NEW = 2, 1024  # new blocks in a step's copy; larger numbers, from prompts, are copied separately
PER_GROUP = ("seq_lens", "table_slots", "gone")
"""The int32 values that each KV group has."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """Size limits of a step. `max_blocks`: blocks of a sequence's table, per KV group; `chunked`: groups with chunked
    attention; `num_axes`: position axes per token.
    """

    max_tokens: int
    max_seqs: int
    max_rows: int
    max_blocks: tuple[int, ...]
    chunked: frozenset[int] = frozenset()
    num_axes: int = 1
    with_adapters: bool = False

    @property
    def num_groups(self) -> int:
        return len(self.max_blocks)

    @property
    def max_new_blocks(self) -> int:
        """Number of new blocks in the step's single copy."""
        return NEW_PER_SEQUENCE * self.max_seqs * self.num_groups + MORE_NEW

    @property
    def longs(self) -> dict[str, int]:
        """int64 values by name."""
        # Even counts: every part starts on 16 bytes, as kernels were compiled for.
        tokens, rows = self.max_tokens + self.max_tokens % 2, self.max_rows + self.max_rows % 2
        positions, slots = tokens * self.num_axes, self.num_groups * tokens  # one axis, or group, after the other
        return {"token_ids": tokens, "positions": positions, "slots": slots, "sources": tokens, "sampled": rows}

    @property
    def ints(self) -> dict[str, int]:
        """int32 values by name."""
        seqs = -(-self.max_seqs // 4) * 4  # likewise
        of_groups = self.num_groups * seqs
        gone = of_groups if self.chunked else 0
        adapters = -(-self.max_tokens // 4) * 4 if self.with_adapters else 0
        return {
            "seq_lens": of_groups, "query_starts": seqs + 4, "table_slots": of_groups, "gone": gone,
            "adapters": adapters,
        }  # fmt: skip


class StepBuffers:
    """The inputs of one step at a time, for steps up to `capacity`."""

    def __init__(self, capacity: Capacity, seated: DeviceBlockTables, device: torch.device) -> None:
        self._capacity, self._seated = capacity, seated
        num_longs, num_ints = sum(capacity.longs.values()), sum(capacity.ints.values())
        self._fixed_bytes = 8 * num_longs + 4 * num_ints
        size = self._fixed_bytes + NEW_BLOCK_BYTES * capacity.max_new_blocks
        self._bytes = torch.zeros(size, dtype=torch.uint8, device=device)
        self._hosts = [_Host(size, capacity, device) for _ in range(2)]
        self._turn = 0
        self.longs = _views(self._bytes[: 8 * num_longs].view(torch.int64), capacity.longs)
        self.sampled = Leading(self.longs["sampled"])
        self.ints = _views(self._bytes[8 * num_longs : self._fixed_bytes].view(torch.int32), capacity.ints)
        self.slots = self.longs["slots"].view(capacity.num_groups, -1)
        """[KV groups, tokens]"""
        self._per_group = {name: self.ints[name].view(capacity.num_groups, -1) for name in PER_GROUP}
        self._tables = [
            torch.zeros(capacity.max_seqs, width, dtype=torch.int32, device=device) for width in capacity.max_blocks
        ]
        self._uniform: dict[tuple[int, int], list[PagedBatch]] = {}
        """Cached batches of uniform sequences: their metadata and addresses do not change."""

    def positions(self, rows: int) -> torch.Tensor:
        """[rows] int64; with several axes [num_axes, rows]."""
        own, num_axes = self.longs["positions"], self._capacity.num_axes
        return own[:rows] if num_axes == 1 else own.view(num_axes, -1)[:, :rows]

    @property
    def num_bytes(self) -> int:
        """On the device, but for the seated tables, which several buffers share."""
        return self._bytes.nbytes + sum(tables.nbytes for tables in self._tables)

    def fill(
        self, inputs: StepInputs | DecodeStep, feed: Feed, key: GraphKey | None, block_size: int
    ) -> list[PagedBatch]:
        """Write a step's inputs and start their copy. Returns the step as attention takes it, per KV group: with `key`
        up to its size. Raises ValueError where the step is larger than the capacity.
        """
        groups = sequences_of(inputs, self._capacity)
        num_tokens, num_seqs = inputs.num_tokens, len(groups[0].tables)
        if num_tokens > self._capacity.max_tokens or num_seqs > self._capacity.max_seqs:
            raise ValueError(f"{num_tokens} tokens of {num_seqs} sequences do not fit {self._capacity}")
        host = self._next_host()
        rows = num_tokens if key is None else key.num_tokens
        host.write_tokens(inputs, feed, rows)
        per_sequence = None if key is None else key.tokens_per_sequence
        padded_seqs = num_seqs if per_sequence is None else rows // per_sequence
        padding_length = per_sequence if per_sequence is not None and per_sequence > 1 else 0
        least_width = -(-padding_length // block_size) if padded_seqs > num_seqs else 0
        if key is not None and key.with_adapters:
            host.write_adapters(inputs, rows)
        host.write_starts(groups[0].chunks)
        news, widths = [], []
        for number, own in enumerate(groups):
            newest, offsets = np.divmod(own.lengths - 1, block_size)  # each one's newest token: its block, its place
            counts = newest + 1
            most = int(counts.max(initial=0))
            if most > self._capacity.max_blocks[number]:  # they would overwrite the next slot's row
                raise ValueError(f"a table of {most} blocks does not fit {self._capacity}")
            table_slots, new = self._seated.table_slot(number, own.tables, counts)
            decodes = slice(own.num_decodes)
            blocks = self._seated.blocks_of(number, table_slots[decodes], newest[decodes])
            host.write_slots(number, own, rows, blocks * block_size + offsets[decodes], block_size)
            host.write_sequences(number, own, padded_seqs, padding_length)
            host.write_table_slots(number, table_slots, self._seated.padding_table_slot, padded_seqs)
            news.append(new)
            widths.append(max(most, least_width))
        self._to_device(host, merge_new_blocks(news), padded_seqs, widths)
        if per_sequence is not None:
            return self.uniform_batches(rows, per_sequence)
        return self._batches(num_tokens, groups[0])

    def _to_device(self, host: "_Host", new: NewBlocks, num_seqs: int, widths: Sequence[int]) -> None:
        """Start the copy of the host's buffer and the device work that follows it."""
        count = len(new)
        travels_along = count <= self._capacity.max_new_blocks
        used = self._fixed_bytes + (NEW_BLOCK_BYTES * count if travels_along else 0)
        if travels_along:
            host.write_new(new, self._fixed_bytes)
        copy_to_device(self._bytes[:used], host.bytes[:used])
        host.copied.set()
        if travels_along:
            middle = self._fixed_bytes + 8 * count
            places = self._bytes[self._fixed_bytes : middle].view(torch.int64)
            blocks = self._bytes[middle:used].view(torch.int32)
        else:
            told = [torch.tensor(new.places), torch.tensor(new.blocks)]
            places, blocks = send_together(told, self._bytes.device)
        if count:
            self._seated.whole.index_copy_(0, places, blocks)
        for group, width in enumerate(widths):
            if num_seqs and width:
                rows, tables = self._seated.rows[group][:, :width], self._tables[group][:num_seqs, :width]
                torch.index_select(rows, 0, self._per_group["table_slots"][group][:num_seqs], out=tables)

    def uniform_batches(self, rows: int, tokens_per_sequence: int) -> list[PagedBatch]:
        """Return per KV group a batch of equally many rows per sequence, as a whole-decode graph reads it."""
        key = rows, tokens_per_sequence
        batches = self._uniform.get(key)
        if batches is None:
            batches = self._uniform[key] = self._new_uniform_batches(*key)
        return batches

    def _new_uniform_batches(self, rows: int, tokens_per_sequence: int) -> list[PagedBatch]:
        num_seqs = rows // tokens_per_sequence
        if tokens_per_sequence == 1:
            return self._views_of(rows, num_seqs, num_seqs, self.ints["query_starts"][:1], 0)
        starts = torch.arange(num_seqs + 1, dtype=torch.int32, device=self._bytes.device) * tokens_per_sequence
        return self._views_of(rows, num_seqs, 0, starts, tokens_per_sequence)

    def _batches(self, num_tokens: int, own: "Sequences") -> list[PagedBatch]:
        """Return batches for any mix of decodes and chunks, of exactly the step's size."""
        starts = self.ints["query_starts"][: len(own.chunks) + 1]
        longest = max((now for _, _, now in own.chunks), default=0)
        return self._views_of(num_tokens, len(own.tables), own.num_decodes, starts, longest)

    def _views_of(
        self, num_tokens: int, num_seqs: int, num_decodes: int, query_starts: torch.Tensor, max_query_len: int
    ) -> list[PagedBatch]:
        lengths, gone = self._per_group["seq_lens"], self._per_group["gone"]
        return [
            PagedBatch(
                num_tokens=num_tokens,
                num_decodes=num_decodes,
                block_tables=tables[:num_seqs],
                seq_lens=lengths[group][:num_seqs],
                query_starts=query_starts,
                max_query_len=max_query_len,
                gone=gone[group][:num_seqs] if group in self._capacity.chunked else None,
            )
            for group, tables in enumerate(self._tables)
        ]

    def _next_host(self) -> "_Host":
        self._turn = 1 - self._turn
        host = self._hosts[self._turn]
        host.copied.wait()
        return host


@dataclass(frozen=True, slots=True)
class Sequences:
    """A step's sequences in one KV group, decodes first: block tables, lengths [sequences] including new tokens, and
    optionally the tokens freed before each table.
    """

    tables: list[list[int]]
    lengths: Array
    num_decodes: int
    chunks: Sequence[tuple[list[int], int, int]]
    gone: Array | list[int] | None = None


def sequences_of(inputs: StepInputs | DecodeStep, capacity: Capacity) -> list[Sequences]:
    """Return the sequences per KV group. Inputs without sequences have no groups."""
    if isinstance(inputs, DecodeStep):
        lengths, count = inputs.positions + 1, inputs.num_tokens
        return [
            Sequences(own.tables, lengths if own.gone is None else lengths - own.gone, count, (), own.gone)
            for own in inputs.groups
        ]
    groups = inputs.groups if inputs.num_tokens else inputs.groups[:1] * capacity.num_groups
    return [
        _sequences(own, inputs.gone(own) if number in capacity.chunked else None) for number, own in enumerate(groups)
    ]


def _sequences(own: GroupInputs, gone: list[int] | None) -> Sequences:
    lengths = [length for _, length in own.decodes] + [before + now for _, before, now in own.chunks]
    tables = [table for table, _ in own.decodes] + [table for table, _, _ in own.chunks]
    return Sequences(tables, np.array(lengths, np.int64), len(own.decodes), own.chunks, gone)


class _Host:
    """One pinned buffer, and its views for writing plain lists."""

    def __init__(self, size: int, capacity: Capacity, device: torch.device) -> None:
        self.bytes = pinned_bytes(size, device)
        self.copied = Mark(device)
        num_longs = sum(capacity.longs.values())
        self._whole = whole = self.bytes.numpy()
        last = 8 * num_longs + 4 * sum(capacity.ints.values())
        self._longs = _arrays(whole[: 8 * num_longs].view(np.int64), capacity.longs)
        self._positions = self._longs["positions"].reshape(capacity.num_axes, -1)
        self._ints = _arrays(whole[8 * num_longs : last].view(np.int32), capacity.ints)
        self._slots = self._longs["slots"].reshape(capacity.num_groups, -1)
        self._per_group = {name: self._ints[name].reshape(capacity.num_groups, -1) for name in PER_GROUP}
        self._chunked = capacity.chunked

    def write_tokens(self, inputs: StepInputs | DecodeStep, feed: Feed, rows: int) -> None:
        """Write token by token, padded to `rows`."""
        num_tokens, token_ids, positions = inputs.num_tokens, self._longs["token_ids"], self._positions
        token_ids[:num_tokens] = inputs.token_ids
        token_ids[num_tokens:rows] = 0
        positions[:, :num_tokens] = inputs.rope_positions
        positions[:, num_tokens:rows] = 0
        sources = self._longs["sources"]
        sources[:rows] = KNOWN
        if isinstance(inputs, DecodeStep):
            sources[:num_tokens] = inputs.sources
        elif feed:
            pairs = np.fromiter(chain.from_iterable(feed), np.int64, 2 * len(feed)).reshape(-1, 2)
            sources[pairs[:, 0]] = pairs[:, 1]
        self._longs["sampled"][: inputs.num_sampled] = inputs.sampled

    def write_adapters(self, inputs: StepInputs | DecodeStep, rows: int) -> None:
        """Write the slot of each row's adapter, padded to `rows`."""
        own = self._ints["adapters"]
        own[:rows] = NONE
        if isinstance(inputs, DecodeStep):
            own[: inputs.num_tokens] = NONE if inputs.by.adapters is None else inputs.by.adapters
            return
        for first, count, slot in inputs.adapters:
            own[first : first + count] = slot

    def write_slots(self, group: int, own: Sequences, rows: int, of_decodes: Array, block_size: int) -> None:
        """Write the KV slot of each token, padded to `rows`."""
        slots, count = self._slots[group], len(of_decodes)
        slots[:count] = of_decodes
        if own.chunks:
            of_chunks = GroupInputs([], list(own.chunks)).slots(block_size)
            slots[count : count + len(of_chunks)] = of_chunks
            count += len(of_chunks)
        slots[count:rows] = NO_SLOT

    def write_sequences(self, group: int, own: Sequences, padded_seqs: int, padding_length: int) -> None:
        """Write sequence by sequence, padded to `padded_seqs`."""
        lengths, num_seqs = self._per_group["seq_lens"][group], len(own.tables)
        lengths[:num_seqs] = own.lengths
        lengths[num_seqs:padded_seqs] = padding_length
        if group in self._chunked:
            gone = self._per_group["gone"][group]
            gone[:num_seqs] = own.gone
            gone[num_seqs:padded_seqs] = 0

    def write_starts(self, chunks: Sequence[tuple[list[int], int, int]]) -> None:
        """Write the first row of each chunk, equal in all groups."""
        starts = self._ints["query_starts"]
        starts[0] = 0
        if chunks:
            starts[1 : len(chunks) + 1] = np.cumsum([now for _, _, now in chunks], dtype=np.int32)

    def write_table_slots(self, group: int, table_slots: Array, padding_table_slot: int, padded_seqs: int) -> None:
        """Write the table slots of the step's sequences."""
        own, num_seqs = self._per_group["table_slots"][group], len(table_slots)
        own[:num_seqs] = table_slots
        own[num_seqs:padded_seqs] = padding_table_slot

    def write_new(self, new: NewBlocks, first_byte: int) -> None:
        """Append new blocks: indices first, then block ids."""
        middle, last = first_byte + 8 * len(new), first_byte + NEW_BLOCK_BYTES * len(new)
        self._whole[first_byte:middle].view(np.int64)[:] = new.places
        self._whole[middle:last].view(np.int32)[:] = new.blocks


def _views(whole: torch.Tensor, sizes: dict[str, int]) -> dict[str, torch.Tensor]:
    return {name: whole[first:last] for name, first, last in _places(sizes)}


def _arrays(whole: Array, sizes: dict[str, int]) -> dict[str, Array]:
    return {name: whole[first:last] for name, first, last in _places(sizes)}


def _places(sizes: dict[str, int]) -> list[tuple[str, int, int]]:
    """Return name, start and end of consecutive values."""
    lasts = list(accumulate(sizes.values()))
    return [(name, last - size, last) for (name, size), last in zip(sizes.items(), lasts, strict=True)]
